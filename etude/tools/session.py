"""`ToolSession`: the lifecycle of one trajectory over its tools.

Invariant, for each tool: at most one `create`; if it succeeded, any number of `execute`, at most one `calc_reward`
(when the trajectory asks for it, always before release), and exactly one `release` in every ending: a tool raises, hangs,
returns nonsense; the trajectory fails or is cancelled, once or again while it cleans up. Nothing waits for ever.

Order: tools named in the row are created on entry, others at their first call; a turn's calls run at the same time and
are answered in order of appearance; on exit, running calls are stopped before their tools are released.

Left to others: how many calls a turn may make and how much of a response fits the context (agents), which tools a row
may name (data), retrying a trajectory whose infrastructure broke (the rollout).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from etude.bounded import GRACE_SECONDS, called, settle, within
from etude.errors import DataError, EtudeError, InfrastructureError, ToolError, is_infrastructure, one_line
from etude.registry import did_you_mean
from etude.rewards.number import as_reward
from etude.schemas import FunctionCall, ToolResponse
from etude.tools.base import BaseTool
from etude.tools.outcome import ToolOutcome, bounded, decode_arguments, joined, read_creation, read_execution
from etude.tools.policy import CallPolicy, OnException

R = TypeVar("R")
Kwargs = Mapping[str, Any]

_SECTIONS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")

logger = logging.getLogger(__name__)

_closers: set[asyncio.Task[None]] = set()  # releases that outlived their session: kept from the garbage collector
_traceback_logged: set[str] = set()  # names of tools whose first exception has been logged in full


@dataclass
class _Instance:
    """A tool for this trajectory; `opening` is its one `create`."""

    tool: BaseTool
    policy: CallPolicy
    kwargs: Mapping[str, Kwargs | None]
    given_id: str
    opening: asyncio.Task[object]

    @property
    def created(self) -> bool:
        return self.opening.done() and not self.opening.cancelled() and self.opening.exception() is None

    @property
    def id(self) -> str:
        """The id that `create` returned, or ours where it returned something unreadable."""
        try:
            return read_creation(self.opening.result(), self.given_id)[0]
        except TypeError:
            return self.given_id

    def arguments(self, section: str) -> dict[str, Any]:
        return dict(self.kwargs.get(section) or {})


class ToolSession:
    """One trajectory's tools, as an asynchronous context manager that is entered once.

    Attributes:
        initial_responses: what `create` had to say, without the empty ones, in the order of `tools_kwargs`.
        release_failures: releases that raised or did not end in time; each is logged, none is raised.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        tools_kwargs: Mapping[str, Mapping[str, Any] | None] | None = None,
        *,
        request_id: str,
    ) -> None:
        """`tools` are the configured ones by name; `tools_kwargs` those of the row, null entries meaning absent ones.

        Raises:
            DataError: the row names a tool that is not configured, or hands it something else than keyword arguments.
            ConfigError: a tool's `config` has a time or text limit that makes no sense.
        """
        self._tools = dict(tools)
        self._kwargs = {name: kwargs for name, kwargs in (tools_kwargs or {}).items() if kwargs is not None}
        _check_kwargs(self._kwargs, self._tools)
        self._policies = {name: CallPolicy.from_config(tool.config, name) for name, tool in self._tools.items()}
        self._request_id = request_id
        self._instances: dict[str, _Instance] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._entered = False
        self._scored = False
        self.initial_responses: list[ToolResponse] = []
        self.release_failures = 0

    async def __aenter__(self) -> ToolSession:
        """Creates every tool that the row names, all at the same time.

        Raises:
            InfrastructureError: one could not be created; those that were are released again.
        """
        if self._entered:
            raise RuntimeError("a ToolSession is entered once")
        self._entered = True
        try:
            instances = [self._start(name) for name in self._kwargs]
            responses = await self._all([self._ready(instance) for instance in instances])
        except BaseException:
            await self._close()
            raise
        self.initial_responses = [response for response in responses if not response.is_empty()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops what still runs and releases every created tool; raises nothing but a cancellation that arrived."""
        await self._close()

    async def execute(self, calls: Sequence[FunctionCall], turn: int) -> list[ToolOutcome]:
        """Runs the calls of assistant turn `turn` at the same time; outcomes in the order of `calls`.

        Raises:
            InfrastructureError: a tool timed out, was unreachable or returned no finite reward; names the tool. The
                turn's other calls have been cancelled and have ended.
            EtudeError: a tool raised and its `config.on_exception` is `stop`.
            RuntimeError: outside the `async with` block.
        """
        self._check_open()
        return await self._all([self._call(call, turn) for call in calls])

    async def calc_rewards(self) -> dict[str, float]:
        """The final reward of every created tool, by name; to be asked for once, when the trajectory has ended.

        Raises:
            InfrastructureError: a tool failed to say it, or said no finite number; names the tool.
            RuntimeError: the second time, or outside the `async with` block.
        """
        self._check_open()
        if self._scored:
            raise RuntimeError("calc_rewards was already called for this trajectory")
        self._scored = True
        created = {name: instance for name, instance in self._instances.items() if instance.created}
        values = await self._all([self._calc_reward(instance) for instance in created.values()])
        return dict(zip(created, values, strict=True))

    def _check_open(self) -> None:
        if not self._entered or self._closing is not None:
            raise RuntimeError("a ToolSession is used inside its 'async with' block")

    async def _all(self, coroutines: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
        """All results, or the first exception in order, the others stopped first."""
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        if not tasks:
            return []
        self._running.update(tasks)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await settle(tasks, 2 * GRACE_SECONDS)  # a task that is stopped waits itself for what it stops
        self._running.difference_update(tasks)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]

    def _start(self, name: str) -> _Instance:
        tool, kwargs, given_id = self._tools[name], self._kwargs.get(name, {}), f"{self._request_id}:{name}"
        opening = asyncio.ensure_future(called(tool.create, given_id, **dict(kwargs.get("create_kwargs") or {})))
        self._instances[name] = _Instance(tool, self._policies[name], kwargs, given_id, opening)
        return self._instances[name]

    async def _ready(self, instance: _Instance) -> ToolResponse:
        """Waits for the one `create`; any number of calls may wait at once, and none of them cancels it."""
        await asyncio.wait({instance.opening}, timeout=instance.policy.timeout)
        try:
            if not instance.opening.done():
                raise TimeoutError(f"no answer within {instance.policy.timeout:g} s")
            if instance.opening.cancelled():
                raise InfrastructureError("the call was cancelled from inside")
            response = read_creation(instance.opening.result(), instance.given_id)[1]
            return bounded(response, instance.policy.max_response_chars)
        except Exception as error:
            raise _broken(instance.tool, "create", error) from error

    async def _call(self, call: FunctionCall, turn: int) -> ToolOutcome:
        if call.name not in self._tools:
            listed = ", ".join(self._tools) or "none"
            text = f"Unknown tool '{one_line(ValueError(call.name), 100)}'. Available tools: {listed}."
            return self._refused(call, turn, "unknown_tool", text)
        try:
            parameters = decode_arguments(call.arguments)
        except ValueError as error:
            return self._refused(call, turn, "malformed", f"Error in the call of '{call.name}': {one_line(error)}.")
        first = call.name not in self._instances
        instance = self._start(call.name) if first else self._instances[call.name]
        initial = await self._ready(instance)
        return await self._execute(instance, call, parameters, turn, initial if first else ToolResponse())

    def _refused(self, call: FunctionCall, turn: int, error: str, text: str) -> ToolOutcome:
        return ToolOutcome(call, turn, bounded(ToolResponse(text=text), CallPolicy.max_response_chars), error=error)

    async def _execute(
        self, instance: _Instance, call: FunctionCall, parameters: dict[str, Any], turn: int, initial: ToolResponse
    ) -> ToolOutcome:
        tool, policy, error = instance.tool, instance.policy, None
        reward: object = 0.0
        metrics: dict[str, Any] = {}
        started = time.perf_counter()
        try:
            returned = await within(
                policy.timeout, tool.execute, instance.id, parameters, **instance.arguments("execute_kwargs")
            )
            response, reward, metrics = read_execution(returned)
        except Exception as raised:
            error, text = _told(tool, policy, raised)
            response = ToolResponse(text=text)
        return ToolOutcome(
            call,
            turn,
            bounded(response if initial.is_empty() else joined(initial, response), policy.max_response_chars),
            as_reward(reward, f"tool '{tool.name}'"),
            metrics,
            time.perf_counter() - started,
            error,
        )

    async def _calc_reward(self, instance: _Instance) -> float:
        tool, kwargs = instance.tool, instance.arguments("calc_reward_kwargs")
        try:
            value = await within(instance.policy.timeout, tool.calc_reward, instance.id, **kwargs)
        except Exception as error:
            raise _broken(tool, "calc_reward", error) from error
        return as_reward(value, f"tool '{tool.name}': calc_reward")

    async def _close(self) -> None:
        """Runs `_close_all` to its end, however often the caller is cancelled meanwhile."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close_all())
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():
            try:
                await asyncio.wait({self._closing})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        self._closing.result()

    async def _close_all(self) -> None:
        await settle(self._running, 2 * GRACE_SECONDS)
        closers = {asyncio.ensure_future(self._close_one(i)): name for name, i in self._instances.items()}
        if not closers:
            return
        patience = max(instance.policy.timeout for instance in self._instances.values()) + 2 * GRACE_SECONDS
        _, late = await asyncio.wait(closers, timeout=patience)
        for task in late:  # its create ignores its cancellation: released when it ends, if it ends
            self.release_failures += 1
            logger.warning("tool '%s': not released within %g s", closers[task], patience)
            _closers.add(task)
            task.add_done_callback(_closers.discard)

    async def _close_one(self, instance: _Instance) -> None:
        if not instance.opening.done():
            instance.opening.cancel()
            await asyncio.wait({instance.opening})
        if not instance.created:
            return
        kwargs = instance.arguments("release_kwargs")
        try:
            await within(instance.policy.timeout, instance.tool.release, instance.id, **kwargs)
        except Exception as error:
            self.release_failures += 1
            logger.warning("%s", _broken(instance.tool, "release", error))


def _check_kwargs(tools_kwargs: Mapping[str, Mapping[str, Any]], tools: Mapping[str, BaseTool]) -> None:
    for name, kwargs in tools_kwargs.items():
        if name not in tools:
            raise DataError(f"tools_kwargs names the tool '{name}', which is not configured{did_you_mean(name, tools)}")
        for section, value in kwargs.items():
            if section not in _SECTIONS:
                raise DataError(f"tools_kwargs.{name} has no '{section}'{did_you_mean(section, _SECTIONS)}")
            if value is not None and not isinstance(value, Mapping):
                raise DataError(f"tools_kwargs.{name}.{section} must be a mapping, not {type(value).__name__}")


def _broken(tool: BaseTool, method: str, error: Exception) -> InfrastructureError:
    return InfrastructureError(f"tool '{tool.name}': {method} failed: {type(error).__name__}: {one_line(error)}")


def _told(tool: BaseTool, policy: CallPolicy, raised: Exception) -> tuple[str, str]:
    """(error word, text for the model), or the exception that ends the trajectory or the run."""
    if isinstance(raised, ToolError):
        return "tool", str(raised) or f"Error executing tool '{tool.name}'."
    if is_infrastructure(raised) or policy.on_exception is OnException.INFRASTRUCTURE:
        raise _broken(tool, "execute", raised) from raised
    line = f"{type(raised).__name__}: {one_line(raised)}"
    if policy.on_exception is OnException.STOP:
        raise EtudeError(f"tool '{tool.name}' raised {line} (its config.on_exception is 'stop')") from raised
    if tool.name not in _traceback_logged:
        _traceback_logged.add(tool.name)
        logger.warning(
            "tool '%s' raised; the model is told, and later ones are only counted", tool.name, exc_info=raised
        )
    return "exception", f"Error executing tool '{tool.name}': {line}"
