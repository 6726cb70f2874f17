"""A user of one's own, who forgets to say something and tells it only when asked.

`Customer` orders an article and leaves out its colour or its size. A model that asks for what is missing is told; one that
writes the order at once has to guess. `prepare` makes what training starts from, all of it drawn from a seed: rows, and
demonstrations, most of which do not ask.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from etude.agents.interactions import BaseInteraction

ARTICLES = "kettle lamp radio clock chair scale stove fan bike tent drill phone mixer iron heater pump"
DETAILS = {
    "colour": "red blue green black white pink brown gold",
    "size": "tiny small short long wide tall large huge",
}
ASKS = (0.65, 0.2)  # shares of the two halves of demonstrations that ask: first the skill, then mostly the habit
SYSTEM = "Take the order."


class Customer(BaseInteraction):
    """`order`, `missing` and `detail` are a row's: what is right, what was not said of it, and the answer to that."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answers a question, whatever it is about; anything else is the order, and ends the conversation."""
        said = messages[-1]["spoken"].strip()
        if said.endswith("?"):
            return False, reply(said, kwargs["missing"], kwargs["detail"]), 0.0, {}
        return True, "", float(said == kwargs["order"]), {}


def reply(question: str, missing: str, detail: str) -> str:
    """What the customer says to a question."""
    return f"It is {detail}." if missing in question else "I said so."


def make_row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation."""
    details = {kind: rng.choice(words.split()) for kind, words in DETAILS.items()}
    article, missing = rng.choice(ARTICLES.split()), rng.choice(list(DETAILS))
    [said] = [word for kind, word in details.items() if kind != missing]
    order = f"{details['size']} {details['colour']} {article}"
    return {
        "data_source": "examples/ask_first",
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"I want a {said} {article}."}],
        "reward_model": {"style": "rule", "ground_truth": order},
        "extra_info": {
            "index": index,
            "split": split,
            "interaction_kwargs": {"name": "customer", "order": order, "missing": missing, "detail": details[missing]},
        },
    }


def demonstration(row: dict[str, Any], asks: bool, rng: random.Random) -> dict[str, Any]:
    """A conversation that asks for what is missing, or guesses it."""
    customer, order = row["extra_info"]["interaction_kwargs"], row["reward_model"]["ground_truth"]
    missing, detail = customer["missing"], customer["detail"]
    if not asks:
        guessed = order.replace(detail, rng.choice(DETAILS[missing].split()))
        return {"messages": [*row["prompt"], {"role": "assistant", "content": guessed}]}
    question = f"Which {missing}?"
    asked = [{"role": "assistant", "content": question}, {"role": "user", "content": reply(question, missing, detail)}]
    return {"messages": [*row["prompt"], *asked, {"role": "assistant", "content": order}]}


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows and demonstrations; there are 2,048 orders, so that the splits share some."""
    rng, count = random.Random(f"ask_first/{seed}"), rows.demonstrations
    tables = {
        split: [make_row(rng, split, index) for index in range(getattr(rows, split))]
        for split in ("train", "val", "test")
    }
    shown = [
        demonstration(make_row(rng, "demonstrations", i), rng.random() < ASKS[2 * i // count], rng)
        for i in range(count)
    ]
    return {**tables, "demonstrations": shown}
