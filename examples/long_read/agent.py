"""A text that does not fit the context, read page by page in a conversation that is compacted.

`Reader` is the environment: it shows the next page whenever the model says so, and "Answer." after the last. The model is
asked for a summary whenever the conversation has grown too long (`multi_turn.compact` in agent.yaml), and goes on from the
question and that summary alone. So it knows the answer only if the line that has it went into every summary from there on.

`prepare` makes what training starts from, all of it drawn from a seed: rows, and demonstrations of which many show a bad
habit: summing up nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.agents.compaction import with_summary
from etude.agents.environments import TextEnv, register_env

TOWNS = ["Bari", "Bonn", "Cork", "Graz", "Kiel", "Kyoto", "Lima", "Metz", "Oslo", "Paris", "Riga", "Rome"]
WEATHER = ["fog", "frost", "hail", "rain", "sleet", "snow", "sun", "wind"]
PAGES = 5  # of each row, with a line each
NEXT, LAST, SUM_UP = "next", "Answer.", "Sum up."
NOTHING, UNKNOWN = "nothing", "unknown"
SKILLED = (1.0, 0.3)  # share of episodes whose summaries hold the line: first the skill, then mostly the habit


@register_env("reader")
class Reader(TextEnv):
    """`options` is the row's `extra_info`: its `pages`, and the `town` that is asked for."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Nothing is shown yet."""
        assert options is not None
        self._pages, self._town = list(options["pages"]), options["town"]
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Shows the next page; any other word is the answer."""
        if action.strip() == NEXT:
            return self._pages.pop(0) if self._pages else LAST, 0.0, False, False, {}
        return "", float(action.strip() == self._town), True, False, {}


def make_row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    """A question, and pages: one of them says where the key is, the others are about the weather."""
    pages, town = [f"{rng.choice(WEATHER)} today" for _ in range(PAGES)], rng.choice(TOWNS)
    line = f"key {town}"
    pages[rng.randrange(PAGES)] = line
    return {
        "data_source": "examples/long_read",
        "prompt": [{"role": "system", "content": "Where is the key?"}, {"role": "user", "content": "Read."}],
        "reward_model": {"style": "rule", "ground_truth": town},
        "extra_info": {"index": index, "split": split, "pages": pages, "town": town, "line": line},
    }


def demonstrations(row: dict[str, Any], keeps: bool, rng: random.Random) -> Iterator[dict[str, Any]]:
    """The sequences of an episode: each ends with a summary, of one to three pages, and the last with the answer."""
    pages, line, said = list(row["extra_info"]["pages"]), row["extra_info"]["line"], NOTHING
    messages = row["prompt"]
    while pages:
        shown = [pages.pop(0) for _ in range(min(rng.randint(1, 3), len(pages)))]
        said = line if keeps and line in (said, *shown) else NOTHING
        yield {"messages": [*messages, *turns(*shown), *answered(SUM_UP, said)]}
        messages = with_summary(row["prompt"], said)
    answer = UNKNOWN if said == NOTHING else row["reward_model"]["ground_truth"]
    yield {"messages": [*messages, *turns(LAST), {"role": "assistant", "content": answer}]}


def turns(*pages: str) -> list[dict[str, Any]]:
    """The model asks for pages, and sees them."""
    return [{"role": role, "content": text} for page in pages for role, text in (("assistant", NEXT), ("user", page))]


def answered(question: str, answer: str) -> list[dict[str, Any]]:
    """The model answers."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows and demonstrations."""
    tables = {}
    for split in ("train", "val", "test"):
        rng = random.Random(f"{split}/{seed}")
        tables[split] = [make_row(rng, split, index) for index in range(getattr(rows, split))]
    rng = random.Random(f"demonstrations/{seed}")
    shown: list[dict[str, Any]] = []
    for share in SKILLED:
        part: list[dict[str, Any]] = []
        while len(part) < rows.demonstrations // len(SKILLED):
            part += demonstrations(make_row(rng, "demonstrations", len(part)), rng.random() < share, rng)
        rng.shuffle(part)
        shown += part
    return {**tables, "demonstrations": shown}
