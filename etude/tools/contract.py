"""The contract between a session and a user's tool class: its methods are asynchronous and take what a session passes; what
they return has the documented form.

Invariant: only what no model could mend is refused, as a `ConfigError` that names the tool, its class and the line of its
code: before anything runs where the class shows it, otherwise at the first call. A wrapper is judged by what it returns.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from etude.errors import ConfigError, user_file
from etude.rewards.finite import as_float
from etude.schemas import ToolResponse
from etude.tools.base import BaseTool
from etude.tools.call import ToolResult

_MAX_METRICS = 64
_MAX_METRIC_CHARS = 1_000

_FORMS = {
    "create": "create(self, instance_id=None, **create_kwargs)",
    "execute": "execute(self, instance_id, parameters, **execute_kwargs)",
    "calc_reward": "calc_reward(self, instance_id, **calc_reward_kwargs)",
    "release": "release(self, instance_id, **release_kwargs)",
}


def overrides(tool: BaseTool, method: str) -> bool:
    """Whether the tool overrides `method`, which does nothing in `BaseTool`."""
    return getattr(getattr(tool, method), "__func__", None) is not getattr(BaseTool, method)


def check_contract(tool: BaseTool) -> None:
    """Checks the methods of a tool's class.

    Raises:
        ConfigError: there is no `execute`, or a method cannot be awaited or does not take a session's arguments.
    """
    for method, form in _FORMS.items():
        function: Any = getattr(tool, method)
        if not overrides(tool, method):
            fault = "is missing" if method == "execute" else None
        elif not callable(function) or _returns_nothing_awaitable(function):
            fault = "is not asynchronous"
        else:
            fault = _refusal(function, ("id", {}) if method == "execute" else ("id",), {})
        if fault is not None:
            raise ConfigError(f"{_named(tool, method)}: {method} {fault}: define async def {form}")


def refused_kwargs(tool: BaseTool, section: str, kwargs: Mapping[str, object]) -> str | None:
    """Why a method, or the function of a function tool, does not take a row's keyword arguments; None if it does."""
    method, function = section.removesuffix("_kwargs"), getattr(tool, "__wrapped__", None)
    if function is not None and method != "execute":
        return f"{_named(tool, method)}: a function has no {method}; give execute_kwargs, or write a class"
    given: tuple[object, ...] = () if function is not None else ("id", {}) if method == "execute" else ("id",)
    fault = _refusal(function or getattr(tool, method), given, kwargs)
    return None if fault is None else f"{_named(tool, method)}: {method} {fault}"


@contextmanager
def returned_by(tool: BaseTool, method: str) -> Iterator[None]:
    """Wraps the parsing of a method's return value.

    Raises:
        ConfigError: a TypeError was raised, as the value has another form than the contract's.
    """
    try:
        yield
    except TypeError as error:
        raise ConfigError(f"{_named(tool, method)}: {method} {error}; no model can mend that") from error


def _named(tool: BaseTool, method: str) -> str:
    """Formats the tool, its class and, if they are the user's, file and line of the method or class."""
    kind = getattr(tool, "__wrapped__", type(tool))  # a function tool's function
    code = getattr(inspect.unwrap(getattr(kind, method, kind)), "__code__", None)
    file, line = user_file(code.co_filename) if code else None, f":{code.co_firstlineno}" if code else ""
    if file is None:
        file, line = user_file(getattr(inspect.getmodule(kind), "__file__", None) or ""), ""
    return (
        f"tool '{tool.name}' ({getattr(kind, '__qualname__', type(kind).__name__)}{f', {file}{line}' if file else ''})"
    )


def _refusal(function: Any, given: Sequence[object], named: Mapping[str, object]) -> str | None:
    """Why a function cannot be called with these arguments and some more keywords; None if it can."""
    try:
        inspect.signature(function).bind_partial(*given, **named)
    except ValueError:  # it has no signature
        return None
    except TypeError as error:
        return f"cannot be called as a session does ({error})"
    return None


