"""`Retriever`: an index folder, opened for search.

The folder has `manifest.json` (the corpus and the build options), `spans.npy`, and the files of bm25s or FAISS.

Invariant: an opened index is complete and matches its corpus file; opening and searching write nothing, so a killed server
loses nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from etude.errors import ConfigError, DataError, one_line
from etude.retrieval.bm25 import BM25Index, Ranking
from etude.retrieval.corpus import Corpus, Fingerprint
from etude.retrieval.dense import DenseIndex
from etude.retrieval.options import BuildOptions

VERSION = 1
MANIFEST, SPANS = "manifest.json", "spans.npy"
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
        ConfigError: `folder` is not an index, or one of another version.
        DataError: the corpus file is missing or has changed since the index was built.
        MissingExtraError: a library that the method needs is not installed.
    """

    def __init__(self, folder: str | Path, corpus: str | Path | None = None, device: str | None = None) -> None:
        self.folder = Path(folder).expanduser()
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
    """Reads the manifest of an index.

    Raises:
        ConfigError: `folder` is not an index, or one of another version.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder}: no search index; make one with  etude retrieve build CORPUS --output {folder}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / MANIFEST}: cannot be read: {one_line(error)}") from error
    if manifest.get("version") != VERSION:
        raise ConfigError(f"{folder}: an index of version {manifest.get('version')}, not {VERSION}: build it again")
    return manifest


def _check_corpus(path: Path, folder: Path, fingerprint: Fingerprint) -> None:
    try:
        fits = fingerprint.fits(path)
    except OSError as error:
        raise DataError(
            f"{path}: the corpus of {folder} cannot be read: {one_line(error)}; --corpus names it"
        ) from error
    if not fits:
        raise DataError(f"{path}: not the corpus that {folder} was built from, or changed since: build the index again")
