"""`reasoning_gym:NAME`: a question from a generator of Reasoning Gym, answered in one turn, or in several attempts.

Arguments: `attempts` (1), and those of the generator's configuration. The seed of a session is the number of its question.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from etude.environments.arguments import check_arguments
from etude.environments.base import Environment, Step
from etude.environments.randomness import GlobalRandom
from etude.errors import ConfigError, one_line
from etude.registry import unknown_name

ASK = "Write your final answer between <answer> and </answer>."
AGAIN = "That is not right. Try again."
FAULTS = {
    "game_of_life_halting": "any answer scores 1",
    **dict.fromkeys(
        ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"),
        "a seed is another question in another process, unless PYTHONHASHSEED is set for all",
    ),
}
"""Generators of 0.1.25 that one should not train on unwarned."""
KNOWN_SOLUTIONS = ("possible_answer", "example_correct_answer", "example_answer")
"""Where the metadata of a question with many right answers have one of them."""
SIZES = {"acre": 4000, "word_ladder": 20_000, "gsm_symbolic": 2**20, "list_functions": 2**20}
"""How many questions are made of the generators that prepare all of them at once, or refuse more."""

logger = logging.getLogger(__name__)


class Question(Environment):
    """One question; the score is the generator's, of the last attempt. A cut episode without an attempt is worth 0."""

    def __init__(self, dataset: Any, attempts: int) -> None:
        self._dataset, self._left, self._score = dataset, attempts, 0.0

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Returns question number `seed`, counted around among those of `SIZES`."""
        number = seed % len(self._dataset)
        with GlobalRandom(number):  # some generators draw from it, and some keep state between questions
            self._entry = self._dataset[number]
        return f"{self._entry['question']}\n{ASK}"

    def step(self, text: str) -> Step:
        """Scores the answer; another attempt follows if it is wrong and one is left. An answer that the scorer trips over
        is wrong, and reported as `unreadable`: some scorers parse what the model wrote, and raise."""
        try:
            self._score, unreadable = float(self._dataset.score_answer(answer_in(text), self._entry)), 0
        except Exception:  # a scorer may raise anything
            self._score, unreadable = 0.0, 1
            logger.debug("the scorer raised", exc_info=True)
        self._left -= 1
        done = self._score >= 1.0 or self._left <= 0
        return Step(f"{AGAIN} {ASK}", done=done, metrics={"unreadable": unreadable})

    def score(self) -> dict[str, float]:
        """Returns the score of the last attempt, in [0, 1]."""
        return {"score": self._score, "acc": float(self._score >= 1.0)}

    def answer(self) -> str | None:
        """The generator's own answer, which must earn 1; for `etude env check`."""
        known = (self._entry["metadata"].get(key) for key in KNOWN_SOLUTIONS)
        answer = next((each for each in (self._entry.get("answer"), *known) if each is not None), None)
        return (
            None if answer is None else f"<answer>{json.dumps(answer) if isinstance(answer, dict) else answer}</answer>"
        )


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
    from reasoning_gym.factory import DATASETS

    if name not in names():
        raise unknown_name(ConfigError, f"reasoning_gym has no generator '{name}'", name, names())
    if attempts < 1:
        raise ConfigError(f"args.attempts must be a whole number from 1, not {attempts!r}")
    check_arguments(DATASETS[name][1], args, f"reasoning_gym:{name}")
    try:
        dataset = reasoning_gym.create_dataset(name, size=SIZES.get(name, 2**31 - 2), seed=0, **args)
    except Exception as error:  # a generator may raise anything
        raise ConfigError(f"reasoning_gym:{name}: args: {one_line(error)}") from error
    if name in FAULTS:
        logger.warning("reasoning_gym:%s: in 0.1.25, %s", name, FAULTS[name])
    return partial(Question, dataset, attempts), Question
