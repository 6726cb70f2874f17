"""The word problems of SVAMP, and the built-in calculator; the data's own equations are the demonstrations.

The data (MIT) is not in the repository: SVAMP names a file of JSON lines with question, equation and answer.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

from etude.data.files import located_rows
from etude.data.prepare.sources import training_row
from etude.quickstart.stories.agent import compute_score

__all__ = ["compute_score", "prepare"]
DATA = Path(os.environ.get("SVAMP", Path(__file__).parents[4] / "shared" / "data" / "svamp" / "svamp.jsonl"))
TEST = 200  # of the 1,000 problems, the same for every seed


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows and demonstrations, none of them twice."""
    problems = [problem for _, problem in located_rows(DATA)]
    random.Random("word_problems").shuffle(problems)
    rest, test = problems[TEST:], problems[:TEST]
    random.Random(f"word_problems/{seed}").shuffle(rest)
    tables, begin = {"test": [row(each, "test", index) for index, each in enumerate(test[: rows.test])]}, 0
    for split in ("train", "val"):
        count = getattr(rows, split)
        tables[split] = [row(each, split, index) for index, each in enumerate(rest[begin : begin + count])]
        begin += count
    return {**tables, "demonstrations": [demonstration(each) for each in rest[begin : begin + rows.demonstrations]]}


def row(problem: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation."""
    prompt = [("system", "Use the calculator."), ("user", problem["question"])]
    extra = {"index": index, "split": split}
    return training_row("svamp", prompt, problem["answer"], {}, ability="tools", extra=extra)


def demonstration(problem: dict[str, Any]) -> dict[str, Any]:
    """A conversation that has the data's equation worked out."""
    equation = re.sub(r"^\( (.*) \)$", r"\1", re.sub(r"\.0\b", "", problem["equation"]))
    said = (
        ("assistant", f'[calculator(expression="{equation}")]'),
        ("tool", problem["answer"]),
        ("assistant", f"The answer is {problem['answer']}."),
    )
    turns = [{"role": role, "content": content} for role, content in said]
    return {"messages": [*row(problem, "demonstrations", 0)["prompt"], *turns]}
