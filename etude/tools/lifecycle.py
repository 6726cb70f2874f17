"""`ToolSession`: the lifecycle of the tools of one trajectory.

Invariant, for each tool: at most one `create`; if it succeeds, any number of `execute`, at most one `calc_reward` (on
request, always before the release), and exactly one `release`. That holds however the trajectory ends: a tool raises, hangs
or returns garbage; the trajectory fails or is cancelled, even a second time during clean-up. Every wait has a time limit.
No method of a tool that is replayed from a recording is ever called.

Order: tools named in the row are created on entry, others at their first call; the calls of a turn run concurrently and
their outcomes are returned in order; on exit, running calls are cancelled before their tools are released.

Left to others: the lifecycle of a single tool (`ToolInstance`); limits, retries, cache and recordings of a call
(`ToolRuntime`); how many calls a turn may make (agents); which tools a row may name (data); retrying a trajectory after an
infrastructure failure (the rollout).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from etude.bounded import GRACE_SECONDS, settle, uninterrupted
from etude.errors import DataError, is_infrastructure, one_line
from etude.registry import did_you_mean
from etude.schemas import FunctionCall, ToolResponse
from etude.tools.arguments import ArgumentError
from etude.tools.base import BaseTool
from etude.tools.instance import SECTIONS, ToolInstance
from etude.tools.loop_watch import LoopWatch
from etude.tools.options import CallPolicy
from etude.tools.outcome import BrokenCall, ToolOutcome, merge_responses
from etude.tools.runtime import ToolRequest, ToolRuntime
from etude.tools.truncation import TokenLimit, bound_response
from etude.trace import span
from etude.trajectory import ToolCallRecord

R = TypeVar("R")

logger = logging.getLogger(__name__)

_WATCHED: ContextVar[list[ToolSession] | None] = ContextVar("etude_tool_sessions", default=None)
_closers: set[asyncio.Task[None]] = set()  # releases that outlive their session; referenced so that none is collected


@contextmanager
def watch_sessions() -> Iterator[list[ToolSession]]:
    """Yields a list of the sessions that are entered within the block, also by tasks and threads started in it."""
    sessions: list[ToolSession] = []
    token = _WATCHED.set(sessions)
    try:
        yield sessions
    finally:
        _WATCHED.reset(token)


class ToolSession:
    """The tools of one trajectory, as an async context manager that is entered once.

    Attributes:
        outcomes: of all calls that `execute` ran, by turn. An agent loop's trajectory gets their rewards and records, unless
            it has its own; remove one that is not to count.
        agent_data: passed to tools whose `execute` takes `agent_data`; None passes nothing.
        initial_responses: the non-empty responses of `create`, in the order of `tools_kwargs`.
        release_failures: number of releases that raised or timed out; they are logged, never raised.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        tools_kwargs: Mapping[str, Mapping[str, Any] | None] | None = None,
        *,
        request_id: str,
        token_limit: TokenLimit | None = None,
    ) -> None:
        """`tools` maps names to the configured tools; `tools_kwargs` is the row's mapping, where null means absent.

        `token_limit` counts the tokens of arguments and responses; without it, only characters are limited.

        Raises:
            DataError: the row names a tool that is not configured, or passes it something other than keyword arguments.
            ConfigError: a tool's `config` or schema is invalid.
        """
        self._tools = dict(tools)
        self._kwargs = {name: kwargs for name, kwargs in (tools_kwargs or {}).items() if kwargs is not None}
        self._calls = {name: ToolRuntime.of(tool) for name, tool in self._tools.items()}
        _check_kwargs(self._kwargs, self._tools, self._calls)
        self.request_id = request_id
        self._token_limit = token_limit
        self._instances: dict[str, ToolInstance] = {}
        self._waiting: set[asyncio.Task[Any]] = set()  # the tasks of `_all`
        self._closing: asyncio.Task[None] | None = None
        self._over = False
        self._watch: LoopWatch | None = None
        self._entered = False
        self._scored = False
        self.outcomes: list[ToolOutcome] = []
        self.agent_data: object = None
        self.initial_responses: list[ToolResponse] = []
        self.release_failures = 0

    async def __aenter__(self) -> ToolSession:
        """Creates all tools that the row names, concurrently.

        Raises:
            InfrastructureError: a tool could not be created; the others have been released.
            DataError: a tool is replayed, and the recording lacks this row.
        """
        if self._entered:
            raise RuntimeError("a ToolSession is entered once")
        self._entered = True
        if (watched := _WATCHED.get()) is not None:
            watched.append(self)
        self._watch = LoopWatch.of_running_loop()
        try:
            instances = [self._start(name) for name in self._kwargs]
            responses = await self._all([instance.ready() for instance in instances])
        except BaseException:
            await self._close()
            raise
        self.initial_responses = [response for response in responses if not response.is_empty()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels running calls and releases every created tool; raises only if the caller is cancelled meanwhile."""
        await self._close()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' schemas, as read-only OpenAI dictionaries."""
        return [calls.schema for calls in self._calls.values()]

    def truncate(self, response: ToolResponse) -> ToolResponse:
        """Returns `response` truncated to the default text limits."""
        return bound_response(response, CallPolicy(), self._token_limit)

    # -- calls ---------------------------------------------------------------------------------------------------

    async def execute(self, calls: Sequence[FunctionCall], turn: int) -> list[ToolOutcome]:
        """Runs the calls of assistant turn `turn` concurrently; returns their outcomes in the order of `calls`.

        Raises:
            BrokenCall: an InfrastructureError: after its retries, a tool timed out, was unreachable or returned no finite
                reward; names the tool. The turn's other calls have been cancelled and have ended.
            EtudeError: a tool raised and its `config.on_exception` is `stop`, or a recording has no answer.
            RuntimeError: outside the `async with` block.
        """
        self._check_open()
        prepared = [self._prepare(call, turn) for call in calls]
        outcomes = iter(await self._all([self._call(*each) for each in prepared if isinstance(each, tuple)]))
        made = [next(outcomes) if isinstance(each, tuple) else each for each in prepared]
        self.outcomes += made
        return made

    async def calc_rewards(self) -> dict[str, float]:
        """Returns the final reward of every created tool, by name; call once, after the trajectory has ended.

        Raises:
            InfrastructureError: a tool failed, or returned no finite number; names the tool.
            DataError: a recording has no final reward.
            RuntimeError: called a second time, or outside the `async with` block.
        """
        self._check_open()
        if self._scored:
            raise RuntimeError("calc_rewards was already called for this trajectory")
        self._scored = True
        created = {name: instance for name, instance in self._instances.items() if instance.created}
        values = await self._all([instance.calc_reward() for instance in created.values()])
        return dict(zip(created, values, strict=True))

    def _check_open(self) -> None:
        if not self._entered or self._over:
            raise RuntimeError("a ToolSession is used inside its 'async with' block")

    async def _all(self, coroutines: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
        """Runs all concurrently and returns the results in order; if one raises, cancels the others and raises the first
        exception in order."""
        if not coroutines:
            return []
        if len(coroutines) == 1:  # run it in the caller's task
            return [await coroutines[0]]
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        self._waiting.update(tasks)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await settle(tasks, 2 * GRACE_SECONDS)  # a cancelled task waits for the call that it cancels
            self._waiting.difference_update(tasks)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]

    def _prepare(self, call: FunctionCall, turn: int) -> tuple[ToolInstance, ToolRequest, bool] | ToolOutcome:
        """Validates a call. Returns the tool, created if needed, the request, and whether this call created the tool; or
        the outcome of an invalid call."""
        calls = self._calls.get(call.name)
        if calls is None:
            listed = ", ".join(self._tools) or "none"
            text = f"Unknown tool '{one_line(ValueError(call.name), 100)}'. Available tools: {listed}."
            return self._rejection(call, turn, "unknown_tool", text)
        try:
            arguments = calls.read(call, self._token_limit)
        except ArgumentError as error:
            return self._rejection(call, turn, error.word, f"Error in the call of '{call.name}': {one_line(error)}.")
        creates_tool = call.name not in self._instances
        instance = self._start(call.name) if creates_tool else self._instances[call.name]
        return instance, instance.ask(call, arguments, turn, self.agent_data), creates_tool

    def _rejection(self, call: FunctionCall, turn: int, error: str, text: str) -> ToolOutcome:
        calls = self._calls.get(call.name)
        policy = calls.policy if calls else CallPolicy()
        response = bound_response(ToolResponse(text=text), policy, self._token_limit)
        return ToolOutcome(call, turn, response, error=error)

    async def _call(self, instance: ToolInstance, request: ToolRequest, creates_tool: bool) -> ToolOutcome:
        call, initial_response = request.call, await instance.ready()
        started = time.perf_counter()
        with span("tool", call.name) as recorded:
            try:
                answer = await instance.calls.answer(request, lambda: instance.execute(request))
            except Exception as error:
                if not is_infrastructure(error):
                    raise
                raise _broken_call(instance, request, error, time.perf_counter() - started) from error
            response = (
                merge_responses(initial_response, answer.response)
                if creates_tool and not initial_response.is_empty()
                else answer.response
            )
            outcome = ToolOutcome(
                call,
                request.place.turn,
                instance.truncate(response),
                answer.reward,
                dict(answer.metrics),
                time.perf_counter() - started,
                answer.error,
                answer.source,
                request.broken,
                request.timeouts,
                request.blocked_loop,
            )
            if recorded is not None:
                recorded.set(arguments=call.arguments, **_span_attributes(outcome))
        return outcome

    # -- beginning and end ---------------------------------------------------------------------------------------

    def _start(self, name: str) -> ToolInstance:
        calls = self._calls[name]
        kwargs = self._kwargs.get(name, {})
        assert self._watch is not None
        instance = ToolInstance(self._tools[name], calls, kwargs, self._token_limit, self.request_id, self._watch)
        self._instances[name] = instance
        return instance

    async def _close(self) -> None:
        """Runs `_close_all` to completion, even if the caller is cancelled meanwhile."""
        self._over = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close_all())
            if self._watch is not None:
                self._closing.add_done_callback(self._watch.close)
        await uninterrupted(self._closing)

    async def _close_all(self) -> None:
        instances = list(self._instances.values())
        for instance in instances:
            instance.closing = True
        executing = [task for instance in instances for task in instance.executing]
        await settle(executing)
        await settle(self._waiting)  # after the tools' own tasks, so that no tool's clean-up is cancelled
        closers = {asyncio.ensure_future(self._close_one(each)): each.tool.name for each in instances}
        if not closers:
            return
        patience = max(instance.calls.policy.timeout for instance in instances) + 2 * GRACE_SECONDS
        _, late = await asyncio.wait(closers, timeout=patience)
        for task in late:  # its `create` ignores cancellation: release it if that ever ends
            self.release_failures += 1
            line = f"tool '{closers[task]}': not released within {patience:g} s"
            self._calls[closers[task]].log_release(line)
            _closers.add(task)
            task.add_done_callback(_closers.discard)

    async def _close_one(self, instance: ToolInstance) -> None:
        if not await instance.close():
            self.release_failures += 1


