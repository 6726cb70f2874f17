"""BM25 search over words: the index is built and stored by bm25s, and searched through memory maps.

Invariant: queries are tokenised exactly like passages. Hits are ordered by score, and by row if scores are equal; a passage
that shares no word with the query is not a hit.

Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), in Lucene's form.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import regex

from etude.errors import ConfigError, MissingExtraError
from etude.retrieval.options import BuildOptions

Ranking = list[tuple[int, float]]
"""(row, score) of the best rows, best first."""

TOKENIZER = "words+cjk-2"
"""Names what `word_splitter` does, in an index's manifest; another name is another tokeniser."""

UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_WORD = regex.compile(rf"(?V1)(?P<unspaced>{UNSPACED}+)|[\w--{UNSPACED}]{{2,}}")
_ASCII_WORD = regex.compile(r"[a-z0-9_]{2,}")
_HAN = regex.compile(r"\p{Han}")
_ARRAYS = ("data", "indices", "indptr")


def load_bm25s() -> Any:
    """Imports bm25s.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import bm25s
    except ImportError as error:
        raise MissingExtraError("BM25 search", "retrieval") from error
    return bm25s


def word_splitter(options: BuildOptions) -> Callable[[str], list[str]]:
    """Returns the tokeniser of passages and queries: words of at least two characters, in lower case, without stop words,
    stemmed; of text in a script without spaces between words, all pairs of adjacent characters, and each Han character.

    Raises:
        ConfigError: there is no such stemmer.
        MissingExtraError: the stemmer's library is not installed.
    """
    stop = frozenset(load_bm25s().stopwords.STOPWORDS_EN if options.stopwords == "english" else ())
    stem = _stemmer(options.stemmer)

    def words(text: str) -> list[str]:
        found = [word for word in _split(text) if word not in stop]
        return stem(found) if stem else found

    return words


def _split(text: str) -> list[str]:
    if text.isascii():  # the same words, in a third of the time
        return _ASCII_WORD.findall(text.lower())
    found: list[str] = []
    for match in _WORD.finditer(unicodedata.normalize("NFKC", text).lower()):
        run = match[0]
        if match["unspaced"]:
            found += [*map("".join, itertools.pairwise(run)), *(_HAN.findall(run) if len(run) > 1 else run)]
        else:
            found.append(run)
    return found


def _stemmer(language: str) -> Callable[[list[str]], list[str]] | None:
    if language == "none":
        return None
    try:
        import Stemmer
    except ImportError as error:
        raise MissingExtraError("stemming", "retrieval") from error
    try:
        return Stemmer.Stemmer(language).stemWords
    except KeyError as error:
        known = ", ".join(Stemmer.algorithms())
        raise ConfigError(f"no stemmer '{language}' (known: none, {known})") from error


def write_part(path: Path, texts: Iterable[str], words: Callable[[str], list[str]]) -> None:
    """Stores the words of some passages: their vocabulary, and each passage's words as ids in it."""
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in words(text)] for text in texts]
    flat = np.fromiter((number for row in ids for number in row), dtype=np.int32)
    names = np.frombuffer("\n".join(vocabulary).encode(), dtype=np.uint8)
    with path.open("wb") as file:
        np.savez(file, flat=flat, lengths=np.asarray([len(row) for row in ids], dtype=np.int32), names=names)


def join_parts(parts: Sequence[Path], folder: Path, options: BuildOptions) -> None:
    """Writes the index of the passages of all parts, in order, into `folder`."""
    vocabulary: dict[str, int] = {}
    rows: list[np.ndarray] = []
    for part in parts:
        with np.load(part) as stored:
            names = stored["names"].tobytes().decode().split("\n") if len(stored["names"]) else []
            places = np.asarray([vocabulary.setdefault(name, len(vocabulary)) for name in names], dtype=np.int32)
            rows += np.split(places[stored["flat"]], np.cumsum(stored["lengths"])[:-1])
    if not vocabulary:
        raise ConfigError("no passage of the corpus has a word to search for")
    index = load_bm25s().BM25(k1=options.k1, b=options.b, method="lucene", csc_backend="numpy")
    index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
    index.save(folder, show_progress=False)


class BM25Index:
    """A stored BM25 index, memory-mapped.

    Raises:
        MissingExtraError: bm25s or the stemmer's library is not installed.
    """

    def __init__(self, folder: Path, options: BuildOptions) -> None:
        self._index = load_bm25s().BM25.load(folder, mmap=True, load_vocab=False)
        for name in _ARRAYS:  # plain array views: slicing a memmap takes ten times as long
            self._index.scores[name] = np.asarray(self._index.scores[name])
        self._vocabulary: dict[str, int] = json.loads((folder / "vocab.index.json").read_bytes())
        self._words = word_splitter(options)

    def __len__(self) -> int:
        return int(self._index.scores["num_docs"])

    def search(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """Returns at most `topk` hits for each query."""
        known = [[self._vocabulary[word] for word in self._words(each) if word in self._vocabulary] for each in queries]
        return [best_rows(self._index.get_scores_from_ids(ids), topk) if ids else [] for ids in known]


def best_rows(scores: np.ndarray, topk: int) -> Ranking:
    """Returns the rows with the `topk` highest positive scores, ties by row. scores: (rows,)."""
    rows = np.flatnonzero(scores > 0)
    if len(rows) > topk:
        least = np.partition(scores[rows], len(rows) - topk)[len(rows) - topk]
        rows = rows[scores[rows] >= least]
    rows = rows[np.argsort(-scores[rows], kind="stable")][:topk]
    return list(zip(rows.tolist(), scores[rows].tolist()))
