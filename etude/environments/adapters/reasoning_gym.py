"""`reasoning_gym:NAME`: a question from a generator of Reasoning Gym, answered in one turn, or in several attempts.

Arguments: `attempts` (1), and those of the generator's configuration. The seed of a session is the number of its question.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from etude.environments.base import Environment, Step
from etude.errors import ConfigError, one_line
from etude.registry import unknown_name

ASK = "Write your final answer between <answer> and </answer>."
AGAIN = "That is not right. Try again."
UNSOUND = {
    **dict.fromkeys(
        ("graph_color", "boxnet", "rush_hour", "rubiks_cube", "propositional_logic"), "its own answers score about 0"
    ),
    "game_of_life_halting": "any answer scores 1",
    "prime_factorization": "scoring some answers raises",
}
"""Generators of 0.1.25 whose scores teach nothing."""

logger = logging.getLogger(__name__)


class Question(Environment):
    """One question; the score is the generator's, of the last attempt. A cut episode without an attempt is worth 0."""

    def __init__(self, dataset: Any, attempts: int) -> None:
        self._dataset, self._left, self._score = dataset, attempts, 0.0

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Returns question number `seed`."""
        with _lock:
            self._entry = self._dataset[seed]
        return f"{self._entry['question']}\n{ASK}"

    def step(self, text: str) -> Step:
        """Scores the answer; another attempt follows if it is wrong and one is left."""
        self._score = float(self._dataset.score_answer(answer_in(text), self._entry))
        self._left -= 1
        return Step(f"{AGAIN} {ASK}", done=self._score >= 1.0 or self._left <= 0)

    def score(self) -> dict[str, float]:
        """Returns the score of the last attempt, in [0, 1]."""
        return {"score": self._score, "acc": float(self._score >= 1.0)}

    def answer(self) -> str | None:
        """The generator's own answer, which must earn 1; for `etude env check`."""
        answer = self._entry.get("answer")
        return None if answer is None else f"<answer>{answer}</answer>"


_lock = threading.Lock()  # some generators keep state between questions


def answer_in(text: str) -> str | None:
    """What stands in the last `<answer>` after the thought; None if there is none."""
    found = re.findall(r"<answer>(.*?)</answer>", text.rpartition("</think>")[2], re.DOTALL)
    return found[-1].strip() if found else None


def names() -> list[str]:
    """The generators."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def open_environment(
    name: str, *, attempts: int = 1, **args: Any
) -> tuple[Callable[[], Environment], type[Environment]]:
    """See the package.

    Raises:
        ConfigError: there is no such generator, or it does not take these arguments.
    """
    import reasoning_gym

    if name not in names():
        raise unknown_name(ConfigError, f"reasoning_gym has no generator '{name}'", name, names())
    if not isinstance(attempts, int) or attempts < 1:
        raise ConfigError(f"args.attempts must be a whole number from 1, not {attempts!r}")
    try:
        dataset = reasoning_gym.create_dataset(name, size=2**31 - 1, seed=0, **args)
    except Exception as error:  # a generator may raise anything
        raise ConfigError(f"reasoning_gym:{name}: args: {one_line(error)}") from error
    if name in UNSOUND:
        logger.warning("reasoning_gym:%s: its scores teach nothing in 0.1.25: %s", name, UNSOUND[name])
    return partial(Question, dataset, attempts), Question
