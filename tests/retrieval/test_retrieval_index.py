"""An index finds what BM25's formula says, is built whole or not at all, and only opens with its own corpus."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from retrieval_stage import PASSAGES, write_corpus

from etude.errors import ConfigError, DataError, MissingExtraError
from etude.retrieval import BuildOptions, Retriever, build_index, building
from etude.retrieval.bm25 import best_rows
from etude.retrieval.index import fuse

PLAIN = BuildOptions(stopwords="none", stemmer="none")
SQUAD = Path(__file__).parents[3] / "shared" / "data" / "squad_search"


def words(text):
    return re.findall(r"\w\w+", text.lower())


def bm25(query, k1=0.9, b=0.4):
    """Lucene's BM25 of every passage, term by term."""
    texts = [words(f'"{title}"\n{text}') for title, text in PASSAGES]
    average = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        score = 0.0
        for word in words(query):
            having = sum(word in other for other in texts)
            weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            count = text.count(word)
            score += weight * count / (count + k1 * (1 - b + b * len(text) / average)) if count else 0.0
        scores.append(score)
    return scores


@pytest.mark.parametrize("form", ["title", "contents"])
@pytest.mark.parametrize("query", ["bamboo", "giant panda of china", "the red panda eats", "zebra"])
def test_scores_are_those_of_the_formula(tmp_path, form, query):
    corpus = write_corpus(tmp_path / "corpus.jsonl", form)
    retriever = Retriever(build_index(corpus, tmp_path / "index", PLAIN))
    expected = {row: score for row, score in enumerate(bm25(query)) if score > 0}
    [hits] = retriever.search([query], 10)
    assert dict(hits) == pytest.approx(expected, rel=1e-5)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    for hit in hits:
        title, text = PASSAGES[hit.row]
        assert json.loads(retriever.corpus.document_json(hit.row))["contents"] == f'"{title}"\n{text}'


def test_words_are_stemmed_and_stop_words_ignored(index):
    retriever = Retriever(index)
    assert [hit.row for hit in retriever.search(["growing"], 3)[0]] == [2]  # "grow"; "grown" is another stem
    assert retriever.search(["the of and", "", "!?"], 3) == [[], [], []]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=30), st.integers(1, 40))
def test_the_best_rows_are_those_of_a_full_sort(scores, topk):
    import numpy as np

    wanted = sorted(
        ((row, score) for row, score in enumerate(scores) if score > 0), key=lambda pair: (-pair[1], pair[0])
    )
    assert best_rows(np.asarray(scores, dtype=np.float32), topk) == wanted[:topk]


