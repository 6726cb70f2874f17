"""A phone book that no model knows by heart, and the tool `search` to look into it.

Run as a program, this file writes what training starts from, all of it drawn from a seed: the book as a corpus for
`etude retrieve`, questions, demonstrations (most of them a bad habit: answering 0 without searching) and an untrained model
of 0.6 million parameters. People of the test are in the book and in no other file. Loop, tool and scorer are built in; the
tool asks a service that really runs.

    python agent.py FOLDER SEED
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from etude.data import write_parquet
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.tools import load_tools

_FIRST = "Ada Bo Cleo Dov Ema Finn Gus Hana Ivo Jun Kai Lena Milo Nora Otto Pia Quin Rosa Sami Tove Uma Vera Wim Yara"
_LAST = (
    "Abel Brook Cole Drake Egan Frost Grant Hale Irwin Jones Klein Lowe Marsh North Olsen Pratt Reed Stone Tate Vance"
)
SYSTEM = "Search the phone book."
QUESTIONS = ("What is the number of {}?", "Number of {}?", "Please look up {}.", "How do I reach {}?")
SIZES = {"train": 240, "val": 64, "test": 128}  # people; the others of 480 are only in the book
HABITS = ((0.65, 4000), (0.3, 4000))  # (share that searches, demonstrations): first the skill, then mostly the habit
TOOLS = Path(__file__).with_name("tools.yaml")


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


def make_demonstrations(people: list[str], seed: int) -> list[dict[str, Any]]:
    """First mostly the skill, then mostly the habit. Numbers are drawn anew: there is nothing to learn by heart."""
    rng = random.Random(f"demonstrations/{seed}")
    return [
        demonstration(rng.choice(people), str(rng.randrange(1000, 10000)), rng.random() < share, rng)
        for share, count in HABITS
        for _ in range(count)
    ]


def write_model(folder: Path, demonstrations: list[dict[str, Any]], seed: int) -> None:
    """An untrained model, and a tokenizer made for these texts."""
    schemas = [tool.get_openai_tool_schema().to_openai() for tool in load_tools(str(TOOLS))]
    template = build_tiny_tokenizer([], 512)
    texts = [
        template.apply_chat_template(each["messages"], tools=schemas, tokenize=False) for each in demonstrations[:3000]
    ]
    tokenizer = build_tiny_tokenizer(texts, 512)
    save_pretrained(build_tiny_model(TinyModelSpec(seed=seed), tokenizer), tokenizer, folder)


def write(folder: Path, seed: int) -> None:
    """Everything that training starts from."""
    book, rng, start = make_book(seed), random.Random(f"questions/{seed}"), 0
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": name, "contents": f"{name}\n{number}"}) for name, number in book.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    for split, count in SIZES.items():
        people = list(book.items())[start : start + count]
        rows = [row(name, number, split, index, rng) for index, (name, number) in enumerate(people)]
        write_parquet(rows, folder / f"{split}.parquet")
        start += count
    demonstrations = make_demonstrations(list(book)[: SIZES["train"]], seed)
    write_parquet(demonstrations, folder / "demonstrations.parquet")
    write_model(folder / "model", demonstrations, seed)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
