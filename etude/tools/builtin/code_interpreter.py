"""`SandboxFusionTool`: the tool `code_interpreter`, which runs the model's code in a sandbox.

Invariant: the response is never empty, and always states that a program failed, timed out or was killed; output is
unchanged, except that only the end of a long stderr is kept, where Python puts the reason. A failure of the sandbox is an
infrastructure failure, never a response. At most `num_workers` programs run at once per process, and `rate_limit` in the
whole cluster. Stateless calls share nothing. A stateful trajectory has its own interpreter from its first call to its
release, and gets a new one only if its own code ended the old one: once a cell has been sent, losing the interpreter in any
other way is a permanent infrastructure failure, and no cell is ever sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, field_validator, model_validator

from etude.errors import ConfigError, DataError, ToolError, one_line, plural
from etude.limits import ConcurrencyLimit, Limit, Limiter, open_limiter
from etude.options.types import Count
from etude.sandbox import (
    CellResult,
    Isolation,
    Language,
    Limits,
    RunRequest,
    RunResult,
    RunStatus,
    SandboxClient,
    SandboxError,
    SandboxRequestError,
    UnknownSessionError,
)
from etude.sandbox.last_value import print_last_value
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.tools.base import Execution, StatefulTool, function_schema
from etude.tools.builtin.images import load_image
from etude.tools.options import CallPolicy, ToolOptions, read_options
from etude.trace import rollout_trace_op

MAX_IMAGE_PIXELS = 4_000_000
MAX_STDERR_CHARS = 2000
NOTHING = "(the code ran to its end and printed nothing)"
_FENCE = re.compile(r"\s*```[ \t]*[\w+-]*[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
_SCHEMA = function_schema(
    "code_interpreter",
    "A tool for executing code.",
    ["code"],
    code={"type": "string", "description": "The code to execute."},
)


class SandboxFusionOptions(ToolOptions):
    """`config` of `code_interpreter`."""

    num_workers: Count = 10
    rate_limit: Count = 10
    default_timeout: float = Field(default=30.0, gt=0, le=3600)
    default_language: str = "python"
    enable_global_rate_limit: bool = True
    rate_limiter_name: str = Field(default="code_interpreter", min_length=1)
    sandbox_fusion_url: str | None = None
    sandbox_token: str | None = Field(default=None, repr=False)
    memory_limit_mb: int = Field(default=1024, ge=16)
    stateful: bool = False
    isolation: Isolation = Isolation.AUTO
    max_code_chars: Count = 200_000

    @field_validator("default_language")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return Language(value).value

    @model_validator(mode="after")
    def _fits(self) -> SandboxFusionOptions:
        if self.stateful and self.default_language != Language.PYTHON.value:
            raise ValueError("stateful: only Python keeps its variables between calls")
        return self


@dataclass
class _Trajectory:
    """The state of one trajectory: the session of its interpreter, if the tool is stateful."""

    session: str | None = None
    lost: str = ""
    """The reason why the interpreter is, or may be, gone, if not through the trajectory's own code; no more code can run."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SandboxFusionTool(StatefulTool[_Trajectory]):
    """The argument is `code`; a configured schema may add `language`, and `timeout` (seconds, at most `default_timeout`)."""

    schema = _SCHEMA

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Reads the options; the first call connects to the sandbox, or starts it.

        Raises:
            ConfigError: an option is invalid.
        """
        super().__init__(config, tool_schema)
        self._options = read_options(SandboxFusionOptions, config, self.name)
        cache = CallPolicy.from_config(config, self.name).cache
        if self._options.stateful and cache is not None and not cache.only:
            raise ConfigError(
                f"tool '{self.name}': config.cache is for tools whose execute is pure, and with stateful a cell's answer "
                "depends on those before it"
            )
        self._client: SandboxClient | None = None
        self._here = ConcurrencyLimit(self._options.num_workers)
        self._everywhere: Limiter | None = None
        if self._options.sandbox_fusion_url is not None:
            self._sandbox()  # report an invalid address now

    async def begin(self, **create_kwargs: Any) -> _Trajectory:
        """Returns the state of a trajectory without an interpreter."""
        return _Trajectory()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Runs `parameters["code"]` and returns its output and how it ended; step reward 0.0.

        Raises:
            ToolError: there is no code, or it cannot be run as requested.
            SandboxError: the sandbox failed.
            EtudeError: the sandbox or the limiter cannot be used as configured.
        """
        code = self._code(parameters)
        language = self._language(parameters)
        limits = self._limits(parameters)
        if self._options.stateful and language is Language.PYTHON:
            return await self._run_cell(instance_id, code, limits)
        request = RunRequest(code=code, language=language, limits=limits)
        if language is Language.PYTHON:
            request = print_last_value(request)
        async with self._permits():
            try:
                result = await self._sandbox().run(request)
            except SandboxRequestError as error:
                if "language" not in parameters:  # an error of the configuration, not of the model
                    raise
                raise ToolError(f"Error: {one_line(error)}") from error
        metrics = {"status": result.status.value, "return_code": result.return_code, "seconds": result.wall_seconds}
        return ToolResponse(text=run_report(result, limits)), 0.0, metrics

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Closes the trajectory's interpreter, if any."""
        trajectory = self._instance_dict.pop(instance_id, None)
        if trajectory is not None and trajectory.session is not None:
            await self._sandbox().close_session(trajectory.session)

    async def _run_cell(self, instance_id: str, code: str, limits: Limits) -> Execution:
        trajectory = self._instance_dict.setdefault(instance_id, _Trajectory())
        async with trajectory.lock, self._permits():
            result = await self._cell_of(trajectory, code, limits)
            if not result.session_alive:
                trajectory.session = None
        text = cell_report(result, limits, limits.wall_seconds)
        metrics = {"status": result.status.value, "seconds": result.wall_seconds}
        return ToolResponse(text=text, image=_images(result) or None), 0.0, metrics

    async def _cell_of(self, trajectory: _Trajectory, code: str, limits: Limits) -> CellResult:
        if trajectory.lost:  # fails a retried call, too
            raise SandboxError(f"the trajectory has lost its interpreter: {trajectory.lost}")
        sandbox = self._sandbox()
        if trajectory.session is None:
            trajectory.session = await sandbox.session(limits)
        try:
            return await sandbox.run_cell(trajectory.session, code, limits.wall_seconds)
        except SandboxRequestError:  # rejected: the cell did not run
            raise
        except BaseException as error:  # a cancelled cell may have run, too
            trajectory.lost = one_line(error) or type(error).__name__
            if isinstance(error, UnknownSessionError):
                raise SandboxError(f"the trajectory has lost its interpreter: {trajectory.lost}") from error
            raise

    @contextlib.asynccontextmanager
    async def _permits(self) -> AsyncIterator[None]:
        """Holds the permits to run one program, in this process and in the cluster."""
        options = self._options
        opened = self._everywhere is not None and self._everywhere.is_current()
        if options.enable_global_rate_limit and not opened:
            limit = Limit(max_concurrent=options.rate_limit)
            self._everywhere = await asyncio.to_thread(open_limiter, options.rate_limiter_name, limit)
        async with self._here.permit():
            if self._everywhere is None:
                yield
            else:
                async with self._everywhere.permit():
                    yield

    def _sandbox(self) -> SandboxClient:
        if self._client is None:
            options = self._options
            self._client = SandboxClient(
                options.sandbox_fusion_url,
                token=options.sandbox_token,
                attempts=1,  # `ToolRuntime` retries, by `max_retries`
                workers=options.num_workers,
                isolation=options.isolation,
            )
        return self._client

    def _code(self, parameters: dict[str, Any]) -> str:
        code = parameters.get("code")
        if isinstance(code, int | float) and not isinstance(code, bool):
            code = str(code)
        if not isinstance(code, str) or not code.strip():
            raise ToolError("Error: the argument 'code' must be the code to run, as a text")
        if len(code) > self._options.max_code_chars:
            raise ToolError(f"Error: the code is longer than {self._options.max_code_chars} characters")
        fenced = _FENCE.fullmatch(code)
        return fenced.group(1) if fenced and "```" not in fenced.group(1) else code

    def _language(self, parameters: dict[str, Any]) -> Language:
        named = parameters.get("language", self._options.default_language)
        try:
            return Language(named)
        except ValueError:
            known = ", ".join(language.value for language in Language)
            raise ToolError(f"Error: unknown language {str(named)[:40]!r}; use one of {known}") from None

    def _limits(self, parameters: dict[str, Any]) -> Limits:
        longest = self._options.default_timeout
        asked = parameters.get("timeout", longest)
        if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
            raise ToolError("Error: 'timeout' must be a number of seconds above 0")
        seconds = min(float(asked), longest)
        cpu = max(60.0, 4 * seconds) if not self._options.stateful else 600.0
        return Limits(wall_seconds=seconds, cpu_seconds=cpu, memory_mb=self._options.memory_limit_mb)


