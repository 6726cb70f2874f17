"""`BuildOptions`: how an index is built; stored in its manifest, so that queries are processed like the passages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from etude.errors import ConfigError

Method = Literal["bm25", "dense", "hybrid"]
_PREFIXES = {"e5": ("query: ", "passage: "), "bge": ("Represent this sentence for searching relevant passages: ", "")}


@dataclass(frozen=True)
class BuildOptions:
    """Options of an index. `k1`, `b`: BM25's parameters, by default Pyserini's. `stopwords`: english or none. `stemmer`: a
    Snowball language or none.

    `model`: a sentence-transformers model for `dense` and `hybrid`; `factory`: FAISS's index factory string; `max_tokens`:
    maximum tokens of a passage or query; prefixes default to those of the model's family (e5, bge).

    Raises:
        ConfigError: a value is invalid.
    """

    method: Method = "bm25"
    k1: float = 0.9
    b: float = 0.4
    stopwords: str = "english"
    stemmer: str = "english"
    model: str | None = None
    factory: str = "Flat"
    query_prefix: str | None = None
    passage_prefix: str | None = None
    max_tokens: int = 256
    batch_size: int = 64
    device: str | None = None

    def __post_init__(self) -> None:
        if self.uses_dense and not self.model:
            raise ConfigError(f"--method {self.method} needs --model, such as intfloat/e5-base-v2 or a folder")
        if not (self.k1 >= 0 and 0 <= self.b <= 1):
            raise ConfigError(f"k1 must not be negative and b must lie between 0 and 1, got {self.k1} and {self.b}")
        if self.stopwords not in ("english", "none"):
            raise ConfigError(f"stopwords must be english or none, got '{self.stopwords}'")

    @property
    def uses_bm25(self) -> bool:
        """Whether the method includes BM25."""
        return self.method in ("bm25", "hybrid")

    @property
    def uses_dense(self) -> bool:
        """Whether the method includes dense embeddings."""
        return self.method in ("dense", "hybrid")

    def prefixes(self) -> tuple[str, str]:
        """Returns the prefixes (of a query, of a passage) that the encoder was trained with."""
        name = (self.model or "").rstrip("/").rpartition("/")[2].lower()
        query, passage = next((pair for family, pair in _PREFIXES.items() if family in name), ("", ""))
        return (
            query if self.query_prefix is None else self.query_prefix,
            passage if self.passage_prefix is None else self.passage_prefix,
        )
