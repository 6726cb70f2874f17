"""`reasoning_gym:NAME`: a question from a generator of Reasoning Gym, answered in one turn, or in several attempts.

Arguments: `attempts` (1), and those of the generator's configuration. The seed of a session is the number of its question.

Invariant: nothing that the model writes is run. Nine scorers evaluate an answer as Python, in this process: of four, `eval`
takes literals only, and the answers of the others are formulas or count as none.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from etude.environments.arguments import check_arguments
from etude.environments.base import Environment, Step
from etude.environments.randomness import GlobalRandom
from etude.errors import ConfigError, one_line
from etude.registry import unknown_name
from etude.rewards.finite import as_reward
from etude.rewards.qa import extract_answer

ASK = "Write your final answer between <answer> and </answer>."
AGAIN = "That is not right. Try again."
FAULTS = {
    "game_of_life_halting": "any answer scores 1",
    "propositional_logic": "a premise that is copied from the question scores 1",
    "puzzle24": "any four numbers that make 24 score 1, whatever the question's",
    **dict.fromkeys(
        ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"),
        "a seed is another question in another process, unless PYTHONHASHSEED is set for all",
    ),
    "coin_flip": "the answer 0 scores 0.9 on average, and there are few questions: validation repeats those of training",
    "tower_of_hanoi": "there are few questions: validation repeats those of training",
}
"""Generators of 0.1.25 that one should not train on unwarned."""
KNOWN_SOLUTIONS = ("possible_answer", "example_correct_answer", "example_answer")
"""Where the metadata of a question with many right answers have one of them."""
LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Their scorers call `eval` on the answer."""
FORMULAS = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
"""Their scorers call SymPy's `parse_expr` on it, which runs it too."""
UNORDERED = ("complex_arithmetic",)
"""Their scorers take `min(1.0, score)`, which pays 1.0 for the answer NaN."""
_LONGEST_FORMULA, _MOST_DIGITS = 1000, 100
_FUNCTIONS = ("Abs", "acos", "asin", "atan", "cos", "cot", "csc", "exp", "ln", "log", "sec", "sin", "sqrt", "tan")
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
        source = self._entry["metadata"]["source_dataset"]  # also one of `composite`
        self._formula, self._unordered = source in FORMULAS, source in UNORDERED
        return f"{self._entry['question']}\n{ASK}"

    def step(self, text: str) -> Step:
        """Scores the answer; another attempt follows if it is wrong and one is left. An answer that the scorer trips over
        is wrong, and reported as `unreadable`: some scorers parse what the model wrote, and raise or compute NaN."""
        answer, unreadable = extract_answer(text), 0
        if answer and ((self._formula and not is_formula(answer)) or (self._unordered and "nan" in answer.lower())):
            answer, unreadable = None, 1
        try:
            self._score = as_reward(self._dataset.score_answer(answer, self._entry), "the scorer")
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
        if answer is None or (self._formula and not is_formula(answer)):  # it may repeat the question as an Integral
            return None
        return f"<answer>{json.dumps(answer) if isinstance(answer, dict) else answer}</answer>"


def is_formula(text: str) -> bool:
    """Whether it is numbers, letters and elementary functions with operators between, and quickly computed."""
    try:
        return len(text) <= _LONGEST_FORMULA and _magnitude(ast.parse(text.strip(), mode="eval").body) <= _MOST_DIGITS
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, ValueError):
        return False


def _magnitude(node: ast.AST) -> float:
    """A bound of log10 of a formula's numbers, letters being 1. Raises ValueError for what is no formula."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return math.log10(max(node.value, 1))
    if isinstance(node, ast.Name) and (len(node.id) == 1 or node.id == "pi"):
        return 0.0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        return _magnitude(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        given: list[ast.AST] = [*node.args, *node.keywords]
        [argument] = given
        return 10 ** _magnitude(argument) if node.func.id == "exp" else _magnitude(argument)
    if isinstance(node, ast.BinOp):
        left, right = _magnitude(node.left), _magnitude(node.right)
        if isinstance(node.op, ast.Pow):
            return float(left * 10**right)
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            return left + right if isinstance(node.op, ast.Mult | ast.Div) else max(left, right) + math.log10(2)
    raise ValueError("it is no formula")


def names() -> list[str]:
    """The generators."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def open_environment(name: str, *, attempts: int = 1, **args: Any) -> partial[Question]:
    """Raises ConfigError if there is no such generator, or it does not take these arguments."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if name not in names():
        raise unknown_name(ConfigError, f"reasoning_gym has no generator '{name}'", name, names())
    if attempts < 1:
        raise ConfigError(f"args.attempts must be a whole number from 1, not {attempts!r}")
    check_arguments(DATASETS[name][1], args, f"reasoning_gym:{name}")
    try:
        if name == "composite":
            args["datasets"] = [DatasetSpec(**each) for each in args["datasets"]]
        dataset = reasoning_gym.create_dataset(name, size=SIZES.get(name, 2**31 - 2), seed=0, **args)
    except Exception as error:  # a generator may raise anything
        raise ConfigError(f"reasoning_gym:{name}: args: {one_line(error)}") from error
    for each in LITERALS:
        vars(sys.modules[DATASETS[each][0].__module__])["eval"] = ast.literal_eval
    if name in FAULTS:
        logger.warning("reasoning_gym:%s: in 0.1.25, %s", name, FAULTS[name])
    return partial(Question, dataset, attempts)
