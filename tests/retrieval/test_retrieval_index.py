"""An index finds what BM25's formula says, is built whole or not at all, and only opens with its own corpus."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from retrieval_stage import PASSAGES, write_corpus

from etude.errors import ConfigError, DataError, MissingExtraError
from etude.retrieval import BuildOptions, Retriever, build_index, building
from etude.retrieval.bm25 import best_rows, word_splitter
from etude.retrieval.index import fuse, manifest_digest

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


UNSPACED = [
    ("熊猫吃竹子，住在中国。", "熊猫吃什么"),
    ("東京は日本の首都です。お茶がおいしい。", "日本の首都はどこですか"),
    ("판다는 대나무를 먹는다.", "판다가 먹는 대나무"),
    ("แพนด้ากินไผ่ในป่า", "แพนด้ากินอะไร"),
    ("हिन्दी भारत की भाषा है", "हिन्दी"),
    ("The panda eats bamboo.", "pandas"),
]


def test_text_without_spaces_is_found(tmp_path):
    """Chinese, Japanese, Korean, Thai and Devanagari: each question finds its own passage first."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": n, "contents": text}) + "\n" for n, (text, _) in enumerate(UNSPACED)))
    retriever = Retriever(build_index(corpus, tmp_path / "index"))
    found = retriever.search([question for _, question in UNSPACED], 1)
    assert [[hit.row for hit in hits] for hits in found] == [[row] for row in range(len(UNSPACED))]
    assert [hit.row for hit in retriever.search(["茶"], 5)[0]] == [1]  # a word of one character
    assert retriever.search(["猫又"], 5)[0][0].row == 0


def test_text_without_spaces_becomes_pairs_and_han_characters():
    words = word_splitter(PLAIN)
    assert words("iPhone手机は12本") == ["iphone", "手机", "机は", "手", "机", "12", "本"]
    assert words("ﾃﾚﾋﾞ ＡＢＣ") == ["テレ", "レビ", "abc"]  # compatibility forms are normalised
    assert words("cafe\u0301") == words("café") == ["café"]


@given(st.text(st.characters(max_codepoint=127), max_size=80))
def test_ascii_words_are_those_of_any_text(text):
    assert [word for word in word_splitter(PLAIN)(text + " ø") if word != "ø"] == word_splitter(PLAIN)(text)


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


def test_an_index_split_otherwise_is_refused(tmp_path):
    folder = build_index(write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"tokenizer": "words-1"}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": manifest_digest(manifest)}))
    with pytest.raises(ConfigError, match=r"index: split into words by words-1, .* --replace") as error:
        Retriever(folder)
    assert "\n" not in str(error.value)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 1}))
    with pytest.raises(ConfigError, match="index of version 1"):
        Retriever(folder)


def test_a_file_that_is_not_as_it_was_built_is_named(tmp_path, index):
    shutil.copytree(index, tmp_path / "index")
    for file in sorted((tmp_path / "index").iterdir()):
        content = file.read_bytes()
        place = content.index(b"0.9") + 2 if file.name == "manifest.json" else len(content) // 2
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        os.utime(file, ns=(0, (index / file.name).stat().st_mtime_ns))
        with pytest.raises(DataError, match=rf"{file}: has changed since") as error:
            Retriever(tmp_path / "index")
        assert "\n" not in str(error.value)
        file.unlink()
        with pytest.raises((DataError, ConfigError), match=rf"{tmp_path / 'index'}.*"):
            Retriever(tmp_path / "index")
        file.write_bytes(content)
    assert len(Retriever(tmp_path / "index")) == len(PASSAGES)


@pytest.mark.parametrize(
    "content", ["[]", "3", "{}", '{"version": 2, "options": 1, "corpus": {}}', '{"options": {"method": "dense"}}']
)
def test_what_is_no_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"manifest\.json: not the manifest"):
        Retriever(tmp_path)


class Killed(BaseException):
    """Ends a build where it stands; nothing in it catches this."""


@pytest.mark.parametrize("step", range(8))
def test_a_replacement_killed_at_any_step_leaves_an_index(tmp_path, monkeypatch, step):
    """The steps are every rename and every removal of a folder; a killed removal has removed half of the files."""
    corpus, folder = write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index"
    build_index(corpus, folder)
    rename, remove, done = os.replace, shutil.rmtree, []

    def may_be_killed(do, path, *rest, **options):
        if path.exists():  # the removal of nothing is no step
            done.append(path)
        if len(done) == step + 1:
            if do is remove:
                for file in sorted(path.rglob("*"))[::2]:
                    if file.is_file():
                        file.unlink()
            raise Killed
        do(path, *rest, **options)

    monkeypatch.setattr(building.os, "replace", lambda *given: may_be_killed(rename, *given))
    monkeypatch.setattr(building.shutil, "rmtree", lambda *given, **rest: may_be_killed(remove, *given, **rest))
    killed = False
    try:
        build_index(corpus, folder, BuildOptions(k1=2.0), replace=True)
    except Killed:
        killed = True
    monkeypatch.undo()
    opened = Retriever(folder)
    assert opened.options.k1 in (0.9, 2.0)
    assert opened.search(["bamboo"], 1)[0][0].row == 2
    assert killed or opened.options.k1 == 2.0
    with pytest.raises(ConfigError, match="exists"):
        build_index(corpus, folder)
    assert Retriever(build_index(corpus, folder, BuildOptions(k1=3.0), replace=True)).options.k1 == 3.0
    assert not (tmp_path / "index.building").exists()


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
