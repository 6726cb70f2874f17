"""`ToolSession`: the lifecycle of the tools of one trajectory; `ToolInstance`: one of them, from `create` to `release`.

Invariant, for each tool: at most one `create`; if it succeeds, any number of `execute`, at most one `calc_reward` (on
request, always before the release), and exactly one `release`. That holds however the trajectory ends: a tool raises, hangs
or returns garbage; the trajectory fails or is cancelled, even a second time during clean-up. Every wait has a time limit.
No method of a tool whose recording answers for it is ever called.

Order: tools named in the row are created on entry, others at their first call; the calls of a turn run concurrently and
are returned in order; on exit, running calls are cancelled before their tools are released.

Limits of a call, in the order in which it meets them: how many a turn may make (`ToolAgentLoop`); its arguments' length
(`ToolRuntime.read`); calls at once and a second, with retries, cache and recordings (`ToolRuntime.call_with_retries`); its
time (here); its text's length (`truncation`); the room left in the context (`ToolAgentLoop.feed_back`). Left to others too:
which tools a row may name (data); retrying a trajectory after an infrastructure failure (the rollout).
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar, cast

from etude.errors import ConfigError, DataError, InfrastructureError, describe_error, is_infrastructure, one_line
from etude.registry import did_you_mean
from etude.rewards.finite import as_float, as_reward
from etude.schemas import FunctionCall, ToolResponse
from etude.timeouts import GRACE_SECONDS, called, result_of, retrieve, settle, uninterrupted
from etude.tools.arguments import ArgumentError
from etude.tools.base import BaseTool
from etude.tools.call import BrokenCall, ToolCall, ToolResult
from etude.tools.contract import (
    merge_responses,
    overrides,
    read_creation,
    read_execution,
    refused_kwargs,
    returned_by,
)
from etude.tools.execution import ToolRuntime
from etude.tools.options import CallPolicy
from etude.tools.recording import MissingCall
from etude.tools.truncation import TokenLimit, bound_response
from etude.tools.wire import canonical, digest
from etude.trace import span

R = TypeVar("R")
Kwargs = Mapping[str, Any]

SECTIONS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
BLOCKING_SECONDS = 2.0
"""A step of a tool's code that lasts longer blocks the event loop."""
_TIMEOUT_KEY = "config.timeout"  # as an entry of the tools' file has it
_SPAN_ATTRIBUTES = ("turn", "response", "reward", "metrics", "error", "source", "retries")
_WATCHED: ContextVar[list[ToolSession] | None] = ContextVar("etude_tool_sessions", default=None)
_closers: set[asyncio.Task[bool]] = set()  # releases that outlive their session; referenced so that none is collected


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
        outcomes: all calls that `execute` ran, by turn. An agent loop's trajectory gets their rewards and records, unless
            it has its own; remove one that is not to count.
        agent_data: passed to tools whose `execute` takes `agent_data`; None passes nothing.
        initial_responses: the non-empty responses of `create`, in the order of `tools_kwargs`.
        release_failures: number of releases that raised or timed out; they are logged, never raised.
        running: the calls that tools are working on; `ended`: the number of those that they have ended.
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
        self._runtimes = {name: ToolRuntime.of(tool) for name, tool in self._tools.items()}
        _check_kwargs(self._kwargs, self._tools, self._runtimes)
        self.request_id = request_id
        self._token_limit = token_limit
        self._instances: dict[str, ToolInstance] = {}
        self._waiting: set[asyncio.Task[Any]] = set()  # the tasks of `_all`
        self._closing: asyncio.Task[None] | None = None
        self._over = self._entered = self._scored = False
        self.running: list[ToolCall] = []
        self.ended = 0
        self.outcomes: list[ToolCall] = []
        self.agent_data: object = None
        self.initial_responses: list[ToolResponse] = []
        self.release_failures = 0

    async def __aenter__(self) -> ToolSession:
        """Creates all tools that the row names, concurrently.

        Raises:
            InfrastructureError: a tool could not be created; the others have been released.
            DataError: a recording answers for a tool, and lacks this row.
        """
        if self._entered:
            raise RuntimeError("a ToolSession is entered once")
        self._entered = True
        if (watched := _WATCHED.get()) is not None:
            watched.append(self)
        try:
            responses = await self._all([self._instance(name).ready() for name in self._kwargs])
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
        return [runtime.schema for runtime in self._runtimes.values()]

    @property
    def unasked(self) -> list[str]:
        """The tools that were called and have a `calc_reward`, if `calc_rewards` was never called."""
        called = set() if self._scored else {each.requested.name for each in self.outcomes} & self._tools.keys()
        return [name for name in called if type(self._tools[name]).calc_reward is not BaseTool.calc_reward]

    def runs(self, tools: Mapping[str, BaseTool]) -> bool:
        """Whether the session's tools are among `tools`."""
        return all(tools.get(name) is tool for name, tool in self._tools.items())

    def truncate(self, response: ToolResponse) -> ToolResponse:
        """Returns `response` truncated to the default text limits."""
        return bound_response(response, CallPolicy(), self._token_limit)

    # -- calls ---------------------------------------------------------------------------------------------------

    async def execute(self, calls: Sequence[FunctionCall], turn: int) -> list[ToolCall]:
        """Runs the calls of assistant turn `turn` concurrently; returns them in order.

        Raises:
            BrokenCall: an InfrastructureError: after its retries, a tool timed out, was unreachable or returned no finite
                reward; names the tool. The turn's other calls have been cancelled and have ended.
            EtudeError: a tool raised and its `config.on_exception` is `stop`, or a recording has no answer.
            RuntimeError: outside the `async with` block.
        """
        self._check_open()
        made = [self._read(call, turn) for call in calls]
        await self._all([self._instances[call.requested.name].run(call) for call in made if call.error is None])
        self.outcomes += made
        return made

    async def calc_rewards(self) -> dict[str, float]:
        """Returns the final reward of every created tool, by name. Call it once, after the trajectory has ended.

        Raises:
            InfrastructureError: a tool's `calc_reward` failed; names the tool.
            ConfigError: a tool's `calc_reward` returned no number.
            RuntimeError: outside the `async with` block, or called before.
        """
        self._check_open()
        if self._scored:
            raise RuntimeError("calc_rewards was already called for this trajectory")
        self._scored = True
        created = {name: instance for name, instance in self._instances.items() if instance.created}
        values = await self._all([instance.calc_reward() for instance in created.values()])
        return dict(zip(created, values, strict=True))

    def _read(self, asked: FunctionCall, turn: int) -> ToolCall:
        """Begins a call: validates it, and creates its tool at the first one; an invalid call is answered here."""
        call, runtime = ToolCall(asked, turn, self.request_id), self._runtimes.get(asked.name)
        if runtime is None:
            listed = ", ".join(self._tools) or "none"
            text = f"Unknown tool '{one_line(ValueError(asked.name), 100)}'. Available tools: {listed}."
            call.error = "unknown_tool"
        else:
            try:
                call.parameters = runtime.read(asked, self._token_limit)
            except ArgumentError as error:
                text, call.error = f"Error in the call of '{asked.name}': {one_line(error)}.", error.word
            else:
                creates_tool = asked.name not in self._instances
                self._instance(asked.name).begin(call, creates_tool)
                return call
        policy = runtime.policy if runtime else CallPolicy()
        call.response = bound_response(ToolResponse(text=text), policy, self._token_limit)
        return call

    async def _all(self, coroutines: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
        """Runs all concurrently and returns the results in order; if one raises, cancels the others and raises the first
        exception in order."""
        token = _WATCHED.set(None)  # a session that a tool opens is the tool's own affair
        try:
            return await self._run_all(coroutines)
        finally:
            _WATCHED.reset(token)

    async def _run_all(self, coroutines: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
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

    def _check_open(self) -> None:
        if not self._entered or self._over:
            raise RuntimeError("a ToolSession is used inside its 'async with' block")

    # -- beginning and end ---------------------------------------------------------------------------------------

    def _instance(self, name: str) -> ToolInstance:
        """Returns the tool's instance; the first time, starts its `create`."""
        instance = self._instances.get(name)
        if instance is None:
            kwargs = self._kwargs.get(name, {})
            instance = self._instances[name] = ToolInstance(self, self._tools[name], self._runtimes[name], kwargs)
        return instance

    async def _close(self) -> None:
        """Runs `_close_all` to completion, even if the caller is cancelled meanwhile."""
        self._over = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close_all())
        await uninterrupted(self._closing)

    async def _close_all(self) -> None:
        instances = list(self._instances.values())
        for instance in instances:
            instance.closing = True
        await settle([task for instance in instances for task in instance.executing])
        await settle(self._waiting)  # after the tools' own tasks, so that no tool's clean-up is cancelled
        closers = {asyncio.ensure_future(each.close()): each.runtime for each in instances}
        if not closers:
            return
        patience = max(runtime.policy.timeout for runtime in closers.values()) + 2 * GRACE_SECONDS
        done, late = await asyncio.wait(closers, timeout=patience)
        self.release_failures += len(late) + sum(not task.result() for task in done)
        for task in late:  # its `create` ignores cancellation: release it if that ever ends
            closers[task].log_first("release", f"tool '{closers[task].name}': not released within {patience:g} s")
            _closers.add(task)
            task.add_done_callback(_closers.discard)


class ToolInstance:
    """One tool in one trajectory; made inside the session's event loop, it starts the tool's `create`.

    Invariant: `create` is started once, immediately; `execute` and `calc_reward` run only after it has succeeded, each
    within the tool's time limit; `close` calls `release` if, and only if, `create` succeeded. The session decides when to
    call each method, and ends running calls before `close`.

    Attributes:
        created: whether `create` has succeeded.
        first: the call that created the tool, whose answer begins with the response of `create`; None if the row did.
        executing: the tasks of running `execute` calls.
        closing: set by the session once no new call may start.
    """

    def __init__(
        self, session: ToolSession, tool: BaseTool, runtime: ToolRuntime, kwargs: Mapping[str, Kwargs | None]
    ) -> None:
        self.tool, self.runtime, self.created = tool, runtime, False
        self.first: ToolCall | None = None
        self.executing: set[asyncio.Task[Any]] = set()
        self.closing = False
        self._kwargs: dict[str, Kwargs] = {section: kwargs.get(section) or {} for section in SECTIONS}
        self._session, self._id = session, f"{session.request_id}:{tool.name}"  # until `create` returns another id
        self._num_calls, self._history = 0, ""
        self._creation = asyncio.ensure_future(self._create())
        self._creation.add_done_callback(retrieve)  # perhaps nobody waits for it

    async def _create(self) -> ToolResponse:
        """Calls `create`, or finds its recorded response, and returns the response."""
        kwargs, recording = self._kwargs["create_kwargs"], self.runtime.recording
        response = ToolResponse()
        if recording is not None and recording.only:
            response = (await recording.find(*self._place("create"))).response
        elif overrides(self.tool, "create"):
            whole = {"create_kwargs": dict(kwargs)} if self.runtime.reads_create_kwargs else {}
            returned = await self._invoke(None, "create", self._id, **{**whole, **kwargs})
            self.created = True  # whatever it returned, it is to be released
            with returned_by(self.tool, "create"):
                self._id, response = read_creation(returned, self._id)
        self.created = True
        if recording is not None and not recording.only:
            await recording.keep(*self._place("create"), ToolResult(response))
        return bound_response(response, self.runtime.policy, self._session._token_limit)

    def _place(self, event: str, kwargs: str = "", history: str = "") -> tuple[str, str, str, str, str]:
        """Where a recording keeps an event that is no call."""
        return self._session.request_id, event, canonical(dict(self._kwargs["create_kwargs"])), kwargs, history

    async def ready(self) -> ToolResponse:
        """Waits for `create` and returns its response. Any number of calls may wait concurrently; cancelling one does not
        cancel `create`.

        Raises:
            ConfigError: `create` is not asynchronous, or returned neither an id nor an id and a response.
            MissingCall: the recording that answers for the tool has no such `create`.
            InfrastructureError: `create` failed or timed out.
        """
        limit = self.runtime.policy.timeout
        try:
            if not self._creation.done():
                await asyncio.wait({self._creation}, timeout=limit)
            if not self._creation.done():
                raise TimeoutError(f"no answer within {limit:g} s ({_TIMEOUT_KEY})")
            if self._creation.cancelled():
                raise InfrastructureError("the call was cancelled from inside")
            return self._creation.result()
        except (ConfigError, MissingCall):
            raise
        except Exception as error:
            raise InfrastructureError(self.sentence("create", error)) from error

    def begin(self, call: ToolCall, first: bool) -> None:
        """Numbers a call, in the order in which the model wrote them, and gives it the row's arguments."""
        call.number, call.create_kwargs = self._num_calls, self._kwargs["create_kwargs"]
        call.execute_kwargs = self._kwargs["execute_kwargs"]
        self.first = call if first else self.first
        self._num_calls += 1
        if self.runtime.recording is not None:
            self._history = digest(self._history, call.parameters, dict(call.execute_kwargs))
            call.history = self._history

    async def run(self, call: ToolCall) -> None:
        """Runs a valid call, with the tool's limits and retries, and fills in its result.

        Raises:
            BrokenCall, EtudeError: see `ToolSession.execute`.
        """
        session, initial_response = self._session, await self.ready()
        started = time.perf_counter()
        session.running.append(call)
        with span("tool", call.requested.name) as recorded:
            try:
                result = await self.runtime.call_with_retries(call, self._attempt)
            except Exception as error:
                call.seconds = time.perf_counter() - started
                if not is_infrastructure(error):
                    raise
                call.error = "timeout" if isinstance(error, TimeoutError | asyncio.TimeoutError) else "infrastructure"
                call.response = ToolResponse(text=one_line(error))
                raise BrokenCall(self.sentence("execute", error), call.to_record()) from error
            finally:
                session.running.remove(call)
                session.ended += 1
            response = result.response
            if call is self.first and not initial_response.is_empty():
                response = merge_responses(initial_response, response)
            call.response = bound_response(response, self.runtime.policy, session._token_limit)
            call.reward, call.error, call.source = result.reward, result.error, result.source
            call.metrics, call.seconds = dict(result.metrics), time.perf_counter() - started
            if recorded is not None:
                told = {name: value for name in _SPAN_ATTRIBUTES if (value := getattr(call, name))}
                recorded.set(arguments=call.requested.arguments, **told)

    async def _attempt(self, call: ToolCall) -> ToolResult:
        """Runs the tool once: its `execute`, within its time limit.

        Raises:
            TimeoutError: no answer in time.
            ConfigError: `execute` is not asynchronous, or returned something else than its contract says.
            Exception: raised by the tool.
            asyncio.CancelledError: the session is closing.
        """
        if self.closing:  # the call was still waiting for a permit
            raise asyncio.CancelledError
        data = self._session.agent_data
        shared = {} if data is None or not self.runtime.reads_agent_data else {"agent_data": data}
        work = self._invoke(call, "execute", self._id, call.parameters, **{**shared, **call.execute_kwargs})
        task = asyncio.get_running_loop().create_task(work)
        self.executing.add(task)
        try:
            returned = await result_of(task, self.runtime.policy.timeout, key=_TIMEOUT_KEY)
            with returned_by(self.tool, "execute"):
                return read_execution(returned)
        except InfrastructureError:
            if task.cancelled() and self.closing:
                raise asyncio.CancelledError from None
            raise
        finally:
            self.executing.discard(task)

    async def calc_reward(self) -> float:
        """Returns the final reward; 0.0 if the tool does not override `calc_reward`.

        Raises:
            ConfigError: `calc_reward` is not asynchronous, or returned no number.
            InfrastructureError: `calc_reward` failed, or returned a number that is not finite.
            MissingCall: the recording that answers for the tool has no such final reward.
        """
        kwargs, recording = self._kwargs["calc_reward_kwargs"], self.runtime.recording
        if recording is not None:
            place = self._place("calc_reward", canonical(dict(kwargs)), self._history)
            if recording.only:
                return (await recording.find(*place)).reward
        value = 0.0
        try:
            if overrides(self.tool, "calc_reward"):
                await self.ready()
                work = asyncio.ensure_future(self._invoke(None, "calc_reward", self._id, **kwargs))
                returned = await result_of(work, self.runtime.policy.timeout, key=_TIMEOUT_KEY)
                if isinstance(returned, list | tuple):
                    raise ConfigError(
                        f"tool '{self.tool.name}': calc_reward returned {len(returned)} values: return one number, such as "
                        "their sum; what a single call was worth is the second value that execute returns"
                    )
                with returned_by(self.tool, "calc_reward"):
                    if returned is None:
                        raise TypeError("returned nothing, where a number was expected as reward")
                    value = as_float(returned)
                value = as_reward(value, "it")
        except ConfigError:
            raise
        except Exception as error:
            raise InfrastructureError(self.sentence("calc_reward", error)) from error
        if recording is not None:
            await recording.keep(*place, ToolResult(ToolResponse(), value))
        return value

    async def close(self) -> bool:
        """Cancels a running `create`, and calls `release` if it succeeded; returns False if the release failed."""
        if not self._creation.done():
            self._creation.cancel()
            await asyncio.wait({self._creation})
        if not self.created or self.runtime.replays or not overrides(self.tool, "release"):
            return True
        try:
            kwargs = self._kwargs["release_kwargs"]
            work = asyncio.ensure_future(self._invoke(None, "release", self._id, **kwargs))
            await result_of(work, self.runtime.policy.timeout, key=_TIMEOUT_KEY)
        except Exception as error:
            self.runtime.log_first("release", self.sentence("release", error))
            return False
        return True

    async def _invoke(self, call: ToolCall | None, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Awaits a method of the tool; counts in `call`, and logs, the steps in which it blocked the event loop."""

        def note(seconds: float) -> None:
            self.runtime.log_first(
                "block",
                f"tool '{self.tool.name}': its {method} blocked the event loop for {seconds:.3g} s, and every trajectory "
                "of this process waited; write it as a plain 'def' function, which runs in a thread, or call what blocks "
                "by asyncio.to_thread",
            )
            if call is not None:
                call.blocked_loop += 1

        return await _timed(called(getattr(self.tool, method), *args, **kwargs), note)

    def sentence(self, method: str, error: Exception) -> str:
        """Formats a failure: `tool 'search': execute failed: ConnectionError: refused`."""
        return f"tool '{self.tool.name}': {method} failed: {describe_error(error)}"


@types.coroutine
def _timed(work: Coroutine[Any, Any, R], note: Callable[[float], None]) -> Generator[Any, Any, R]:
    """Awaits a coroutine; `note(seconds)` is called after each step, from one wait to the next, that took longer than
    `BLOCKING_SECONDS`: meanwhile nothing else ran in the event loop."""
    step: Callable[[Any], Any] = work.send
    given: Any = None
    while True:
        started = time.perf_counter()
        try:
            waits_for = step(given)
        except StopIteration as done:
            return cast(R, done.value)
        finally:
            if (seconds := time.perf_counter() - started) > BLOCKING_SECONDS:
                note(seconds)
        try:
            step, given = work.send, (yield waits_for)
        except BaseException as error:  # the task is cancelled: so is the work
            step, given = work.throw, error


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
            fault = refused_kwargs(tools[name], section, value) if value and not runtimes[name].replays else None
            if fault is not None:
                raise DataError(f"tools_kwargs.{name}.{section}: {fault}")
