"""Which function scores a row: the one registered for its data source, or a user's function for all rows.

Invariant: every scorer returned here takes the four documented arguments `data_source, solution_str, ground_truth,
extra_info` by keyword, whichever of them its function declares. Running it (threads, time limits, errors) is left to the
reward manager.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from etude.errors import ConfigError
from etude.registry import Registry, did_you_mean, import_object
from etude.rewards import choice, code, geo3k, gsm8k, math, qa

Score = float | Mapping[str, Any]
Scorer = Callable[..., Score | Awaitable[Score]]
"""Called with `data_source, solution_str, ground_truth, extra_info` by keyword; returns a number or a mapping with
the key `score`, or an awaitable of one."""

SCORERS: Registry[Callable[[str, str], Score]] = Registry("data source")
SCORERS.register("openai/gsm8k")(gsm8k.compute_score)
SCORERS.register("etude/arithmetic")(math.integer_score)
SCORERS.register("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")(math.compute_score)
SCORERS.register("hiyouga/geometry3k")(geo3k.compute_score)
SCORERS.register("TencentARC/Video-Holmes", "etude/pictures")(choice.compute_score)
_QUESTIONS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SCORERS.register("web_questions", "strategyqa", *_QUESTIONS, *(f"searchR1_{name}" for name in _QUESTIONS))(
    qa.compute_score
)
SCORERS.register("codecontests", "apps", "codeforces", "taco")(code.compute_score)

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> Score:
    """Scores `solution_str` with the function registered for `data_source`; raises as `scorer_of`."""
    return scorer_of(data_source)(solution_str, ground_truth)


def scorer_of(data_source: str) -> Callable[[str, str], Score]:
    """The function registered for `data_source`.

    Raises:
        ConfigError: there is none.
    """
    if data_source not in SCORERS:
        raise ConfigError(
            f"no scorer for the data source '{data_source}'{did_you_mean(str(data_source), SCORERS.names())} "
            f"(known: {', '.join(SCORERS.names())}); set custom_reward_function.path to a file with your compute_score"
        )
    return SCORERS.get(data_source)


def load_compute_score(
    path: str, name: str = "compute_score", reward_kwargs: Mapping[str, Any] | None = None
) -> Scorer:
    """The user's function `name` of `path` (a file or a dotted module), sync or async, with `reward_kwargs` bound.

    It gets those of the four documented arguments that it declares (all of them if it takes `**kwargs`).

    Raises:
        ConfigError: the file or function does not exist, is not callable, requires an argument that is not provided,
            or does not take one of `reward_kwargs`.
    """
    where = f"'{name}' of {path} (custom_reward_function)"
    function = import_object(f"{path}:{name}")
    if not callable(function):
        raise ConfigError(f"{where} is not a function but of type {type(function).__name__}")
    extra = dict(reward_kwargs or {})
    named, takes_any = declared_arguments(function, where, _ARGUMENTS, extra, "custom_reward_function.reward_kwargs")
    accepted = _ARGUMENTS if takes_any else tuple(key for key in _ARGUMENTS if key in named)

    async def async_scorer(**arguments: Any) -> Score:
        return await function(**{key: arguments[key] for key in accepted if key in arguments}, **extra)

    def scorer(**arguments: Any) -> Score | Awaitable[Score]:
        return function(**{key: arguments[key] for key in accepted if key in arguments}, **extra)

    return async_scorer if inspect.iscoroutinefunction(function) else scorer


def declared_arguments(
    function: Callable[..., object], where: str, given: Sequence[str], extra: Mapping[str, Any], extra_key: str
) -> tuple[set[str], bool]:
    """Those of the `given` arguments that `function` declares by name, and whether it takes any beside. It is called with
    `extra`, the values of the key `extra_key`, too.

    Raises:
        ConfigError: it requires another argument, or does not take one of `extra`; begins with `where`.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for parameter in parameters:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        provided = parameter.name in named & {*given, *extra}
        if parameter.default is parameter.empty and not variadic and not provided:
            raise ConfigError(
                f"{where} requires '{parameter.name}', which nothing provides: its parameters are matched by name with "
                f"{', '.join(given)} and {extra_key}"
            )
    for key in extra:
        if key in given or not (takes_any or key in named):
            raise ConfigError(f"{where} has no {extra_key}.{key}")
    return named & set(given), takes_any
