"""The user's own reward functions: `load_compute_score` loads one from a file or module, `load_rewards` several as a
weighted sum.

Invariant: every scorer loaded here accepts the documented arguments `data_source, solution_str, ground_truth,
extra_info`, and `trajectory`, by keyword, whichever of them its function declares. Execution (threads, processes,
timeouts, errors) is left to the reward managers.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from etude.errors import ConfigError, InfrastructureError, describe_error
from etude.options.reward import WeightedFunction
from etude.options.validate import to_options
from etude.registry import import_object
from etude.rewards.default import ARGUMENTS, BATCH_ARGUMENTS, COMPONENTS, Score, Scorer, score_row
from etude.rewards.finite import as_score

_NONE: Mapping[str, Any] = {}
_OF_TRL = ("completions", "prompts", "completion_ids")
_FROM_TRL = (
    "that is a reward of TRL's, over lists: write `def compute_score(solution_str, ground_truth, extra_info=None)`, "
    "which returns the number of one answer"
)


class UserFunction:
    """A user's scorer: the function `name` of `path`, called with those of the documented arguments that it declares and
    with `reward_kwargs`. Pickles as its path and settings, so that other processes import it again."""

    def __init__(
        self, path: str, name: str, reward_kwargs: Mapping[str, Any], key: str, offered: Mapping[str, Any] = _NONE
    ) -> None:
        """`offered`: further arguments, passed if the function declares them and `reward_kwargs` does not set them."""
        self._made_of = (path, name, dict(reward_kwargs), key, dict(offered))
        self.place = f"'{name}' of {path}"
        where = f"{self.place} ({key})"
        try:
            function: Any = import_object(f"{path}:{name}")
        except ConfigError as error:
            raise error.at(key) from error
        if not callable(function):
            raise ConfigError(f"{where} is not a function but of type {type(function).__name__}")
        self._function = function
        self.is_async = inspect.iscoroutinefunction(function)
        self.taken = {each: offered[each] for each in inspect.signature(function).parameters if each in offered}
        self._extra = self.taken | dict(reward_kwargs)
        self.batched = not BATCH_ARGUMENTS.keys().isdisjoint(inspect.signature(function).parameters)
        given = tuple(BATCH_ARGUMENTS) if self.batched else (*ARGUMENTS, "trajectory")
        named, takes_any = declared_arguments(function, where, given, self._extra, f"{key}.reward_kwargs")
        self._accepted = named | (set(ARGUMENTS) if takes_any and not self.batched else set())

    def __call__(self, **arguments: Any) -> Any:
        """Returns the function's result; for a coroutine function, an awaitable."""
        return self._function(**{key: arguments[key] for key in self._accepted if key in arguments}, **self._extra)

    def __reduce__(self) -> tuple[Any, ...]:
        return UserFunction, self._made_of


def load_compute_score(
    path: str,
    name: str = "compute_score",
    reward_kwargs: Mapping[str, Any] | None = None,
    key: str = "custom_reward_function",
    offered: Mapping[str, Any] = _NONE,
) -> Scorer:
    """Loads the user's function `name` of `path` (a file or a dotted module), sync or async, with `reward_kwargs` bound.

    It gets those of the four documented arguments that it declares (all of them if it takes `**kwargs`), and
    `trajectory` if it names it; a batch function declares their plurals. It gets those of the `offered` arguments, such
    as `reward_model`, that it declares.

    Raises:
        ConfigError: the file or function does not exist, is not callable, requires an argument that is not provided, or
            does not accept one of `reward_kwargs`.
    """
    function = UserFunction(path, name, reward_kwargs or {}, key, offered)
    if not function.is_async:
        return function

    async def scorer(**arguments: Any) -> Score:  # verl-style managers call inspect.iscoroutinefunction on it
        result: Score = await function(**arguments)
        return result

    scorer.function = function  # type: ignore[attr-defined]
    return scorer


def load_named(given: str, key: str, reward_kwargs: Mapping[str, Any] | None = None) -> Scorer:
    """Loads a function of one answer, named as `FILE.py:NAME` (without a name, `compute_score`).

    Raises:
        ConfigError: it takes batches, or as `load_compute_score`.
    """
    path, colon, name = given.rpartition(":")
    scorer = load_compute_score(path if colon else given, name if colon else "compute_score", reward_kwargs, key)
    if getattr(user_function(scorer), "batched", False):
        raise ConfigError(f"{key}: {given} scores whole batches; name a function of one answer")
    return scorer


def user_function(scorer: Any) -> Any:
    """Returns the `UserFunction` wrapped by `load_compute_score`; any other scorer unchanged."""
    return getattr(scorer, "function", scorer)


def describe_scorer(scorer: Any, data_source: object) -> str:
    """Names a scorer for its errors; a function of the user's by name and file."""
    function = user_function(scorer)
    name = function.place if isinstance(function, UserFunction) else "compute_score"
    return f"{name} for the data source '{data_source}'"


