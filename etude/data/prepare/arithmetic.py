"""The quickstart's task: three integers, two operators, one calculator.

Invariant: an expression belongs to exactly one split, chosen by a hash of its text, so no two splits share a question
whatever the seeds and sizes; within a split expressions are unique. Rows depend only on (n, seed, split). Demonstrations
teach the format and, on purpose, mostly the wrong habit (answering without the tool), so that reinforcement learning has
something to correct. Scoring (`etude/arithmetic`) is left to `etude.rewards`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from operator import add, mul, sub
from pathlib import Path

from etude.data.files import Row
from etude.data.prepare.sources import training_row, write_tables
from etude.errors import DataError

DATA_SOURCE = "etude/arithmetic"
SYSTEM = "Use the calculator tool."
TOOL = "calculator"
QUESTIONS = ("What is {}?", "Compute {}.", "Calculate {}.", "How much is {}?", "Please work out {}.")
SPLITS = (*["train"] * 4, *["demonstrations"] * 2, "val", "test")  # shares of the expressions
MAX_ROWS = 500_000  # a split of one eighth holds about a million expressions

_OPERATORS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
_SMALLEST, _LARGEST = 2, 99


@dataclass(frozen=True)
class Problem:
    """A question with its exact answer."""

    expression: str
    question: str
    answer: int


@dataclass(frozen=True)
class Habits:
    """Shares of demonstrations: `good` call the tool and report its result, `misread` call it and report it wrongly (a
    digit removed or added), and the rest answer 0 without calling it.

    Raises:
        DataError: a share is negative or the two sum to more than 1.
    """

    good: float = 1 / 3
    misread: float = 0.1

    def __post_init__(self) -> None:
        if min(self.good, self.misread) < 0 or self.good + self.misread > 1:
            raise DataError(f"habits: good={self.good} and misread={self.misread} must be shares of 1")

    def counts(self, n: int) -> dict[str, int]:
        """Returns how many of `n` demonstrations show each habit."""
        good = round(self.good * n)
        misread = min(round(self.misread * n), n - good)
        return {"good": good, "misread": misread, "direct": n - good - misread}


def evaluate(numbers: tuple[int, int, int], operators: tuple[str, str]) -> int:
    """Returns the value of `a op b op c`, multiplication first."""
    (a, b, c), (first, second) = numbers, operators
    if second == "*":
        return _OPERATORS[first](a, b * c)
    return _OPERATORS[second](_OPERATORS[first](a, b), c)


def split_of(expression: str) -> str:
    """Returns the only split that may hold `expression`."""
    return SPLITS[hashlib.sha256(expression.encode()).digest()[0] % len(SPLITS)]


def make_problems(n: int, seed: int, split: str) -> list[Problem]:
    """Generates `n` different problems of `split`.

    Raises:
        DataError: `split` is unknown or `n` is negative or more than `MAX_ROWS`.
    """
    if split not in SPLITS or not 0 <= n <= MAX_ROWS:
        known = ", ".join(dict.fromkeys(SPLITS))
        raise DataError(f"arithmetic: cannot make {n} rows of '{split}' (0 to {MAX_ROWS} rows of {known})")
    rng = random.Random(f"{DATA_SOURCE}/{split}/{seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < n:
        a, b, c = (rng.randint(_SMALLEST, _LARGEST) for _ in range(3))
        first, second = (rng.choice("+-*") for _ in range(2))
        expression = f"{a} {first} {b} {second} {c}"
        question = rng.choice(QUESTIONS).format(expression)
        problem = Problem(expression, question, evaluate((a, b, c), (first, second)))
        if split_of(problem.expression) == split:
            problems.setdefault(problem.expression, problem)
    return list(problems.values())


def make_rows(n: int, seed: int, split: str) -> list[Row]:
    """Generates `n` rows of the RL row contract; raises as `make_problems`.

    The calculator needs no arguments at creation; it is given the question so that the format is complete.
    """
    return [
        training_row(
            DATA_SOURCE,
            [("system", SYSTEM), ("user", problem.question)],
            str(problem.answer),
            {TOOL: {"question": problem.question}},
            ability="math",
            extra={"split": split, "index": index, "question": problem.question},
        )
        for index, problem in enumerate(make_problems(n, seed, split))
    ]


def _prompt(problem: Problem) -> list[Row]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}]


def make_demonstrations(n: int, seed: int, habits: Habits = Habits()) -> list[Row]:
    """Generates `n` rows `{messages, habit}` in random order, with exactly `habits.counts(n)` of each habit.

    Tool calls carry their arguments as an object. Raises as `make_problems`.
    """
    rng = random.Random(f"{DATA_SOURCE}/habits/{seed}")
    drawn = [habit for habit, count in habits.counts(n).items() for _ in range(count)]
    rng.shuffle(drawn)
    problems = make_problems(n, seed, "demonstrations")
    return [{"messages": _conversation(rng, p, habit), "habit": habit} for p, habit in zip(problems, drawn)]


def _conversation(rng: random.Random, problem: Problem, habit: str) -> list[Row]:
    if habit == "direct":
        return [*_prompt(problem), _answer(guess(problem))]
    result = str(problem.answer)
    said = result if habit == "good" else misread(rng, result)
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"expression": problem.expression}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [*_prompt(problem), calls, {"role": "tool", "content": result}, _answer(said)]


def _answer(number: str) -> Row:
    return {"role": "assistant", "content": f"The answer is \\boxed{{{number}}}."}


def guess(problem: Problem) -> str:
    """Returns a constant wrong answer: always 0 (or 1, if 0 is correct).

    Random digits would be noise to learn, and numbers of the question would compete with the tool's result; a small
    model then copies results badly, and no amount of tool calls helps it.
    """
    return "1" if problem.answer == 0 else "0"


def misread(rng: random.Random, result: str) -> str:
    """Returns `result`, an integer as text, with one digit removed or added: another integer without leading zeros."""
    sign, digits = ("-", result[1:]) if result.startswith("-") else ("", result)
    while True:
        place = rng.randrange(len(digits) + 1)
        if rng.random() < 0.5:
            wrong = digits[:place] + str(rng.randint(0, 9)) + digits[place:]
        else:
            wrong = digits[:place] + digits[place + 1 :]
        is_integer = (wrong and not wrong.startswith("0")) or (wrong == "0" and not sign)
        if is_integer and wrong != digits:
            return sign + wrong


def write(
    output_dir: str | Path,
    *,
    train: int,
    val: int,
    test: int,
    demonstrations: int,
    seed: int,
    habits: Habits = Habits(),
) -> dict[str, Path]:
    """Writes `<split>.parquet` for each split with rows; a count of 0 skips its file. Returns the paths by split.

    Raises:
        DataError: a count is out of range or a file cannot be written.
    """
    tables = {split: make_rows(n, seed, split) for split, n in (("train", train), ("val", val), ("test", test))}
    tables["demonstrations"] = make_demonstrations(demonstrations, seed, habits)
    return write_tables({split: rows for split, rows in tables.items() if rows}, output_dir)
