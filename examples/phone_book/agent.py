"""A phone book that no model knows by heart, and the tool `search` to look into it.

`prepare` makes what training starts from, all of it drawn from a seed: the book as a corpus for `etude retrieve`, questions,
and demonstrations (most of them a bad habit: answering 0 without searching). People of the test are in the book and in no
other file. Loop, tool and scorer are built in; the tool asks a service that really runs, which `serve` starts.

    etude quickstart --example phone_book --seed SEED
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.quickstart import run_service

_FIRST = "Ada Bo Cleo Dov Ema Finn Gus Hana Ivo Jun Kai Lena Milo Nora Otto Pia Quin Rosa Sami Tove Uma Vera Wim Yara"
_LAST = (
    "Abel Brook Cole Drake Egan Frost Grant Hale Irwin Jones Klein Lowe Marsh North Olsen Pratt Reed Stone Tate Vance"
)
SYSTEM = "Search the phone book."
QUESTIONS = ("What is the number of {}?", "Number of {}?", "Please look up {}.", "How do I reach {}?")
HABITS = (0.65, 0.3)  # shares of the two halves of demonstrations that search: first the skill, then mostly the habit


def make_book(seed: int) -> dict[str, str]:
    """Name to number, in random order."""
    rng = random.Random(f"book/{seed}")
    names = [f"{first} {last}" for first in _FIRST.split() for last in _LAST.split()]
    rng.shuffle(names)
    return dict(zip(names, map(str, rng.sample(range(1000, 10000), len(names)))))


def prompt(name: str, rng: random.Random) -> list[dict[str, Any]]:
    """The messages of one question."""
    question = rng.choice(QUESTIONS).format(name)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def row(name: str, number: str, split: str, index: int, rng: random.Random) -> dict[str, Any]:
    """A row for training or evaluation."""
    return {
        "data_source": "searchR1_nq",  # scored as in Search-R1: exact match of the last <answer>
        "prompt": prompt(name, rng),
        "reward_model": {"style": "rule", "ground_truth": {"target": [number]}},
        "extra_info": {"index": index, "split": split},
    }


def demonstration(name: str, number: str, searches: bool, rng: random.Random) -> dict[str, Any]:
    """A conversation that looks the name up, or answers 0 at once."""
    said = number if searches else "0"
    answer = {"role": "assistant", "content": f"<answer>{said}</answer>"}
    if not searches:
        return {"messages": [*prompt(name, rng), answer]}
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": name}}}
    found = f"Doc 1 (Title: {name})\n{number}"  # as the tool writes it
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": found}]
    return {"messages": [*prompt(name, rng), *turns, answer]}


def make_demonstrations(people: list[str], seed: int, count: int) -> list[dict[str, Any]]:
    """First mostly the skill, then mostly the habit. Numbers are drawn anew: there is nothing to learn by heart."""
    rng = random.Random(f"demonstrations/{seed}")
    return [
        demonstration(rng.choice(people), str(rng.randrange(1000, 10000)), rng.random() < share, rng)
        for share in HABITS
        for _ in range(count // 2)
    ]


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Questions and demonstrations, and the book as a corpus."""
    book, rng, start = make_book(seed), random.Random(f"questions/{seed}"), 0
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": name, "contents": f"{name}\n{number}"}) for name, number in book.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    tables = {}
    for split, count in (("train", rows.train), ("val", rows.val), ("test", rows.test)):
        people = list(book.items())[start : start + count]
        tables[split] = [row(name, number, split, index, rng) for index, (name, number) in enumerate(people)]
        start += count
    return {**tables, "demonstrations": make_demonstrations(list(book)[: rows.train], seed, rows.demonstrations)}


@contextmanager
def serve(folder: Path) -> Iterator[dict[str, str]]:
    """The search service over the book."""
    from etude.retrieval import build_index

    if not (folder / "index").exists():
        build_index(folder / "corpus.jsonl", folder / "index")
    with run_service("-m", "etude", "retrieve", "serve", str(folder / "index"), "--port", "0") as address:
        yield {"SEARCH_URL": address}