def _returns_nothing_awaitable(function: Any) -> bool:
    """Whether a call certainly returns nothing to await: the function yields, or its source is a plain `def` that returns
    tuples, literals or nothing."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return True
    if inspect.iscoroutinefunction(function) or hasattr(function, "__wrapped__"):
        return False
    definition = _definition(function)
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return False
    nodes = [*ast.walk(definition)]
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    if not returned:
        return not any(isinstance(node, ast.Raise) for node in nodes)
    return all(value is None or isinstance(value, ast.Tuple | ast.Constant | ast.JoinedStr) for value in returned)


def returns_written_tuple(function: Any) -> bool:
    """Whether a `return` in the function's source writes a tuple, which is then of its author's making."""
    definition = _definition(inspect.unwrap(function))
    return definition is not None and any(isinstance(value, ast.Tuple) for value in _returned(definition))


def _returned(node: ast.AST) -> Iterator[ast.expr | None]:
    """What a function's own `return`s write, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child.value
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _returned(child)


def _definition(function: Any) -> ast.stmt | None:
    """The statement that defines a function; None if its source is not to be had."""
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return definition


def read_response(value: object) -> ToolResponse:
    """Converts a tool's response: a `ToolResponse`, a str, or None for an empty one.

    Raises:
        TypeError: `value` is of another type.
    """
    if isinstance(value, ToolResponse):
        return value
    if value is None:
        return ToolResponse()
    if isinstance(value, str):
        return ToolResponse(text=value)
    raise TypeError(f"must return its response as a ToolResponse or a str, not {type(value).__name__}")


def read_execution(returned: object) -> ToolResult:
    """Parses the return value of `execute`; its reward is a number, but may not be finite.

    Raises:
        TypeError: `returned` is not such a tuple.
    """
    if not isinstance(returned, tuple) or len(returned) != 3:
        shape = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise TypeError(f"must return (ToolResponse, reward, metrics), not {shape}")
    response, reward, metrics = returned
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"must return its metrics as a dict, not {type(metrics).__name__}")
    return ToolResult(read_response(response), as_float(reward), small_metrics(metrics) if metrics else {})


def read_creation(returned: object, given_id: str) -> tuple[str, ToolResponse]:
    """Parses the return value of `create` into (instance id, initial response); accepts a bare id, or None as the id, which
    stands for `given_id`.

    Raises:
        TypeError: `returned` is neither an id nor such a tuple.
    """
    if isinstance(returned, str):
        return returned, ToolResponse()
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], str | None):
        return returned[0] or given_id, read_response(returned[1])
    raise TypeError(f"must return (instance_id, ToolResponse), not {type(returned).__name__}")


def small_metrics(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns up to `_MAX_METRICS` entries as JSON values: long text is truncated, large or unknown values become their
    type's name."""
    kept = islice(metrics.items(), _MAX_METRICS)
    return {str(key)[:_MAX_METRIC_CHARS]: _plain_value(value) for key, value in kept}


def _plain_value(value: Any, depth: int = 2) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:_MAX_METRIC_CHARS].encode("utf-8", "replace").decode("utf-8")
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return _plain_value(value.item(), 0)  # a numpy or torch scalar
    if depth and isinstance(value, list | tuple) and len(value) <= _MAX_METRICS:
        return [_plain_value(item, depth - 1) for item in value]
    if depth and isinstance(value, Mapping) and len(value) <= _MAX_METRICS:
        return {str(key)[:_MAX_METRIC_CHARS]: _plain_value(item, depth - 1) for key, item in value.items()}
    return f"<{type(value).__name__}>"


def merge_responses(first: ToolResponse, second: ToolResponse) -> ToolResponse:
    """Concatenates both responses; their texts are joined by a newline."""
    return ToolResponse(
        text="\n".join(text for text in (first.text, second.text) if text) or None,
        image=[*(first.image or []), *(second.image or [])] or None,
        video=[*(first.video or []), *(second.video or [])] or None,
    )
