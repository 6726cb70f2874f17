"""Retrieval over a corpus of passages by BM25, dense embeddings or both; a server for Search-R1's `/retrieve`."""

from etude.retrieval.building import build_index
from etude.retrieval.corpus import Corpus
from etude.retrieval.index import Hit, Retriever
from etude.retrieval.options import BuildOptions

__all__ = ["BuildOptions", "Corpus", "Hit", "Retriever", "build_index"]
