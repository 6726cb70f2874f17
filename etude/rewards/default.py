"""The scorers that come with Étude, by data source: used where the user gives no function (`user_functions`).

Invariant: a row of a data source that is not registered is an error that names it. Execution (threads, processes, timeouts,
errors) is left to the reward managers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from etude.errors import ConfigError
from etude.registry import Registry, suggestion
from etude.rewards import bfcl, choice, code, geo3k, gsm8k, math, math_dapo, numina, qa
from etude.rewards.view import TrajectoryView

Score = float | Mapping[str, Any]
Scorer = Callable[..., Score | Awaitable[Score]]
"""Called with `data_source, solution_str, ground_truth, extra_info, trajectory` by keyword; returns a number, a mapping
with the key `score`, or an awaitable of either. A scorer with the attribute `batched` takes lists and returns a list."""

SCORERS: Registry[Callable[..., Score]] = Registry("data source")
SCORERS.register("openai/gsm8k")(gsm8k.compute_score)
SCORERS.register("etude/arithmetic")(math.integer_score)
SCORERS.register("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")(math.compute_score)
SCORERS.register("math_dapo", "math", "math_dapo_reasoning")(math_dapo.compute_score)
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
SCORERS.register(*(f"numina_{name}" for name in _NUMINA))(numina.compute_score)
SCORERS.register("hiyouga/geometry3k")(geo3k.grade)
SCORERS.register("TencentARC/Video-Holmes", "etude/pictures")(choice.compute_score)
_QUESTIONS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SCORERS.register("web_questions", "strategyqa", *_QUESTIONS, *(f"searchR1_{name}" for name in _QUESTIONS))(
    qa.compute_score
)
SCORERS.register("codecontests", "apps", "codeforces", "taco")(code.compute_score)
SCORERS.register("openai/openai_humaneval", "humaneval", "google-research-datasets/mbpp", "mbpp")(code.score_all_tests)
SCORERS.register("bfcl", "gorilla-llm/Berkeley-Function-Calling-Leaderboard")(bfcl.compute_score)

FAMILIES: Mapping[str, Callable[..., Score]] = {"aime": math_dapo.compute_score, "bfcl_": bfcl.compute_score}
"""Scorers by prefix, for every data source that begins with it."""

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = {f"{name}s": name for name in (*ARGUMENTS[:3], "extra_info", "trajectory")} | {
    "trajectories": "trajectory"
}
"""Parameter of a batch function, named as in verl's `batch` manager → the row argument that its list holds."""
COMPONENTS = "reward_components"
"""Key in a score's details that holds the weighted reward of each function; the score is their sum."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    trajectory: TrajectoryView | None = None,
) -> Score:
    """Scores `solution_str` with the function registered for `data_source`; raises as `scorer_of`."""
    scorer = scorer_of(data_source)
    if _sees_trajectory(scorer):
        return scorer(solution_str, ground_truth, trajectory=trajectory)
    return scorer(solution_str, ground_truth)


ANSWERS: Mapping[Callable[..., Score], Callable[[str], str | None]] = {
    gsm8k.compute_score: gsm8k.extract_answer,
    math.integer_score: math.last_boxed,
    math.compute_score: math.last_boxed,
    qa.compute_score: qa.extract_answer,
}
"""Scorer that returns a number → function that extracts the answer it scores."""


def score_row(**arguments: Any) -> Score:
    """Like `compute_score`, but adds to a plain number `acc` and `pred`, the parsed answer (None if there is none). The
    managers call it if the user has no function of their own."""
    result = compute_score(**arguments)
    scorer, text = scorer_of(arguments["data_source"]), arguments["solution_str"]
    if isinstance(result, Mapping):
        return result
    if scorer is choice.compute_score:  # what it compares depends on the reference
        return {"score": result, "acc": result, "pred": choice.extract_answer(text, arguments["ground_truth"])}
    read = ANSWERS.get(scorer)
    return result if read is None else {"score": result, "acc": result, "pred": read(text)}


@functools.cache
def _sees_trajectory(scorer: Callable[..., Score]) -> bool:
    return "trajectory" in inspect.signature(scorer).parameters


def scorer_of(data_source: str) -> Callable[..., Score]:
    """Returns the function registered for `data_source`; raises ConfigError if there is none."""
    if data_source in SCORERS:
        return SCORERS.get(data_source)
    for prefix, scorer in FAMILIES.items():
        if str(data_source).startswith(prefix):
            return scorer
    own = (
        "set custom_reward_function.path to a file with your compute_score (`etude rescore`, `etude reward`: give --reward "
        "reward.py:compute_score; `etude sft`, which has neither: register it with etude.rewards.SCORERS.register("
        f"{str(data_source)!r}) in a file of `plugins`), or, if the agent returns its reward, "
    )
    known = f"(known: {', '.join([*SCORERS.names(), *(f'{prefix}*' for prefix in FAMILIES)])})"
    near = suggestion(str(data_source), SCORERS.names())
    raise ConfigError(
        f"no scorer for the data source '{data_source}'{'' if near else f' {known}'}",
        fix=f"{f'{near} {known}; ' if near else ''}{own}reward_model.enable=false",
    )


def check_truth(data_source: str, ground_truth: Any) -> None:
    """Checks that the function registered for `data_source` can read a row's `ground_truth`.

    Raises:
        DataError: it cannot, or there is none and the function compares with it.
        ConfigError: as `scorer_of`.
    """
    reader = getattr(scorer_of(data_source), "truth_reader", None)
    if reader is not None:
        reader(ground_truth)
