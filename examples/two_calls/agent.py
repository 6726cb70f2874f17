"""A catalogue behind an MCP server, in which a price takes two calls: the id of a name, and the price of that id.

`prepare` makes what training starts from, all of it drawn from a seed: the catalogue, questions, and demonstrations (most of
them a bad habit: answering 0 without any call). Articles of the test are in the catalogue and in no other file. Loop and
scorer are built in; the tools are those of `server.py`, which runs as a subprocess; `serve` tells it where the
catalogue is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KINDS = "red blue green black white pink brown gold tiny small short long wide tall large huge old new thin round"
ARTICLES = "kettle lamp radio clock chair scale stove fan bike tent drill phone mixer iron heater pump"
SYSTEM = "Find the price."
CALLS = (0.65, 0.3)  # shares of the two halves of demonstrations that call: first the skill, then mostly the habit


def make_catalogue(seed: int) -> dict[str, dict[str, str]]:
    """Ids by name, in random order, and prices by id."""
    rng = random.Random(f"catalogue/{seed}")
    names = [f"{kind} {article}" for kind in KINDS.split() for article in ARTICLES.split()]
    rng.shuffle(names)
    ids = dict(zip(names, draw_numbers(rng, len(names))))
    return {"ids": ids, "prices": dict(zip(ids.values(), draw_numbers(rng, len(names))))}


def draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of three digits."""
    return [str(number) for number in rng.sample(range(100, 1000), count)]


def prompt(name: str) -> list[dict[str, Any]]:
    """The messages of one question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Price of {name}?"}]


def row(name: str, price: str, split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation."""
    return {
        "data_source": "searchR1_nq",  # scored as in Search-R1: exact match of the last <answer>
        "prompt": prompt(name),
        "reward_model": {"style": "rule", "ground_truth": {"target": [price]}},
        "extra_info": {"index": index, "split": split},
    }


def demonstration(name: str, numbers: list[str], calls: bool) -> dict[str, Any]:
    """A conversation that makes both calls, or answers 0 at once. `numbers`: the id and the price."""
    messages, said = prompt(name), "0"
    if calls:
        said = numbers[1]
        for tool, arguments, answer in zip(("find", "price"), ({"name": name}, {"id": numbers[0]}), numbers):
            call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": answer})
    return {"messages": [*messages, {"role": "assistant", "content": f"<answer>{said}</answer>"}]}


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Questions and demonstrations, and the catalogue. The demonstrations' numbers are drawn anew: there is nothing to learn
    by heart."""
    catalogue, start, tables = make_catalogue(seed), 0, {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "catalogue.json").write_text(json.dumps(catalogue))
    articles = [(name, catalogue["prices"][number]) for name, number in catalogue["ids"].items()]
    for split, count in (("train", rows.train), ("val", rows.val), ("test", rows.test)):
        chosen = enumerate(articles[start : start + count])
        tables[split] = [row(name, price, split, index) for index, (name, price) in chosen]
        start += count
    rng, count = random.Random(f"demonstrations/{seed}"), rows.demonstrations
    shown = [
        demonstration(rng.choice(articles[: rows.train])[0], draw_numbers(rng, 2), rng.random() < CALLS[2 * i // count])
        for i in range(count)
    ]
    return {**tables, "demonstrations": shown}


@contextmanager
def serve(folder: Path) -> Iterator[dict[str, str]]:
    """Where the server finds the catalogue; the server itself is started by the tools."""
    yield {"CATALOGUE": str(folder / "catalogue.json")}