class WeightedSum:
    """Combines several scorers: `score` is Σ weight · score, and each function's own score is reported under its name.

    Other values that a function returns are reported as `{name}/{key}`; `acc` is the first one that a function returns, else
    the score of the function with the largest weight (the first of equals): a penalty beside it makes no answer wrong.
    """

    def __init__(self, functions: Sequence[tuple[str, float, Scorer]]) -> None:
        self._functions = list(functions)
        self.taken = {name: value for *_, each in functions for name, value in getattr(each, "taken", _NONE).items()}

    def __call__(self, **arguments: Any) -> Score | Awaitable[Score]:
        """Returns the sum, or an awaitable of it if any function is asynchronous.

        Raises:
            InfrastructureError: a function failed, or returned no finite number; the message names it.
        """
        results = [self._call(name, function, arguments) for name, _, function in self._functions]
        return self._awaited(results) if any(map(inspect.isawaitable, results)) else self._sum(results)

    async def _awaited(self, results: list[Any]) -> Score:
        async def one(name: str, result: Any) -> Any:
            try:
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                raise _name_failure(name, error) from error

        names = [name for name, *_ in self._functions]
        return self._sum(await asyncio.gather(*map(one, names, results)))

    def _call(self, name: str, function: Scorer, arguments: Mapping[str, Any]) -> Any:
        own = {key: copy.deepcopy(arguments[key]) for key in _WRITABLE if key in arguments}
        try:
            return function(**{**arguments, **own})
        except Exception as error:
            raise _name_failure(name, error) from error

    def _sum(self, results: Sequence[Any]) -> Score:
        total, own, parts, accs = 0.0, dict[str, Any](), dict[str, float](), list[Any]()
        for (name, weight, _), result in zip(self._functions, results):
            details = dict(result) if isinstance(result, Mapping) else {"score": result}
            if details.get("score") is None:
                raise InfrastructureError(f"the reward '{name}' returned no score")
            value = as_score(details.pop("score"), f"the reward '{name}'")
            total += weight * value
            if isinstance(shares := details.pop(COMPONENTS, None), Mapping):
                parts |= {f"{name}/{part}": weight * share for part, share in shares.items()}
            else:
                parts[name] = weight * value
            accs += [details["acc"]] if details.get("acc") is not None else []
            own |= {name: value} | {f"{name}/{key}": entry for key, entry in details.items()}
        main, _, _ = max(self._functions, key=lambda each: each[1])  # a penalty makes no answer right
        return {"score": total, "acc": accs[0] if accs else own[main], **own, COMPONENTS: parts}


_WRITABLE = ("ground_truth", "extra_info", "trajectory")  # arguments that a function may write to
_RESERVED = frozenset({"score", "acc", "pred", COMPONENTS})  # details of the whole score


def _name_failure(name: str, error: Exception) -> Exception:
    if isinstance(error, ConfigError | ModuleNotFoundError):
        return error
    return InfrastructureError(f"the reward '{name}' failed: {describe_error(error)}")


def load_rewards(
    entries: Sequence[Mapping[str, Any]],
    offered: Mapping[str, Any] = _NONE,
    further: Sequence[tuple[str, float, Scorer]] = (),
) -> WeightedSum:
    """Loads `custom_reward_function.rewards` as one scorer, together with the `further` ones of the sum, each (label,
    weight, scorer); `offered` as in `load_compute_score`.

    Raises:
        ConfigError: an entry is not `{path, name, weight, label, reward_kwargs}` or scores batches, two entries share a
            label, a label names a detail of the sum, or as `load_compute_score`.
    """
    functions: list[tuple[str, float, Scorer]] = []
    for number, entry in enumerate(entries):
        key = f"custom_reward_function.rewards[{number}]"
        each = to_options(WeightedFunction, entry, key)
        function = UserFunction(each.path, each.name, each.reward_kwargs, key, offered)
        if function.batched:
            raise ConfigError(f"{key}: '{each.name}' of {each.path} scores whole batches, which have no weights")
        file = each.path.removesuffix(".py").split("/")[-1]
        label = each.label or (each.name if each.name not in {"compute_score", *_RESERVED} else file)
        label = label.rpartition(".")[2]
        if label in _RESERVED:
            raise ConfigError(f"{key}: '{label}' is a detail of the whole score", fix=f"give {key}.label another name")
        if label in {name for name, *_ in (*functions, *further)}:
            raise ConfigError(f"{key}: two rewards are called '{label}'", fix=f"give {key}.label another name")
        functions.append((label, each.weight, function))
    return WeightedSum([*functions, *further])


def sees_trajectory(scorer: Callable[..., object]) -> bool:
    """Whether `scorer` declares the parameter `trajectory`."""
    if scorer is score_row or isinstance(user_function(scorer), UserFunction | WeightedSum):
        return True  # they pass on only what their functions declare
    try:
        return "trajectory" in inspect.signature(scorer).parameters
    except (TypeError, ValueError):
        return False


def declared_arguments(
    function: Callable[..., object], where: str, given: Sequence[str], extra: Mapping[str, Any], extra_key: str
) -> tuple[set[str], bool]:
    """Returns which of the `given` arguments `function` declares by name, and whether it takes `**kwargs`. `extra` holds
    the values of the key `extra_key`, with which it is also called.

    Raises:
        ConfigError: it requires another argument, or does not accept one of `extra`; the message begins with `where`.
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
                f"{', '.join(given)} and {extra_key}",
                fix=_FROM_TRL if parameter.name in _OF_TRL else "",
            )
    for key in extra:
        if key in given or not (takes_any or key in named):
            raise ConfigError(f"{where} has no {extra_key}.{key}")
    return named & set(given), takes_any