def _images(result: CellResult) -> list[Any]:
    """Decodes the cell's images, within limits; drops invalid ones."""
    images = []
    for content in result.images:
        with contextlib.suppress(DataError):
            images.append(load_image(content, MAX_IMAGE_PIXELS))
    return images


def run_report(result: RunResult, limits: Limits) -> str:
    """Returns the response's text for a program that ran."""
    if result.status is RunStatus.COMPILE_FAILED:
        compiled = result.compile
        late = compiled is not None and compiled.status is RunStatus.TIME_LIMIT
        reason = "the compiler timed out" if late else "compilation failed"
        return _join_lines(f"({reason})", tail(compiled.stderr or compiled.stdout) if compiled else "")
    ending = _ending(result.status, limits.wall_seconds, limits)
    code = result.return_code or 0
    stderr = tail(result.stderr)
    if not ending and code < 0:
        ending = f"(killed by {_signal_name(-code)})"
    elif not ending and code > 0 and not stderr:
        ending = f"(ended with exit status {code} and no error message)"
    return _join_lines(result.stdout.rstrip("\n"), stderr, ending) or NOTHING


def cell_report(result: CellResult, limits: Limits, seconds: float) -> str:
    """Returns the response's text for a cell of a session with a time limit of `seconds`."""
    ending = _ending(result.status, seconds, limits)
    if not result.session_alive:
        ending = _join_lines(ending, "(the interpreter ended: its variables are lost, the next call starts a new one)")
    images = f"({plural(len(result.images), 'image')} shown)" if result.images else ""
    error = tail(result.error.traceback) if result.error and result.status is RunStatus.FINISHED else ""
    parts = (result.stdout.rstrip("\n"), result.text or "", images, tail(result.stderr), error, ending)
    return _join_lines(*parts) or NOTHING


def tail(text: str, limit: int = MAX_STDERR_CHARS) -> str:
    """Truncates `text` to its last `limit` characters or fewer, from the start of a line, after a note."""
    text = text.rstrip()
    if len(text) <= limit:
        return text
    end = text[-limit:]
    _, newline, rest = end.partition("\n")
    return f"... (only the end)\n{rest if newline and rest else end}"


def _ending(status: RunStatus, seconds: float, limits: Limits) -> str:
    return {
        RunStatus.TIME_LIMIT: f"(timed out after {seconds:g} s)",
        RunStatus.MEMORY_LIMIT: f"(killed: it used more than {limits.memory_mb} MiB of memory)",
        RunStatus.KILLED: "(killed: it interfered with its sandbox)",
    }.get(status, "")


def _join_lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
