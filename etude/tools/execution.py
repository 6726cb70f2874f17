"""`ToolRuntime`: what all trajectories of a process share of a tool, and the way of a call through it.

    faults ── recording (read only) ── cache ── limits ── execute        retried as a whole after infrastructure failures

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
import random
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import CodeType
from typing import Any

from etude.errors import (
    WARNING,
    ConfigError,
    EtudeError,
    InfrastructureError,
    ToolError,
    debugging,
    describe_error,
    is_infrastructure,
    one_line,
    retry_after,
    user_place,
)
from etude.limits import Limit, Limiter, LocalLimiter, open_limiter, require_ray
from etude.registry import digest_code, one_edit_from
from etude.rewards.finite import as_reward
from etude.schemas import FunctionCall, ToolResponse
from etude.tools.arguments import ArgumentChecker, ArgumentError, decode_arguments
from etude.tools.base import BaseTool
from etude.tools.cache import ResultCache
from etude.tools.call import Source, ToolCall, ToolResult
from etude.tools.contract import check_contract, overrides
from etude.tools.options import POLICY_KEYS, CallPolicy, FaultPolicy
from etude.tools.recording import Recording
from etude.tools.truncation import TokenLimit
from etude.tools.wire import canonical, digest

Execute = Callable[[ToolCall], Awaitable[ToolResult]]
"""Runs the tool once, within its time limit."""
_MAX_RETRY_DELAY = 30.0
_GARBAGE = ["\x00", "\ufffd", "{", "}", "[", '"', "<", "</", ">", "\n", "é", "漢", "🙂", *map(chr, range(32, 127))]

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


class InjectedError(Exception):
    """Stands for an exception of the tool."""


class ToolRuntime:
    """Created by `ToolRuntime.of(tool)`. `schema` is the tool's schema, as a read-only OpenAI dictionary.

    `reads_create_kwargs`, `reads_agent_data`: whether the tool's `create` takes verl's keyword `create_kwargs`, and its
    `execute` takes `agent_data`. `recording`: None without one; `replays`: it answers, and no method of the tool is called.
    """

    @staticmethod
    def of(tool: BaseTool) -> ToolRuntime:
        """Returns the runtime of this tool object.

        Raises:
            ConfigError: the tool's `config`, schema or class is invalid; names tool and key or method.
            DataError: the recording that shall answer for the tool has no call of it.
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
        self._cache: ResultCache | None = None
        if policy.served is not None:
            self.recording: Recording | None = Recording(policy.served.path, tool.name, policy.served.mode)
        else:
            check_contract(tool)
            self.recording = None if policy.record is None else Recording(policy.record, tool.name)
            self._cache = None if policy.cache is None else ResultCache(policy.cache)
        self.replays = self.recording is not None and self.recording.only
        if self._cache is not None and overrides(tool, "calc_reward"):
            raise ConfigError(
                f"tool '{tool.name}': config.cache is for tools whose execute is pure, and this one has a calc_reward, "
                "which would not see the calls that the cache answers"
            )
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
        own = {key: value for key, value in (tool.config or {}).items() if key not in POLICY_KEYS}
        for key in own:
            if near := one_edit_from(str(key), sorted(POLICY_KEYS)):
                problem = f"tool '{self.name}': config.{key} means nothing to Étude"
                logger.warning(WARNING, problem, f"did you mean config.{near}?")
        code = getattr(tool, "__qualname__", type(tool).__qualname__)  # a function tool has its function's
        self._identity = digest(tool.name, tool.__module__, code, own)
        self._code = digest_code(getattr(tool, "__wrapped__", type(tool))) if self._cache is not None else ""
        self.reads_create_kwargs = _accepts_keyword(tool, "create", "create_kwargs")
        self.reads_agent_data = _accepts_keyword(tool, "execute", "agent_data")
        if self._cache is not None and self.reads_agent_data:
            raise ConfigError(
                f"tool '{tool.name}': config.cache is for tools whose execute is pure, and this one takes agent_data: what "
                "it answers one conversation may be wrong in another"
            )
        self._logged: set[str] = set()

    def log_first(self, what: str, line: str, fix: str = "", **more: object) -> None:
        """Logs the tool's first `what` as a warning, later ones at INFO."""
        level, said = logging.INFO if what in self._logged else logging.WARNING, (WARNING, line, fix)
        logger.log(level, *(said if fix else ("%s", line)), **more)  # type: ignore[arg-type]
        self._logged.add(what)

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

    async def call_with_retries(self, call: ToolCall, execute: Execute) -> ToolResult:
        """Returns the result of a call, retrying infrastructure failures.

        Raises:
            Exception: the infrastructure failure of the last attempt.
            ConfigError: the tool violates its contract, or raised one.
            MissingCall: the recording that answers for the tool has no answer.
            EtudeError: `config.on_exception` is `stop` and the tool raised.
        """
        while True:
            try:
                if self.policy.faults is None:
                    return await self._cached_or_live(call, execute)
                return await self._with_faults(self.policy.faults, call, execute)
            except Exception as error:
                if not is_infrastructure(error):
                    raise
                call.timeouts += isinstance(error, TimeoutError | asyncio.TimeoutError)
                if call.retries >= self.policy.max_retries:
                    raise
                call.retries += 1
                asked = min(retry_after(error), _MAX_RETRY_DELAY)
            # Exponential back-off with jitter, so that calls that failed together do not retry together, after what the
            # service asked for.
            longest = min(self.policy.retry_delay * 2 ** min(call.retries - 1, 30), _MAX_RETRY_DELAY)
            await asyncio.sleep(asked + longest * (1 - 0.5 * call.chance("delay", call.retries)))

    async def _with_faults(self, policy: FaultPolicy, call: ToolCall, execute: Execute) -> ToolResult:
        """Returns the result of a call, or fails instead, or replaces its text by up to 400 characters of garbage; which
        depends only on the seed, the call's place in the trajectory and the attempt (each retry draws again)."""
        drawn = call.chance("fault", policy.seed, call.retries)
        if drawn < policy.timeout:
            raise TimeoutError("no answer in time (injected: config.faults)")
        if drawn < policy.timeout + policy.error:
            return replace(self._failure(InjectedError("injected by config.faults"), call), source=Source.FAULT)
        result = await self._cached_or_live(call, execute)
        if drawn >= policy.timeout + policy.error + policy.garbage:
            return result
        source = random.Random(f"{policy.seed} {call.requested.name} {call.trajectory} {call.turn} {call.number}")
        text = "".join(source.choices(_GARBAGE, k=source.randint(0, 400)))[:400]
        return replace(result, response=ToolResponse(text=text), source=Source.FAULT)

    async def _cached_or_live(self, call: ToolCall, execute: Execute) -> ToolResult:
        """Returns the result of the recording, the cache or the tool; records it if `config.record` is set."""
        recording, row, given = self.recording, dict(call.create_kwargs), dict(call.execute_kwargs)
        if self._cache is None and recording is None:
            return await self._within_limits(call, execute)
        key = digest(self._identity, call.parameters, given, row)
        place = (call.trajectory, str(call.number), canonical(row), canonical([call.parameters, given]), call.history)
        if recording is not None and recording.only:
            return await recording.find(*place, key)
        if self._cache is None:
            result = await self._within_limits(call, execute)
        else:
            result = await self._cache.answer(f"{key}:{self._code}", lambda: self._within_limits(call, execute))
        if recording is not None:
            await recording.keep(*place, result)
        return result

    async def _within_limits(self, call: ToolCall, execute: Execute) -> ToolResult:
        with contextlib.ExitStack() as permits:
            cluster = self._cluster_limiter
            if self._cluster_limit is not None and (cluster is None or not cluster.is_current()):
                cluster = await asyncio.to_thread(open_limiter, f"tool:{self.name}", self._cluster_limit)
                self._cluster_limiter = cluster
            # The cluster's is last, so that its permit is not held while the call waits for the other.
            for limiter in filter(None, (self._process_limiter, cluster)):
                permits.enter_context(await limiter.acquire())
            try:
                result = await execute(call)
            except Exception as raised:
                return self._failure(raised, call)
        as_reward(result.reward, "it")
        return result

    def _failure(self, raised: Exception, call: ToolCall) -> ToolResult:
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
        if "exception" not in self._logged and not isinstance(raised, InjectedError):
            self.log_first(
                "exception",
                f"tool '{self.name}' raised {describe_error(raised)} on {dict(call.parameters)!s:.200}; the model is "
                "told, later ones are only counted",
                f"mend {user_place(raised) or 'the tool'}; for a mistake of the model's raise ToolError(text)",
                exc_info=raised if debugging() else None,
            )
        return ToolResult(ToolResponse(text=f"Error executing tool '{self.name}': {line}"), error="exception")
