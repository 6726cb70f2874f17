"""A shop's replies to its customers, which no rule scores: a judge does.

The loop is the built-in one, the reward what the judge says, divided by ten (`etude.rewards.judge`). `prepare` makes what
training starts from, all of it drawn from a seed: customers' messages, and demonstrations, replies with a phrase here and
there. `serve` starts the judge.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.quickstart import run_service

NAMES = "Ada Bo Cleo Dov Ema Finn Gus Hana Ivo Jun Kai Lena Milo Nora Otto Pia Quin Rosa Sami Tove Uma Vera Wim Yara"
ARTICLES = "kettle lamp radio clock chair scale stove fan bike tent drill phone mixer iron heater pump"
SHARE = 0.4  # of demonstrations that have a phrase, each phrase by itself


def prompt(name: str, article: str) -> list[dict[str, Any]]:
    """A customer's message."""
    return [{"role": "user", "content": f"I am {name}. My {article} is broken."}]


def row(name: str, article: str, split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation; there is no right answer to compare with."""
    return {
        "data_source": "examples/polite_replies",
        "prompt": prompt(name, article),
        "reward_model": {"style": "model", "ground_truth": ""},
        "extra_info": {"index": index, "split": split},
    }


def demonstration(name: str, article: str, rng: random.Random) -> dict[str, Any]:
    """A reply that is polite in some respects."""
    greets, names_it, is_sorry, helps = (rng.random() < SHARE for _ in range(4))
    cause = f"your {article}" if names_it else "this"
    reply = [
        f"Dear {name}," if greets else "Hello,",
        f"we are sorry about {cause}." if is_sorry else f"we know about {cause}.",
        "We will help you." if helps else "Good day.",
    ]
    return {"messages": [*prompt(name, article), {"role": "assistant", "content": " ".join(reply)}]}


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows and demonstrations."""
    rng = random.Random(f"polite_replies/{seed}")
    customers = [(name, article) for name in NAMES.split() for article in ARTICLES.split()]
    tables = {
        split: [row(*rng.choice(customers), split, index) for index in range(getattr(rows, split))]
        for split in ("train", "val", "test")
    }
    shown = [demonstration(*rng.choice(customers), rng) for _ in range(rows.demonstrations)]
    return {**tables, "demonstrations": shown}


@contextmanager
def serve(folder: Path) -> Iterator[dict[str, str]]:
    """The judge, in a process of its own."""
    with run_service(str(Path(__file__).with_name("judge.py"))) as address:
        yield {"JUDGE_URL": address}
