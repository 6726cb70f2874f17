"""Questions of SQuAD about sentences of Wikipedia, and the tool `search` to find them.

The data (CC BY-SA 4.0) is not in the repository: SQUAD_SEARCH names a folder with corpus.jsonl (id, title, text) and
qa.jsonl (question, answers, passage_id). The corpus has a line for each sentence. Asked are the questions whose answer, of
at most three words, is in the sentence that a search for the question finds; no passage of the test is asked about in
training.
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
from etude.rewards.qa import exact_match, extract_answer, f1

DATA = Path(os.environ.get("SQUAD_SEARCH", Path(__file__).parents[4] / "shared" / "data" / "squad_search"))
TESTED = 60  # passages
WORDS, CHARACTERS = 3, 200  # of an answer, of a sentence
EXAMPLES = (
    {"role": "user", "content": "Which river flows through Vienna?"},
    {"role": "assistant", "content": '[search(query="Which river flows through Vienna?")]'},
    {"role": "tool", "content": "Doc 1 (Title: Vienna)\nVienna lies in the east of Austria, on the river Danube."},
    {"role": "assistant", "content": "<answer>Danube</answer>"},
    {"role": "user", "content": "When was the telescope invented?"},
    {"role": "assistant", "content": '[search(query="When was the telescope invented?")]'},
    {"role": "tool", "content": "Doc 1 (Title: Telescope)\nThe first telescopes were made in the Netherlands in 1608."},
    {"role": "assistant", "content": "<answer>1608</answer>"},
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
    asked = [each for _, each in located_rows(DATA / "qa.jsonl") if len(each["answers"][0].split()) <= WORDS]
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
    return asked["answers"][0] in sentence and len(sentence) <= CHARACTERS


def row(asked: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation."""
    prompt = [("system", "Search, then answer in a few words."), ("user", asked["question"])]
    extra = {"index": index, "split": split}
    return training_row("passages", prompt, asked["answers"][0], {}, ability="tools", extra=extra)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """Returns the words that the answer shares with the right one, as F1, and whether it is the right one."""
    said = extract_answer(solution_str) or ""
    return {"score": f1(said, ground_truth), "acc": float(exact_match(said, ground_truth))}
