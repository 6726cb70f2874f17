"""The task of all contenders: `(a + b) * c`, with one calculator call for the sum and one for the product.

Invariant: questions depend only on their seed, and the tool's schema is one constant, so that all contenders render the
same prompts. Needs only the standard library.
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSTEM = "Solve the problem in steps. Let the calculator do every step."
SYSTEM_FILE = "benchmark.json"  # in the checkpoint's folder: holds the system prompt that it was trained with
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate one arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": 'An expression such as "12 + 7".'}},
            "required": ["expression"],
        },
    },
}
_EXPRESSION = re.compile(r"\s*(-?\d{1,9}) ([-+*]) (-?\d{1,9})\s*")
_FIRST = ("The sum comes first.", "I begin with the addition in the brackets.", "First I need the sum of both numbers.")
_SECOND = ("Now the product.", "That result is multiplied by the last number.", "The next step is the multiplication.")
_LAST = ("The answer is {}.", "So the final answer is {}.", "{} is the result.")


@dataclass(frozen=True)
class Question:
    """`(a + b) * c`."""

    a: int
    b: int
    c: int

    @property
    def text(self) -> str:
        return f"Compute ({self.a} + {self.b}) * {self.c}."

    @property
    def answer(self) -> str:
        return str((self.a + self.b) * self.c)


def questions(count: int, seed: int) -> list[Question]:
    """Generates `count` questions."""
    rng = random.Random(seed)
    return [Question(rng.randint(1, 49), rng.randint(1, 49), rng.randint(2, 9)) for _ in range(count)]


def prompt(question: Question, system: str) -> list[dict[str, str]]:
    """Returns the prompt messages of a question."""
    return [{"role": "system", "content": system}, {"role": "user", "content": question.text}]


def demonstration(question: Question, rng: random.Random, system: str) -> list[dict[str, Any]]:
    """Returns a conversation that solves the question with two calls."""
    total = question.a + question.b

    def turn(words: str, expression: str) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
        return {"role": "assistant", "content": words, "tool_calls": [call]}

    return [
        *prompt(question, system),
        turn(rng.choice(_FIRST), f"{question.a} + {question.b}"),
        {"role": "tool", "content": str(total)},
        turn(rng.choice(_SECOND), f"{total} * {question.c}"),
        {"role": "tool", "content": question.answer},
        {"role": "assistant", "content": rng.choice(_LAST).format(question.answer)},
    ]


def calculate(expression: str) -> str:
    """Returns the value of `a op b`.

    Raises:
        ValueError: it is something else.
    """
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        raise ValueError("write two whole numbers with +, - or * between them")
    a, b = int(found[1]), int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[found[2]])


def score(last_words: str, used_tool: bool, answer: str) -> float:
    """Returns 1 if the last turn holds the answer, plus 0.25 if a tool ran."""
    return float(answer in last_words) + 0.25 * used_tool


@dataclass(frozen=True)
class Latency:
    """Latency of a call in seconds: log-normal around `median`; the share `failures` of the calls fail.

    Both depend only on the call's expression and the seed, not on the caller or the time, so that a run can be replayed.
    """

    median: float = 0.0
    sigma: float = 0.5
    failures: float = 0.0
    seed: int = 0

    def draw(self, expression: str) -> tuple[float, bool]:
        """Returns (seconds, whether it fails) for a call."""
        rng = random.Random(f"{self.seed} {expression}")
        seconds = self.median * math.exp(self.sigma * rng.gauss(0, 1))
        return seconds, rng.random() < self.failures


def system_prompt(checkpoint: Path, given: str | None) -> str:
    """Returns the system prompt for a checkpoint: the given one, the one in its folder, or this module's."""
    noted = checkpoint / SYSTEM_FILE
    if given is None and noted.exists():
        return str(json.loads(noted.read_text())["system"])
    return SYSTEM if given is None else given
