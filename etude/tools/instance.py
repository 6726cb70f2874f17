"""`ToolInstance`: one tool in one trajectory, from its `create` to its `release`.

Invariant: `create` is started once, immediately; `execute` and `calc_reward` run only after it has succeeded, each within
the tool's time limit; `close` calls `release` if, and only if, `create` succeeded. No method of a replayed tool is ever
called.

The session decides when to call each method, and ends running calls before `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from etude.bounded import called, result_of, within
from etude.errors import ConfigError, InfrastructureError, describe_error
from etude.rewards.number import as_float, as_reward
from etude.schemas import FunctionCall, ToolResponse
from etude.tools.base import BaseTool
from etude.tools.contract import overrides, returned_by
from etude.tools.faults import CallPlace
from etude.tools.loop_watch import LoopWatch
from etude.tools.outcome import Execution, read_creation, read_execution
from etude.tools.replay import ReplayedInstance
from etude.tools.runtime import ToolRequest, ToolRuntime
from etude.tools.truncation import TokenLimit, bound_response

Kwargs = Mapping[str, Any]

SECTIONS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_NOTHING: Kwargs = {}


class ToolInstance:
    """Created inside the session's event loop; starts the tool's `create`.

    Attributes:
        executing: the tasks of running `execute` calls.
        closing: set by the session once no new call may start.
    """

    __slots__ = (
        "_creation", "_given_id", "_initial_response", "_kwargs", "_num_calls", "_replayed", "_tokens", "_trajectory",
        "_watch", "calls", "closing", "executing", "tool",
    )  # fmt: skip

    def __init__(
        self,
        tool: BaseTool,
        calls: ToolRuntime,
        kwargs: Mapping[str, Kwargs | None],
        tokens: TokenLimit | None,
        trajectory: str,
        watch: LoopWatch,
    ) -> None:
        """Raises MissingCall if the tool is replayed and the recording lacks this row."""
        self.tool, self.calls = tool, calls
        self.executing: set[asyncio.Task[Any]] = set()
        self.closing = False
        self._kwargs, self._tokens, self._trajectory, self._watch = kwargs, tokens, trajectory, watch
        self._given_id = f"{trajectory}:{tool.name}"
        self._num_calls = 0
        self._initial_response: ToolResponse | None = None
        self._replayed: ReplayedInstance | None = None
        self._creation = self._create()

    def _create(self) -> asyncio.Future[object]:
        """Starts `create` and returns its future; a tool that is replayed or has no `create` is created at once."""
        kwargs = self._arguments("create_kwargs")
        initial_response = ToolResponse()
        if self.calls.replay is not None:
            self._replayed = self.calls.replay.begin(self._trajectory, kwargs)
            initial_response = self._replayed.initial_response
        elif overrides(self.tool, "create"):
            whole = {"create_kwargs": dict(kwargs)} if self.calls.reads_create_kwargs else {}
            return asyncio.ensure_future(called(self.tool.create, self._given_id, **{**whole, **kwargs}))
        created: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        created.set_result((self._given_id, initial_response))
        return created

    @property
    def created(self) -> bool:
        """Whether `create` has succeeded."""
        return self._creation.done() and not self._creation.cancelled() and self._creation.exception() is None

    async def ready(self) -> ToolResponse:
        """Waits for `create` and returns its response. Any number of calls may wait concurrently; cancelling one does not
        cancel `create`.

        Raises:
            ConfigError: `create` is not asynchronous, or returned neither an id nor an id and a response.
            InfrastructureError: `create` failed or timed out.
        """
        if self._initial_response is not None:
            return self._initial_response
        limit = self.calls.policy.timeout
        try:
            await asyncio.wait({self._creation}, timeout=limit)
            if not self._creation.done():
                raise TimeoutError(f"no answer within {limit:g} s")
            if self._creation.cancelled():
                raise InfrastructureError("the call was cancelled from inside")
            returned = self._creation.result()
            with returned_by(self.tool, "create"):
                response = read_creation(returned, self._given_id)[1]
        except ConfigError:
            raise
        except Exception as error:
            raise InfrastructureError(self.sentence("create", error)) from error
        if self._initial_response is None:  # another waiter may have set it
            if self.calls.recorder is not None:
                self.calls.recorder.create(self._trajectory, self._arguments("create_kwargs"), response)
            self._initial_response = self.truncate(response)
        return self._initial_response

    def ask(self, call: FunctionCall, arguments: dict[str, Any], turn: int, agent_data: object = None) -> ToolRequest:
        """Builds the request of the next call; calls are numbered in the order in which the model wrote them. `agent_data`
        goes to tools that take it.

        Raises:
            MissingCall: the tool is replayed, and the recording has no answer.
        """
        place = CallPlace(self.tool.name, self._trajectory, turn, self._num_calls)
        self._num_calls += 1
        kwargs = self._arguments("execute_kwargs")
        recorded = None
        if self._replayed is not None and self.calls.reaches_tool(
            place
        ):  # calls that a fault stopped were not recorded
            recorded = self._replayed.execute(arguments, kwargs)
        shared = {} if agent_data is None or not self.calls.reads_agent_data else {"agent_data": agent_data}
        return ToolRequest(call, place, arguments, kwargs, self._arguments("create_kwargs"), recorded, shared)

    async def execute(self, request: ToolRequest) -> Execution:
        """Runs the tool once; adds to `request.blocked_loop` how often it blocked the event loop.

        Raises:
            TimeoutError: no answer in time.
            ConfigError: `execute` is not asynchronous, or returned something else than its contract says.
            Exception: raised by the tool.
            asyncio.CancelledError: the session is closing.
        """
        if self.closing:  # the call was still waiting for a permit
            raise asyncio.CancelledError
        work = called(self.tool.execute, self._id, request.arguments, **{**request.shared, **request.kwargs})
        task = asyncio.get_running_loop().create_task(work)
        self.executing.add(task)
        try:
            returned = await result_of(task, self.calls.policy.timeout)
            with returned_by(self.tool, "execute"):
                return read_execution(returned)
        except InfrastructureError:
            if task.cancelled() and self.closing:
                raise asyncio.CancelledError from None
            raise
        finally:
            self.executing.discard(task)
            request.blocked_loop += self._watch.stalls(task)

    def truncate(self, response: ToolResponse) -> ToolResponse:
        """Returns `response` truncated to the text limits."""
        return bound_response(response, self.calls.policy, self._tokens)

    async def calc_reward(self) -> float:
        """Returns the final reward; 0.0 if the tool does not override `calc_reward`.

        Raises:
            ConfigError: `calc_reward` is not asynchronous, or returned no number.
            InfrastructureError: `calc_reward` failed, or returned a number that is not finite.
            MissingCall: the tool is replayed, and the recording has no final reward.
        """
        kwargs = self._arguments("calc_reward_kwargs")
        if self._replayed is not None:
            return self._replayed.calc_reward(kwargs)
        value = 0.0
        try:
            if overrides(self.tool, "calc_reward"):
                returned = await within(self.calls.policy.timeout, self.tool.calc_reward, self._id, **kwargs)
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
        if self.calls.recorder is not None:
            self.calls.recorder.calc_reward(self._trajectory, kwargs, value)
        return value

    @property
    def _to_release(self) -> bool:
        return self._replayed is None and self.created and overrides(self.tool, "release")

    async def close(self) -> bool:
        """Cancels a running `create`, and calls `release` if it succeeded; returns False if the release failed."""
        if not self._creation.done():
            self._creation.cancel()
            await asyncio.wait({self._creation})
        if not self._to_release:
            return True
        try:
            kwargs = self._arguments("release_kwargs")
            await within(self.calls.policy.timeout, self.tool.release, self._id, **kwargs)
        except Exception as error:
            self.calls.log_release(self.sentence("release", error))
            return False
        return True

    def sentence(self, method: str, error: Exception) -> str:
        """Formats a failure: `tool 'search': execute failed: ConnectionError: refused`."""
        return f"tool '{self.tool.name}': {method} failed: {describe_error(error)}"

    @property
    def _id(self) -> str:
        """The id that `create` returned, or the one passed to it if its return value is malformed."""
        try:
            return read_creation(self._creation.result(), self._given_id)[0]
        except TypeError:
            return self._given_id

    def _arguments(self, section: str) -> Kwargs:
        return self._kwargs.get(section) or _NOTHING
