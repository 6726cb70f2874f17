"""Dense search: embeddings by sentence-transformers, indexed by FAISS.

Invariant: an index is only searched with the model that embedded its passages: a probe sentence's embedding is stored with
the index and must be reproduced. Embeddings have length 1, so that the inner product is the cosine similarity.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import ConfigError, MissingExtraError, one_line
from etude.retrieval.bm25 import Ranking
from etude.retrieval.options import BuildOptions

PROBE = "A probe sentence tells one encoder from another."
_SAME = 0.99  # minimum cosine of the probe's embeddings: other devices and precisions are far above, other models below
_INDEX, _PROBE = "dense.faiss", "probe.npy"


class Encoder:
    """Encodes texts as unit vectors.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, options: BuildOptions) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingExtraError("dense search", "dense") from error
        try:
            self._model = SentenceTransformer(options.model, device=options.device)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model {options.model}: cannot be loaded: {one_line(error)}") from error
        self._model.max_seq_length = min(self._model.max_seq_length or options.max_tokens, options.max_tokens)
        self._query, self._passage = options.prefixes()
        self._batch_size = options.batch_size

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embeds passages: (texts, width) float32."""
        return self._encode(texts, self._passage)

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Embeds queries: (texts, width) float32."""
        return self._encode(texts, self._query)

    def _encode(self, texts: Sequence[str], prefix: str) -> np.ndarray:
        vectors = self._model.encode(
            [prefix + text for text in texts],
            batch_size=self._batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
            convert_to_numpy=True,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


def write_part(path: Path, texts: Sequence[str], encoder: Encoder) -> None:
    """Stores the embeddings of some passages."""
    with path.open("wb") as file:
        np.save(file, encoder.passages(texts))


def join_parts(parts: Sequence[Path], folder: Path, options: BuildOptions, encoder: Encoder) -> None:
    """Writes the FAISS index of the embeddings of all parts, in order, into `folder`.

    Raises:
        ConfigError: FAISS rejects `options.factory`.
    """
    faiss = _load_faiss()
    first = np.load(parts[0], mmap_mode="r")
    try:
        index = faiss.index_factory(first.shape[1], options.factory, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(np.concatenate([np.load(part) for part in parts]))
        for part in parts:
            index.add(np.load(part))
    except RuntimeError as error:
        raise ConfigError(f"--factory {options.factory}: {one_line(error)}") from error
    faiss.write_index(index, str(folder / _INDEX))
    np.save(folder / _PROBE, encoder.passages([PROBE]))


class DenseIndex:
    """A stored dense index, memory-mapped if FAISS supports it, with its encoder.

    Raises:
        ConfigError: the model is not the one that embedded the passages.
        MissingExtraError: FAISS or sentence-transformers is not installed.
    """

    def __init__(self, folder: Path, options: BuildOptions) -> None:
        faiss = _load_faiss()
        self._index = faiss.read_index(str(folder / _INDEX), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        self._encoder = Encoder(options)
        stored, now = np.load(folder / _PROBE), self._encoder.passages([PROBE])
        if stored.shape != now.shape or float((stored * now).sum()) < _SAME:
            raise ConfigError(f"{folder}: {options.model} is not the model that embedded the passages; build it again")

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """Returns at most `topk` hits for each query; none for an empty query."""
        if not queries:
            return []
        scores, rows = self._index.search(self._encoder.queries(queries), min(topk, len(self)))
        found = [[pair for pair in zip(*each) if pair[0] >= 0] for each in zip(rows.tolist(), scores.tolist())]
        return [ranking if query.strip() else [] for query, ranking in zip(queries, found)]


def _load_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("dense search", "dense") from error
    return faiss
