"""`Retriever`: an index folder, opened for search.

The folder has `manifest.json` (the corpus, the build options, the tokeniser, and a checksum of every file), `spans.npy`, and
the files of bm25s or FAISS.

Invariant: an opened index is complete, has the bytes that were built, splits queries as its passages were split, and matches
its corpus file; opening and searching write nothing, so a killed server loses nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from etude.errors import ConfigError, DataError, describe_error, one_line
from etude.retrieval.bm25 import TOKENIZER, BM25Index, Ranking
from etude.retrieval.corpus import Corpus, Fingerprint
from etude.retrieval.dense import DenseIndex
from etude.retrieval.options import BuildOptions

VERSION = 2
MANIFEST, SPANS = "manifest.json", "spans.npy"
_WITHOUT_CHECKSUMS = 1  # the version before; a dense index of it is accepted, as embedding takes hours
RRF_K = 60
"""The constant of Cormack, Clarke and Büttcher, "Reciprocal Rank Fusion" (2009)."""
_FUSED_DEPTH = 100


class Hit(NamedTuple):
    """A passage's row in the corpus, and its score."""

    row: int
    score: float


class Retriever:
    """Searches the index in `folder`; `corpus`: the corpus file's path if it has moved; `device`: of the dense encoder.

    Raises:
        ConfigError: `folder` is not an index, or one of another version or tokeniser.
        DataError: a file of the index is missing or has changed, or the corpus file is or has; names it.
        MissingExtraError: a library that the method needs is not installed.
    """

    def __init__(self, folder: str | Path, corpus: str | Path | None = None, device: str | None = None) -> None:
        self.folder = folder = Path(folder).expanduser()
        if not folder.exists() and (replaced := set_aside(folder)).exists():
            self.folder = replaced
        manifest = read_manifest(self.folder)
        self.options = BuildOptions(**{**manifest["options"], "device": device})
        built = manifest["corpus"]
        path = Path(corpus or built["path"]).expanduser()
        _check_corpus(path, self.folder, Fingerprint(built["size"], built["modified"], built["sha256"]))
        self.corpus = Corpus(path, np.load(self.folder / SPANS, mmap_mode="r"))
        self._bm25 = BM25Index(self.folder, self.options) if self.options.uses_bm25 else None
        self._dense = DenseIndex(self.folder, self.options) if self.options.uses_dense else None
        for part in (self._bm25, self._dense):
            if part is not None and len(part) != len(self.corpus):
                raise ConfigError(f"{self.folder}: an index of {len(part)} passages, a corpus of {len(self.corpus)}")

    def __len__(self) -> int:
        return len(self.corpus)

    def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Hit]]:
        """Returns the best `topk` passages for each query, best first; fewer if fewer match."""
        depth = max(topk, _FUSED_DEPTH) if self._bm25 and self._dense else topk
        rankings = [part.search(queries, depth) for part in (self._bm25, self._dense) if part is not None]
        results = rankings[0] if len(rankings) == 1 else [fuse(each) for each in zip(*rankings)]
        return [[Hit(*pair) for pair in ranking[:topk]] for ranking in results]


def fuse(rankings: Sequence[Ranking]) -> Ranking:
    """Reciprocal rank fusion: a row's score is the sum of 1 / (60 + rank) over the rankings that contain it."""
    scores: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            scores[row] += 1 / (RRF_K + rank)
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of an index and compares the checksums of all of its files.

    Raises:
        ConfigError: `folder` is not an index, or one of another version or tokeniser.
        DataError: a file is missing or has changed; names it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder}: no search index; make one with  etude retrieve build CORPUS --output {folder}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / MANIFEST}: cannot be read: {one_line(error)}") from error
    try:
        _check_manifest(manifest, folder)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder / MANIFEST}: not the manifest of a search index: {describe_error(error)}"
        ) from error
    return manifest


def _check_manifest(manifest: dict[str, Any], folder: Path) -> None:
    uses_bm25, version = manifest["options"]["method"] != "dense", manifest["version"]
    again = f"build it again with  etude retrieve build {manifest['corpus']['path']} --output {folder} --replace"
    if version == _WITHOUT_CHECKSUMS and not uses_bm25:
        return
    if version != VERSION:
        raise ConfigError(f"{folder}: an index of version {version}, not {VERSION}: {again}")
    if manifest["sha256"] != manifest_digest(manifest):
        raise DataError(f"{folder / MANIFEST}: has changed since the index was built: {again}")
    if uses_bm25 and manifest["tokenizer"] != TOKENIZER:
        raise ConfigError(f"{folder}: split into words by {manifest['tokenizer']}, not {TOKENIZER}: {again}")
    for name, sha256 in manifest["files"].items():
        try:
            same = Fingerprint.of(folder / name).sha256 == sha256
        except OSError as error:
            raise DataError(f"{folder / name}: cannot be read: {one_line(error)}; {again}") from error
        if not same:
            raise DataError(f"{folder / name}: has changed since the index was built: {again}")


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Returns the checksum of a manifest, without its own key `sha256`."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def workplace(folder: Path) -> Path:
    """Returns the folder in which the index `folder` is built."""
    return folder.with_name(f"{folder.name}.building")


def set_aside(folder: Path) -> Path:
    """Returns where the index that `--replace` replaces is until the new one is in place."""
    return workplace(folder) / "replaced"


def _check_corpus(path: Path, folder: Path, fingerprint: Fingerprint) -> None:
    try:
        fits = fingerprint.fits(path)
    except OSError as error:
        raise DataError(
            f"{path}: the corpus of {folder} cannot be read: {one_line(error)}; --corpus names it"
        ) from error
    if not fits:
        raise DataError(f"{path}: not the corpus that {folder} was built from, or changed since: build the index again")