def test_fusion_sums_reciprocal_ranks():
    fused = fuse([[(7, 9.0), (3, 1.0)], [(3, 0.8), (5, 0.7)]])
    assert [row for row, _ in fused] == [3, 7, 5]
    assert dict(fused) == pytest.approx({3: 1 / 62 + 1 / 61, 7: 1 / 61, 5: 1 / 62})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "a", "contents": ', "2: not valid JSON"),
        ('{"id": "a", "contents": "x", "score": NaN}', "2: not valid JSON: NaN"),
        ('["a"]', "2: needs 'id' and 'contents'"),
        ('{"contents": "x"}', "2: needs 'id' and 'contents'"),
        ('{"id": "a", "title": "x"}', "2: needs 'id' and 'contents'"),
        ('{"id": true, "contents": "x"}', "2: 'id' must be text"),
        ('{"id": "a", "contents": 3}', "2: 'id' must be text"),
        ('{"id": "first", "contents": "x"}', "2: the id is that of line 1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, said):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "first", "contents": "y"}\n' + line + "\n")
    with pytest.raises(DataError, match=re.escape(f"{corpus}:{said}")):
        build_index(corpus, tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no passages"):
        build_index(tmp_path / "corpus.jsonl", tmp_path / "index")


def test_byte_order_marks_blank_lines_and_line_ends_are_no_part_of_a_row(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'\xef\xbb\xbf{"id": 1, "contents": "bamboo"}\r\n\r\n{"id": 2, "text": "tea \\ud800"}')
    retriever = Retriever(build_index(corpus, tmp_path / "index"))
    assert json.loads(retriever.corpus.document_json(0)) == {"id": 1, "contents": "bamboo"}
    assert json.loads(retriever.corpus.document_json(1))["contents"] == '""\ntea \ud800'
    assert [hits[0].row for hits in retriever.search(["bamboo", "tea"], 1)] == [0, 1]


def test_an_index_only_opens_with_its_own_corpus(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    folder = build_index(corpus, tmp_path / "index")
    content = corpus.read_bytes()
    os.utime(corpus)  # the same bytes at another time: the hash decides
    assert len(Retriever(folder)) == len(PASSAGES)
    corpus.write_bytes(content.replace(b"bamboo", b"BAMBOO"))
    with pytest.raises(DataError, match="changed since"):
        Retriever(folder)
    corpus.write_bytes(content + b"\n")
    with pytest.raises(DataError, match="changed since"):
        Retriever(folder)
    corpus.unlink()
    with pytest.raises(DataError, match="--corpus names it"):
        Retriever(folder)
    (tmp_path / "elsewhere.jsonl").write_bytes(content)
    assert len(Retriever(folder, tmp_path / "elsewhere.jsonl")) == len(PASSAGES)


def test_what_is_no_index_says_so(tmp_path, index):
    with pytest.raises(ConfigError, match="etude retrieve build"):
        Retriever(tmp_path)
    manifest = json.loads((index / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "version": 0}))
    with pytest.raises(ConfigError, match="version 0"):
        Retriever(tmp_path)


def test_an_index_is_replaced_only_when_told(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    folder = build_index(corpus, tmp_path / "index")
    with pytest.raises(ConfigError, match="exists"):
        build_index(corpus, folder)
    build_index(corpus, folder, BuildOptions(k1=2.0), replace=True)
    assert Retriever(folder).options.k1 == 2.0
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="exists"):  # a folder that is no index is never removed
        build_index(corpus, tmp_path / "mine", replace=True)


KILLED = """
import os, signal, sys
from etude.retrieval import build_index, building
building.PART_ROWS["bm25"] = 2

def progress(stage, done, total):
    if done == 4:
        os.kill(os.getpid(), signal.SIGKILL)

build_index(sys.argv[1], sys.argv[2], progress=progress)
"""


def test_a_killed_build_goes_on_and_ends_with_the_same_index(tmp_path, monkeypatch):
    corpus, folder = write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(corpus), str(folder)], check=False)
    assert killed.returncode == -9
    assert not folder.exists()
    parts = {part.name: part.stat().st_ino for part in (tmp_path / "index.building" / "parts").iterdir()}
    assert sorted(parts) == ["bm25-000000", "bm25-000001"]
    monkeypatch.setitem(building.PART_ROWS, "bm25", 2)
    written = []
    whole_part = building.bm25.write_part
    monkeypatch.setattr(
        building.bm25, "write_part", lambda path, *rest: (written.append(path.name), whole_part(path, *rest))
    )
    build_index(corpus, folder)
    assert written == ["bm25-000002.tmp"]
    assert not (tmp_path / "index.building").exists()
    unbroken = build_index(corpus, tmp_path / "unbroken")
    for file in folder.iterdir():
        assert file.read_bytes() == (unbroken / file.name).read_bytes(), file.name


def test_unfinished_work_of_other_options_is_dropped(tmp_path, monkeypatch):
    corpus, folder = write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index"
    monkeypatch.setitem(building.PART_ROWS, "bm25", 2)

    def stop(stage, done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, folder, progress=stop)
    retriever = Retriever(build_index(corpus, folder, PLAIN))
    assert dict(retriever.search(["the"], 10)[0]) == pytest.approx(
        {row: score for row, score in enumerate(bm25("the")) if score > 0}, rel=1e-5
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "dense"}, "needs --model"),
        ({"b": 1.5}, "b must lie between 0 and 1"),
        ({"stopwords": "french"}, "stopwords must be english or none"),
    ],
)
def test_invalid_options_are_named(options, said):
    with pytest.raises(ConfigError, match=said):
        BuildOptions(**options)


def test_an_unknown_stemmer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no stemmer 'klingon' .*english"):
        build_index(write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index", BuildOptions(stemmer="klingon"))


def test_without_the_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'etude[retrieval]'")):
        build_index(write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'etude[dense]'")):
        build_index(tmp_path / "corpus.jsonl", tmp_path / "index", BuildOptions(method="dense", model="any"))


@pytest.mark.skipif(not SQUAD.is_dir(), reason="needs the shared data")
def test_bm25_finds_the_paragraphs_of_squad_questions(tmp_path):
    retriever = Retriever(build_index(SQUAD / "corpus.jsonl", tmp_path / "index"))
    rows = [json.loads(line) for line in (SQUAD / "qa.jsonl").read_text().splitlines()]
    found = retriever.search([row["question"] for row in rows], 10)
    ids = [[retriever.corpus.document(hit.row)["id"] for hit in hits] for hits in found]
    recall = {k: sum(row["passage_id"] in each[:k] for row, each in zip(rows, ids)) / len(rows) for k in (1, 3, 10)}
    assert recall == pytest.approx({1: 0.910, 3: 0.968, 10: 0.984}, abs=0.002)
