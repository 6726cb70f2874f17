"""The stage of the search tests: a small corpus in both forms, and its index."""

import json

import pytest

pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")

PASSAGES = [
    ("Red panda", "The red panda lives in the eastern Himalayas and eats bamboo."),
    ("Giant panda", "The giant panda is a bear of China; it eats bamboo, bamboo and bamboo."),
    ("Bamboo", "Bamboo is a grass. Some bamboos grow a metre a day."),
    ("Himalayas", "The Himalayas separate the plains of India from Tibet."),
    ("Tea", "Tea is made of the leaves of Camellia sinensis, grown in Assam and in China."),
    ("Noodles", "Noodles are made of dough."),
]


def write_corpus(path, form="title"):
    """`title`: rows {id, title, text}; `contents`: Search-R1's form."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, (title, text) in enumerate(PASSAGES):
            own = {"title": title, "text": text} if form == "title" else {"contents": f'"{title}"\n{text}'}
            file.write(json.dumps({"id": f"p{number}", **own}, ensure_ascii=False) + "\n")
    return path


@pytest.fixture(scope="session")
def index(tmp_path_factory):
    """The index folder of the small corpus."""
    from etude.retrieval import build_index

    folder = tmp_path_factory.mktemp("retrieval")
    return build_index(write_corpus(folder / "corpus.jsonl"), folder / "index")
