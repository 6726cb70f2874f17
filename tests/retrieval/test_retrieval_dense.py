"""Dense and hybrid search with a tiny encoder made on the spot, where sentence-transformers and FAISS are installed."""

import numpy as np
import pytest
from retrieval_stage import PASSAGES, write_corpus

from etude.errors import ConfigError
from etude.retrieval import BuildOptions, Retriever, build_index

pytest.importorskip("faiss")
sentence_transformers = pytest.importorskip("sentence_transformers")
CONTENTS = [f'"{title}"\n{text}' for title, text in PASSAGES]


def make_encoder(folder, seed):
    """An untrained BERT of two layers with a vocabulary of characters."""
    import torch
    from sentence_transformers import models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(seed)
    letters = sorted(set("".join(CONTENTS).lower()) - {" ", "\n"} | set("abcdefghijklmnopqrstuvwxyz:"))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder / "bert")
    words = models.Transformer(str(folder / "bert"))
    sentence_transformers.SentenceTransformer(modules=[words, models.Pooling(32)], device="cpu").save(
        str(folder / "e5-tiny")
    )
    return str(folder / "e5-tiny")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("encoder") / "one", 0)


@pytest.mark.parametrize("factory", ["Flat", "HNSW8"])
def test_scores_are_cosines_of_the_encoders_embeddings(tmp_path, encoder, factory):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    options = BuildOptions(method="dense", model=encoder, factory=factory, device="cpu")
    retriever = Retriever(build_index(corpus, tmp_path / "index", options), device="cpu")
    model = sentence_transformers.SentenceTransformer(encoder, device="cpu")
    passages = model.encode([f"passage: {text}" for text in CONTENTS], normalize_embeddings=True)
    query = model.encode("query: who eats bamboo", normalize_embeddings=True)
    expected = passages @ query
    [hits, nothing] = retriever.search(["who eats bamboo", " "], 6)
    assert nothing == []
    assert [hit.row for hit in hits] == np.argsort(-expected).tolist()
    assert [hit.score for hit in hits] == pytest.approx(sorted(expected.tolist(), reverse=True), abs=1e-5)


def test_hybrid_search_fuses_both(tmp_path, encoder):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    folder = build_index(corpus, tmp_path / "index", BuildOptions(method="hybrid", model=encoder, device="cpu"))
    retriever = Retriever(folder, device="cpu")
    words, vectors = (part.search(["bamboo"], 6)[0] for part in (retriever._bm25, retriever._dense))
    expected = {}
    for ranking in (words, vectors):
        for rank, (row, _) in enumerate(ranking, 1):
            expected[row] = expected.get(row, 0) + 1 / (60 + rank)
    [hits] = retriever.search(["bamboo"], 4)
    assert dict(hits) == pytest.approx(dict(sorted(expected.items(), key=lambda pair: -pair[1])[:4]))


def test_an_index_is_not_searched_with_another_model(tmp_path, encoder):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    mine = tmp_path / "models" / "e5"
    build_index(corpus, tmp_path / "index", BuildOptions(method="dense", model=make_encoder(mine, 0), device="cpu"))
    (mine / "e5-tiny").rename(tmp_path / "first")
    make_encoder(tmp_path / "models" / "again", 1)
    (tmp_path / "models" / "again" / "e5-tiny").rename(mine / "e5-tiny")
    with pytest.raises(ConfigError, match="not the model that embedded the passages"):
        Retriever(tmp_path / "index", device="cpu")


def test_an_unknown_factory_is_named(tmp_path, encoder):
    with pytest.raises(ConfigError, match="--factory Nonsense"):
        build_index(
            write_corpus(tmp_path / "corpus.jsonl"),
            tmp_path / "index",
            BuildOptions(method="dense", model=encoder, factory="Nonsense", device="cpu"),
        )


def test_a_model_that_is_none_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="--model"):
        build_index(
            write_corpus(tmp_path / "corpus.jsonl"),
            tmp_path / "index",
            BuildOptions(method="dense", model=str(tmp_path), device="cpu"),
        )
