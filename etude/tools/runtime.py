"""`ToolRuntime`: the state of a tool that all trajectories of a process share, and the path of a call through it.

    faults ── recording? ── cache ── limits ── execute          retried as a whole after infrastructure failures
       │      (replay)                            │
       ▼          ▼                               ▼
    garbage ◀── recorder ◀───────────────── answer to the model, or failure

Invariant: there is one `ToolRuntime` per tool object, so that a limit of n concurrent calls holds across trajectories. Only
infrastructure failures of `execute` are retried; the delay depends on the call's place in the trajectory, not on the clock.
A call ends in a `ToolResult`, an infrastructure failure, or the end of the run. Lifecycle and time limits are left to the
session.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from etude.errors import (
    ConfigError,
    EtudeError,
    InfrastructureError,
    ToolError,
    debugging,
    describe_error,
    is_infrastructure,
    one_line,
)
from etude.limits import Limit, Limiter, LocalLimiter, open_limiter, require_ray
from etude.registry import one_edit_from
from etude.rewards.number import as_reward
from etude.schemas import FunctionCall, ToolResponse
from etude.tools.arguments import ArgumentChecker, ArgumentError, decode_arguments
from etude.tools.base import BaseTool
from etude.tools.cache import ResultCache
from etude.tools.contract import check_contract, overrides, refused_kwargs
from etude.tools.faults import CallPlace, Fault, InjectedError, draw, garbage
from etude.tools.options import POLICY_KEYS, CallPolicy
from etude.tools.outcome import Execution, Source, ToolResult
from etude.tools.recording import Recorder
from etude.tools.replay import Replay
from etude.tools.truncation import TokenLimit
from etude.tools.wire import digest

_MAX_RETRY_DELAY = 30.0

logger = logging.getLogger(__name__)

_shared: dict[int, ToolRuntime] = {}  # by id(tool), until the tool is garbage-collected


def _accepts_keyword(tool: BaseTool, method: str, keyword: str) -> bool:
    """Whether `method` takes `keyword`: as a parameter, or in its `**kwargs` if some method of a user's class has the
    keyword as a string constant. Other tools must not get it, as they may forward all their keywords."""
    parameters = inspect.signature(getattr(tool, method)).parameters
    if keyword in parameters and parameters[keyword].kind is not inspect.Parameter.VAR_KEYWORD:
        return True
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False
    classes = (base for base in type(tool).__mro__ if not base.__module__.startswith("etude."))
    functions = (inspect.unwrap(value) for base in classes for value in vars(base).values() if callable(value))
    return any(_has_constant(getattr(function, "__code__", None), keyword) for function in functions)


def _has_constant(code: CodeType | None, word: str) -> bool:
    """Whether the string `word` is a constant of `code`, or of a code object nested in it."""
    constants = code.co_consts if code is not None else ()
    return any(each == word or (isinstance(each, CodeType) and _has_constant(each, word)) for each in constants)


@dataclass(slots=True)
class ToolRequest:
    """A validated call in flight.

    Attributes:
        recorded: its answer in a recording, if any.
        shared: keyword arguments that the cache and recordings ignore (`agent_data`, if the tool takes it).
        broken, timeouts: attempts that ended in an infrastructure failure, and those of them that timed out.
        blocked_loop: how often the tool blocked the event loop.
    """

    call: FunctionCall
    place: CallPlace
    arguments: dict[str, Any]
    kwargs: Mapping[str, Any]
    create_kwargs: Mapping[str, Any]
    recorded: ToolResult | None
    shared: Mapping[str, Any]
    broken: int = 0
    timeouts: int = 0
    blocked_loop: int = 0


class ToolRuntime:
    """Created by `ToolRuntime.of(tool)`. `schema` is the tool's schema, as a read-only OpenAI dictionary.

    `reads_create_kwargs`, `reads_agent_data`: whether the tool's `create` takes verl's keyword `create_kwargs`, and its
    `execute` takes `agent_data`.
    """

    @staticmethod
    def of(tool: BaseTool) -> ToolRuntime:
        """Returns the runtime of this tool object.

        Raises:
            ConfigError: the tool's `config`, schema or class is invalid; names tool and key or method.
        """
        runtime = _shared.get(id(tool))
        if runtime is None:
            runtime = _shared[id(tool)] = ToolRuntime(tool)
            weakref.finalize(tool, _shared.pop, id(tool), None)
        return runtime

    def __init__(self, tool: BaseTool) -> None:
        self.name = tool.name
        self.policy = policy = CallPolicy.from_config(tool.config, tool.name)
        self.schema = tool.get_openai_tool_schema().to_openai()
        parameters = self.schema["function"].get("parameters") or {}
        self._checker = ArgumentChecker(parameters, tool.name)
        self.recorder = None if policy.record is None else Recorder(policy.record, tool.name)
        self.replay = None if policy.replay is None else Replay(policy.replay, tool.name)
        if self.replay is None:
            check_contract(tool)
        self._process_limiter: Limiter | None = None
        self._cluster_limiter: Limiter | None = None  # opened by the first call, as connecting takes a while
        self._cluster_limit: Limit | None = None
        calls, process_limit = policy.max_concurrent_calls, None
        if calls is not None and calls.scope == "cluster":
            require_ray(f"tool '{tool.name}': config.max_concurrent_calls of scope cluster")
            self._cluster_limit = Limit(calls.limit)
        elif calls is not None:
            process_limit = calls.limit
        if process_limit or policy.calls_per_second:
            self._process_limiter = LocalLimiter(Limit(process_limit, policy.calls_per_second))
        self._cache = None if policy.cache is None else ResultCache(policy.cache)
        if policy.cache is not None and overrides(tool, "calc_reward"):
            raise ConfigError(
                f"tool '{tool.name}': config.cache is for tools whose execute is pure, and this one has a calc_reward, "
                "which would not see the calls that the cache answers"
            )
        own = {key: value for key, value in (tool.config or {}).items() if key not in POLICY_KEYS}
        for key in own:
            if near := one_edit_from(str(key), sorted(POLICY_KEYS)):
                logger.warning(
                    "tool '%s': config.%s means nothing to Étude; did you mean config.%s?", self.name, key, near
                )
        code = getattr(tool, "__qualname__", type(tool).__qualname__)  # a function tool has its function's
        self._identity = digest(tool.name, tool.__module__, code, own)
        self.reads_create_kwargs = _accepts_keyword(tool, "create", "create_kwargs")
        self.reads_agent_data = _accepts_keyword(tool, "execute", "agent_data")
        self._exception_logged = self._release_logged = False
        self._refused_kwargs: dict[tuple[str, frozenset[str]], str | None] = {}

    def refused_kwargs(self, tool: BaseTool, section: str, kwargs: Mapping[str, object]) -> str | None:
        """Why the tool does not take a row's keyword arguments (see `contract.refused_kwargs`); None if it does, or if it is
        replayed."""
        names = (section, frozenset(kwargs))
        if self.replay is None and names not in self._refused_kwargs:
            self._refused_kwargs[names] = refused_kwargs(tool, section, kwargs)
        return self._refused_kwargs.get(names)

    def log_release(self, line: str) -> None:
        """Logs the tool's first failed release as a warning, later ones at INFO."""
        logger.log(logging.INFO if self._release_logged else logging.WARNING, "%s", line)
        self._release_logged = True

    def read(self, call: FunctionCall, tokens: TokenLimit | None) -> dict[str, Any]:
        """Decodes and validates the call's arguments.

        Raises:
            ArgumentError: the arguments are too long, not a JSON object, or violate the schema.
        """
        policy, text = self.policy, call.arguments
        if len(text) > policy.max_arguments_chars:
            raise ArgumentError(f"the arguments are longer than {policy.max_arguments_chars} characters")
        limit = policy.max_arguments_tokens
        if limit is not None and tokens is not None and tokens.exceeded(text, limit):
            raise ArgumentError(f"the arguments are longer than {limit} tokens")
        return self._checker.check(decode_arguments(text))

    async def answer(self, request: ToolRequest, execute: Callable[[], Awaitable[Execution]]) -> ToolResult:
        """Returns the result of a call, retrying infrastructure failures; `execute` runs the tool once, within its time
        limit.

        Raises:
            Exception: the infrastructure failure of the last attempt.
            ConfigError: the tool violates its contract, or raised one.
            EtudeError: `config.on_exception` is `stop` and the tool raised.
        """
        while True:
            try:
                return await self._attempt(request, execute)
            except Exception as error:
                if not is_infrastructure(error):
                    raise
                request.timeouts += isinstance(error, TimeoutError | asyncio.TimeoutError)
                if request.broken >= self.policy.max_retries:
                    raise
                request.broken += 1
            # Exponential back-off with jitter, so that calls that failed together do not retry together.
            longest = min(self.policy.retry_delay * 2 ** min(request.broken - 1, 30), _MAX_RETRY_DELAY)
            await asyncio.sleep(longest * (1 - 0.5 * request.place.chance("delay", request.broken)))

    def reaches_tool(self, place: CallPlace) -> bool:
        """Whether the faults of `config.faults` let the call reach the tool or its recording."""
        if self.policy.faults is None:
            return True
        retried = {Fault.TIMEOUT}
        if self.policy.on_exception == "infrastructure":
            retried.add(Fault.ERROR)
        drawn = (draw(self.policy.faults, place, attempt) for attempt in range(self.policy.max_retries + 1))
        final = next((fault for fault in drawn if fault not in retried), Fault.TIMEOUT)
        return final in (None, Fault.GARBAGE)

    async def _attempt(self, request: ToolRequest, execute: Callable[[], Awaitable[Execution]]) -> ToolResult:
        faults, place = self.policy.faults, request.place
        fault = None if faults is None else draw(faults, place, request.broken)
        if fault is Fault.TIMEOUT:
            raise TimeoutError("no answer in time (injected: config.faults)")
        if fault is Fault.ERROR:
            return replace(self._failure_result(InjectedError("injected by config.faults")), source=Source.FAULT)
        answer = request.recorded or await self._execute_or_recall(request, execute)
        if faults is not None and fault is Fault.GARBAGE:
            return replace(answer, response=ToolResponse(text=garbage(faults, place)), source=Source.FAULT)
        return answer

    async def _execute_or_recall(self, request: ToolRequest, execute: Callable[[], Awaitable[Execution]]) -> ToolResult:
        """Returns the result of the cache or the tool; records it if `config.record` is set."""
        started = time.perf_counter()
        try:
            if self._cache is None:
                answer = await self._live(execute)
            else:
                key = digest(self._identity, request.arguments, dict(request.kwargs), dict(request.create_kwargs))
                answer = await self._cache.answer(key, lambda: self._live(execute))
        except Exception as error:
            if self.recorder is not None and is_infrastructure(error):
                self._record(request, None, started, f"{type(error).__name__}: {one_line(error)}")
            raise
        if self.recorder is not None:
            self._record(request, answer, started)
        return answer

    def _record(self, request: ToolRequest, answer: ToolResult | None, started: float, cause: str = "") -> None:
        assert self.recorder is not None
        seconds = time.perf_counter() - started
        self.recorder.execute(request.place, request.kwargs, request.arguments, answer, seconds, cause)

    async def _live(self, execute: Callable[[], Awaitable[Execution]]) -> ToolResult:
        with contextlib.ExitStack() as permits:
            for limiter in await self._limiters():
                permits.enter_context(await limiter.acquire())
            try:
                response, reward, metrics = await execute()
            except Exception as raised:
                return self._failure_result(raised)
        return ToolResult(response, as_reward(reward, "it"), metrics)

    async def _limiters(self) -> list[Limiter]:
        """Returns the limiters that a call needs a permit of; the cluster's is last, so that its permit is not held while
        the call waits for the other."""
        cluster = self._cluster_limiter
        if self._cluster_limit is not None and (cluster is None or not cluster.is_current()):
            self._cluster_limiter = await asyncio.to_thread(open_limiter, f"tool:{self.name}", self._cluster_limit)
        return [each for each in (self._process_limiter, self._cluster_limiter) if each is not None]

    def _failure_result(self, raised: Exception) -> ToolResult:
        """Returns the result that describes an exception to the model; raises if it ends the trajectory or the run, as an
        error does that only the user can mend."""
        if isinstance(raised, ToolError):
            text = str(raised) or f"Error executing tool '{self.name}'."
            return ToolResult(ToolResponse(text=text), error="tool")
        if is_infrastructure(raised) or isinstance(raised, ConfigError):
            raise raised
        line = f"{type(raised).__name__}: {one_line(raised)}"
        if self.policy.on_exception == "infrastructure":
            raise InfrastructureError(line) from raised
        if self.policy.on_exception == "stop":
            raise EtudeError(
                f"tool '{self.name}' raised {describe_error(raised)}; its config.on_exception is 'stop'"
            ) from raised
        if not self._exception_logged and not isinstance(raised, InjectedError):
            self._exception_logged = True
            logger.warning(
                "tool '%s' raised %s; the error goes to the model; later ones are only counted",
                self.name,
                describe_error(raised),
                exc_info=raised if debugging() else None,
            )
        return ToolResult(ToolResponse(text=f"Error executing tool '{self.name}': {line}"), error="exception")
