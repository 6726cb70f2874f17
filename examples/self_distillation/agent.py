"""Things that were moved: most who are asked still say where they were, and the model learnt it from them.

Each article has an old place and a new one, drawn from the seed. `prepare` shows answers of which `MOVED` are right, and how
to repeat an answer that the prompt quotes. In training the policy's answers are judged by the policy itself, with a right
answer of the same group in its prompt (`agent.yaml`).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

ARTICLES = "kettle lamp radio clock chair scale stove fan bike tent drill phone mixer iron heater pump"
PLACES = "hall attic cellar garage kitchen shed office porch"
QUESTIONS = ("Where is the {}?", "I need the {}.", "Do you know where the {} is?", "Who has seen the {}?")
QUOTE = "A right answer: {}"  # as `distillation.hint` has it
MOVED = 0.25  # share of demonstrations that know the new place


def answer(place: str) -> str:
    """What is to be said."""
    return f"It is in the {place}."


def make_row(article: str, question: str, place: str, split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation."""
    return {
        "data_source": "examples/self_distillation",
        "prompt": [{"role": "user", "content": question.format(article)}],
        "reward_model": {"style": "rule", "ground_truth": answer(place)},
        "extra_info": {"index": index, "split": split},
    }


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows and demonstrations; each article is tested with a question that it is not trained with."""
    rng, places = random.Random(f"self_distillation/{seed}"), PLACES.split()
    homes = {article: rng.sample(places, 2) for article in ARTICLES.split()}  # old and new
    unseen = {article: rng.choice(QUESTIONS) for article in homes}

    def draw(split: str, index: int) -> dict[str, Any]:
        article = rng.choice(list(homes))
        known = [question for question in QUESTIONS if question != unseen[article]]
        question = rng.choice(known) if split == "train" else unseen[article]
        return make_row(article, question, homes[article][1], split, index)

    def demonstrate() -> dict[str, Any]:
        article = rng.choice(list(homes))
        asked, said = rng.choice(QUESTIONS).format(article), answer(homes[article][rng.random() < MOVED])
        if rng.random() < 0.5:  # whatever it says
            said = answer(rng.choice(places))
            asked += "\n" + QUOTE.format(said)
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}

    tables = {split: [draw(split, i) for i in range(getattr(rows, split))] for split in ("train", "val", "test")}
    return {**tables, "demonstrations": [demonstrate() for _ in range(rows.demonstrations)]}


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 for the place of the article, else 0.0."""
    return float(solution_str.strip() == ground_truth)