def _broken_call(instance: ToolInstance, request: ToolRequest, error: Exception, seconds: float) -> BrokenCall:
    late = isinstance(error, TimeoutError | asyncio.TimeoutError)
    record = ToolCallRecord(
        request.place.turn,
        request.call.name,
        request.call.arguments,
        one_line(error),
        seconds=seconds,
        error="timeout" if late else "infrastructure",
        retries=request.broken,
        timeouts=request.timeouts,
        blocked_loop=request.blocked_loop,
    )
    return BrokenCall(instance.sentence("execute", error), record)


def _span_attributes(outcome: ToolOutcome) -> dict[str, Any]:
    """Returns the span attributes of an outcome, without the call's arguments."""
    names = ("turn", "response", "reward", "metrics", "error", "source", "retries")
    return {name: value for name in names if (value := getattr(outcome, name))}


def _check_kwargs(
    tools_kwargs: Mapping[str, Mapping[str, Any]], tools: Mapping[str, BaseTool], runtimes: Mapping[str, ToolRuntime]
) -> None:
    for name, kwargs in tools_kwargs.items():
        if name not in tools:
            raise DataError(f"tools_kwargs names the tool '{name}', which is not configured{did_you_mean(name, tools)}")
        for section, value in kwargs.items():
            if section not in SECTIONS:
                raise DataError(f"tools_kwargs.{name} has no '{section}'{did_you_mean(section, SECTIONS)}")
            if value is not None and not isinstance(value, Mapping):
                raise DataError(f"tools_kwargs.{name}.{section} must be a mapping, not {type(value).__name__}")
            if value and (fault := runtimes[name].refused_kwargs(tools[name], section, value)) is not None:
                raise DataError(f"tools_kwargs.{name}.{section}: {fault}")
