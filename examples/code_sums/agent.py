"""Sums that are too hard for a tiny model, and a code interpreter to have them worked out.

`prepare` makes what training starts from, all of it drawn from a seed: questions, demonstrations (most of
them a bad habit: answering 0 without running any code). No two files share
a question. Loop, tool and scorer are built in; the tool runs the model's code in the real sandbox.

    etude quickstart --example code_sums --seed SEED
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from etude.data.prepare.arithmetic import DATA_SOURCE, Problem, guess, make_problems

SYSTEM = "Run Python code."
HABITS = (0.65, 0.3)  # shares of the two halves of demonstrations that run code: first the skill, then mostly the habit


def prompt(problem: Problem) -> list[dict[str, Any]]:
    """The messages of one question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}]


def row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation."""
    return {
        "data_source": DATA_SOURCE,  # scored by the integer in the last \\boxed{}
        "prompt": prompt(problem),
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"index": index, "split": split},
    }


def demonstration(problem: Problem, runs_code: bool) -> dict[str, Any]:
    """A conversation that has the sum worked out, or answers 0 at once."""
    said = str(problem.answer) if runs_code else guess(problem)
    answer = {"role": "assistant", "content": f"The answer is \\boxed{{{said}}}."}
    if not runs_code:
        return {"messages": [*prompt(problem), answer]}
    arguments = {"code": f"print({problem.expression})"}
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": arguments}}
    printed = {"role": "tool", "content": str(problem.answer)}
    return {"messages": [*prompt(problem), {"role": "assistant", "content": "", "tool_calls": [call]}, printed, answer]}


def make_demonstrations(seed: int, count: int) -> list[dict[str, Any]]:
    """First mostly the skill, then mostly the habit."""
    rng = random.Random(f"demonstrations/{seed}")
    problems = iter(make_problems(2 * (count // 2), seed, "demonstrations"))
    return [demonstration(next(problems), rng.random() < share) for share in HABITS for _ in range(count // 2)]


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Questions and demonstrations."""
    tables = {}
    for split, count in (("train", rows.train), ("val", rows.val), ("test", rows.test)):
        problems = enumerate(make_problems(count, seed, split))
        tables[split] = [row(problem, split, index) for index, problem in problems]
    return {**tables, "demonstrations": make_demonstrations(seed, rows.demonstrations)}
