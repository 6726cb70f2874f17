"""Fault injection, so that a model learns to cope with failing tools; reproducible, for tests.

Invariant: whether and how a call fails depends only on the seed, the tool, the trajectory, the call's place in it and the
attempt (each retry draws again), never on the clock or concurrent work.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

from etude.schemas import ToolResponse
from etude.tools.call import Source, ToolCall, ToolResult
from etude.tools.options import FaultPolicy

_GARBAGE = ["\x00", "\ufffd", "{", "}", "[", '"', "<", "</", ">", "\n", "é", "漢", "🙂", *map(chr, range(32, 127))]


class InjectedError(Exception):
    """Stands for an exception of the tool."""


async def with_faults(policy: FaultPolicy, call: ToolCall, answer: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
    """Returns the result of `answer()`, or fails instead, or replaces its text by up to 400 characters of garbage.

    Raises:
        TimeoutError, InjectedError: the call is not made.
    """
    drawn = call.chance("fault", policy.seed, call.retries)
    if drawn < policy.timeout:
        raise TimeoutError("no answer in time (injected: config.faults)")
    if drawn < policy.timeout + policy.error:
        raise InjectedError("injected by config.faults")
    result = await answer()
    if drawn >= policy.timeout + policy.error + policy.garbage:
        return result
    source = random.Random(f"{policy.seed} {call.requested.name} {call.trajectory} {call.turn} {call.number}")
    text = "".join(source.choices(_GARBAGE, k=source.randint(0, 400)))[:400]
    return replace(result, response=ToolResponse(text=text), source=Source.FAULT)
