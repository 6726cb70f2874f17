"""`rollout_trace_op`: a decorator that records a coroutine function's calls as spans.

Invariant: the decorated function behaves like the original; outside a traced trajectory a call costs one extra look-up.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from etude.trace.span import is_traced, span

P = ParamSpec("P")
R = TypeVar("R")


def rollout_trace_op(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Decorates a coroutine function: a traced call leaves a span with its arguments, its result or its error."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    async def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_traced():
            return await function(*args, **kwargs)
        with span("op", function.__qualname__) as recorded:
            if recorded is not None:
                recorded.set(inputs=_inputs(signature, args, kwargs))
            result = await function(*args, **kwargs)
            if recorded is not None:
                recorded.set(output=result)
            return result

    return traced


def _inputs(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, without `self`."""
    try:
        named = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:  # the call itself will raise
        return {}
    named.pop("self", None)
    return named
