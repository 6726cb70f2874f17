"""The quickstart's task: questions that a pretrained model of 135 million parameters answers wrongly, and a calculator.

Half of the questions tell a one-step story. The prompt describes the form of a call and shows one worked example, a product
written with `*`; the untrained model copies that form now and then where a question looks the same, and never for a story.

Invariant: everything follows from the seed, no two tables share a question, and the stories of `val` and `test` tell of
other things than those of `train`.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

_CALL = '[calculator(expression="{}")]'
SYSTEM = (
    "You have a calculator. To use it, write a call in this form:\n"
    + _CALL.format("12 * 7")
    + "\nThen give the answer that it returns."
)
EXAMPLE = (
    {"role": "user", "content": "What is 48 * 31?"},
    {"role": "assistant", "content": _CALL.format("48 * 31")},
    {"role": "tool", "content": "1488"},
    {"role": "assistant", "content": "The answer is 1488."},
)
_PLAIN = ("What is {a} * {b}?", "What is {a} times {b}?", "What is {a} * {b}?", "What is {a} minus {b}?")
_STORIES = (
    "Each {box} holds {b} {things}. How many {things} are in {a} {box}s?",
    "A {box} of {things} costs {b} dollars. How much do {a} {box}s of {things} cost?",
    "There are {a} {things} in a {box}. {b} {things} are taken out. How many {things} are left?",
    "A {box} with {b} {things} is made in a minute. How many {things} are made in {a} minutes?",
)
_THINGS = {
    "train": [("apples", "crate"), ("pens", "packet"), ("nuts", "bag"), ("books", "case"), ("coins", "jar")],
    "test": [("eggs", "tray"), ("keys", "drawer"), ("lemons", "basket")],
}


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Makes the questions; there is nothing to demonstrate."""
    rng, seen = random.Random(f"stories/{seed}"), set[str]()
    return {
        split: [_row(rng, split, i, seen) for i in range(getattr(rows, split))] for split in ("train", "val", "test")
    }


def _kind(split: str, index: int) -> str:
    """The question's kind. Eight in a row, a batch, have one of each; after two batches of training, which teach the plain
    questions, one plain question and seven stories."""
    batch, place = divmod(index, 8)
    if split == "train" and batch >= 2 and place < 4:
        return (_PLAIN[batch % 4], *_STORIES[1:])[place]
    return (*_PLAIN, *_STORIES)[place]


def _row(rng: random.Random, split: str, index: int, seen: set[str]) -> dict[str, Any]:
    kind = _kind(split, index)
    things, box = rng.choice(_THINGS["train" if split == "train" else "test"])
    while True:
        a, b = rng.randint(100, 999), rng.randint(12, 99)
        question = kind.format(a=a, b=b, things=things, box=box)
        if question not in seen:
            break
    seen.add(question)
    answer = a - b if "minus" in kind or "left" in kind else a * b
    return {
        "data_source": "story" if kind in _STORIES else "plain",
        "prompt": [{"role": "system", "content": SYSTEM}, *EXAMPLE, {"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"index": index, "split": split},
    }


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Returns 1 if the last number that the model wrote is the answer, else 0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", solution_str.replace(",", ""))
    return 1.0 if numbers and numbers[-1] == ground_truth else 0.0
