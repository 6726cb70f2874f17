"""Questions of SQuAD about sentences of Wikipedia, and the tool `search` to find them.

The data (CC BY-SA 4.0) is not in the repository: SQUAD_SEARCH names a folder with corpus.jsonl (id, title, text) and
qa.jsonl (question, answers, passage_id). The corpus has a line for each sentence. Asked are the questions whose answer is a
number in the sentence that a search for the question finds; no passage of the test is asked about in training.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

from etude.data.files import located_rows
from etude.data.prepare.sources import training_row
from etude.quickstart.prepare import show_example
from etude.registry import import_module
from etude.retrieval import Retriever, build_index

DATA = Path(os.environ.get("SQUAD_SEARCH", Path(__file__).parents[4] / "shared" / "data" / "squad_search"))
TESTED = 25  # passages
LONGEST = 250  # characters of a sentence
EXAMPLES = tuple(
    {"role": role, "content": content}
    for question, found, answer in (
        ("When was the telescope invented?", "Telescope)\nThe first telescopes were made in 1608.", "1608"),
        ("How many districts has Vienna?", "Vienna)\nVienna has 23 districts and lies on the Danube.", "23"),
    )
    for role, content in (
        ("user", question),
        ("assistant", f'[search(query="{question}")]'),
        ("tool", f"Doc 1 (Title: {found}"),
        ("assistant", f"<answer>{answer}</answer>"),
    )
)
serve = import_module(str(Path(__file__).parents[2] / "phone_book" / "agent.py")).serve


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the corpus, its index and the questions."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"id": f"{passage['id']}-{place}", "contents": f"{passage['title']}\n{sentence}"})
        for _, passage in located_rows(DATA / "corpus.jsonl")
        for place, sentence in enumerate(re.split(r"(?<=[.!?])\s+(?=[A-Z])", passage["text"]))
    ]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    build_index(folder / "corpus.jsonl", folder / "index", replace=True)
    asked = [each for _, each in located_rows(DATA / "qa.jsonl") if re.fullmatch(r"[\d,.]+%?", each["answers"][0])]
    index = Retriever(folder / "index")
    found = index.search([each["question"] for each in asked], topk=1)
    asked = [each for each, [hit] in zip(asked, found) if is_answered(each, index.corpus.document(hit.row)["contents"])]
    tested = random.Random("passages").sample(sorted({each["passage_id"] for each in asked}), TESTED)
    tables = {}
    for split, begin in (("train", 0), ("val", rows.train), ("test", 0)):
        chosen = [each for each in asked if (each["passage_id"] in tested) == (split == "test")]
        random.Random(f"passages/{seed}").shuffle(chosen)
        chosen = chosen[begin : begin + getattr(rows, split)]
        tables[split] = [row(each, split, index) for index, each in enumerate(chosen)]
    return show_example(tables, EXAMPLES)


def is_answered(asked: dict[str, Any], found: str) -> bool:
    """Whether the answer is in the sentence that was found, below its title, and that is no long one."""
    sentence = found.partition("\n")[2]
    return asked["answers"][0] in sentence and len(sentence) <= LONGEST


def row(asked: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation; scored as in Search-R1."""
    prompt = [("system", "Search, then answer."), ("user", asked["question"])]
    extra = {"index": index, "split": split}
    return training_row("searchR1_nq", prompt, {"target": asked["answers"]}, {}, ability="tools", extra=extra)
