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
from typing import Any

from etude.errors import ConfigError, user_file
from etude.tools.base import BaseTool

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
    method = section.removesuffix("_kwargs")
    function = getattr(tool, "__wrapped__", None) if method == "execute" else None
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
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    nodes = [*ast.walk(definition)]
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return False
    if not returned:
        return not any(isinstance(node, ast.Raise) for node in nodes)
    return all(value is None or isinstance(value, ast.Tuple | ast.Constant | ast.JoinedStr) for value in returned)
