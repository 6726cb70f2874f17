"""The sandbox server's logic without HTTP: validates a request, queues it, runs it, and limits the size of the answer.

Invariant: at most `workers` requests run and at most `max_concurrency` are admitted; a request that is not admitted, or
waits longer than `queue_seconds`, is rejected with a retry time before any of it has run. An answer has at most
`ANSWER_BYTES`, counted as the JSON sent, plus a few thousand characters of each cell that no longer fits; it says which
parts are omitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from etude.bounded import within
from etude.errors import ConfigError, one_line
from etude.limits import ConcurrencyLimit
from etude.sandbox import wire
from etude.sandbox.executor import SESSION_LIMITS, Executor
from etude.sandbox.languages import RECIPES
from etude.sandbox.types import (
    BoxLostError,
    Isolation,
    Limits,
    RunStatus,
    SandboxError,
    SandboxRequestError,
    UnknownSessionError,
    check_paths,
)

R = TypeVar("R")

_REQUESTS_PER_WORKER = 64
ANSWER_BYTES = 32 << 20
_KEPT_CHARS = 1000
_NOTE = "\n[the answer is full: the rest of what this cell printed and showed was left out]\n"
ATTEMPTS = 2
"""Maximum runs of a request: one whose box is killed from outside is retried once."""


@dataclass(frozen=True)
class ServerOptions:
    """The limits of a server.

    Raises:
        ConfigError: a number is not positive.
    """

    workers: int | None = None
    """Concurrent programs; None for one per CPU."""
    max_concurrency: int | None = None
    """Concurrent requests, including waiting ones; None for 64 per worker. Further ones are answered 429."""
    queue_seconds: float = 60.0
    """Seconds that a request waits for a worker before it is answered 429."""
    token: str | None = None
    """Bearer token that requests must have; None: no authentication."""
    max_request_mb: int = 32
    limits: Limits = field(default_factory=lambda: Limits(wall_seconds=600.0, cpu_seconds=600.0))
    """Maximum for a request's limits, and default for those that it does not set (memory, processes, files)."""
    max_compile_seconds: float = 120.0
    """Maximum `compile_timeout` of a request in a compiled language."""
    grace_seconds: float = 10.0
    """Seconds that the sandbox may take beyond a request's own time limits before the answer is `SandboxError`."""
    isolation: Isolation = Isolation.AUTO

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not value > 0:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, not {value}")
        if self.token is not None and not self.token:
            raise ConfigError("the token is empty; omit it for a server without one")


class SandboxService:
    """Implements the endpoints, without HTTP."""

    def __init__(self, executor: Executor, options: ServerOptions) -> None:
        self.executor = executor
        self.options = options
        most = options.max_concurrency or _REQUESTS_PER_WORKER * executor.workers
        self.admission = Admission(executor.workers, most, options.queue_seconds)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._cut = False

    async def run_unless_cut(self, work: Coroutine[Any, Any, R]) -> R:
        """Awaits `work`, which `cut_short` cancels.

        Raises:
            SandboxError: the server was shut down first.
        """
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._cut:
                raise SandboxError("the server was shut down before the run had ended") from None
            raise
        finally:
            self._under_way.discard(task)

    def cut_short(self) -> None:
        """Cancels all active requests."""
        self._cut = True
        for task in self._under_way:
            task.cancel()

    async def run_code(self, message: wire.RunCodeRequest) -> wire.RunCodeResponse:
        """Runs one program.

        Raises:
            SandboxRequestError: the request is invalid.
            ServerBusy: the request was not admitted, and has not run.
        """
        language = wire.known_language(message.language)
        compile_seconds = message.compile_timeout if language and RECIPES[language].compile else 0.0
        limits = wire.with_limits(self.options.limits, message.run_timeout, message.memory_limit_MB)
        if compile_seconds > self.options.max_compile_seconds:
            raise SandboxRequestError(
                f"compile_timeout: {message.compile_timeout:g} s is above this server's "
                f"{self.options.max_compile_seconds:g} s"
            )
        if language is None or language not in self.executor.languages:
            here = ", ".join(language.value for language in self.executor.languages)
            reason = f"'{message.language}' is not installed on this server (there is {here})"
            return wire.RunCodeResponse(status=wire.ResponseStatus.SandboxError, message=reason)
        request = wire.run_request(message, language, limits)
        async with self.admission.slot():
            seconds = ATTEMPTS * (message.run_timeout + compile_seconds) + self.options.grace_seconds
            try:
                result = await within(seconds, self.executor.run, request)
            except (SandboxError, TimeoutError) as error:
                return wire.RunCodeResponse(status=wire.ResponseStatus.SandboxError, message=_reason(error, seconds))
        budget = AnswerBudget()
        budget.admit_text(result.stdout, result.stderr)
        files, left_out = budget.admit_files(result.files)
        refused = {**result.refused_files, **left_out}
        return wire.run_code_response(replace(result, files=files, refused_files=refused))

    async def run_jupyter(self, message: wire.RunJupyterRequest) -> wire.RunJupyterResponse:
        """Runs cells in a fresh session; raises like `run_code`."""
        limits = wire.with_limits(self.options.limits, message.total_timeout, message.memory_limit_MB)
        files = wire.decode_files(message.files)
        check_paths("fetch_files", message.fetch_files)
        async with self.admission.slot():
            seconds = ATTEMPTS * message.total_timeout + self.options.grace_seconds
            try:
                return await within(seconds, self._notebook, message, limits, files)
            except (SandboxError, TimeoutError) as error:
                return wire.RunJupyterResponse(status=wire.ResponseStatus.SandboxError, message=_reason(error, seconds))

    async def _notebook(
        self, message: wire.RunJupyterRequest, limits: Limits, files: dict[str, bytes]
    ) -> wire.RunJupyterResponse:
        try:
            return await self._cells(message, limits, files)
        except BoxLostError:  # presumably killed from outside; if it happens again, by the cells
            return await self._cells(message, limits, files, blamed=True)

    async def _cells(
        self, message: wire.RunJupyterRequest, limits: Limits, files: dict[str, bytes], blamed: bool = False
    ) -> wire.RunJupyterResponse:
        """Runs the cells and returns the response. If the interpreter ends, the cells caused it; a lost box is raised as
        an error unless they are `blamed` for it."""
        clock = asyncio.get_running_loop().time
        began = clock()
        session = await self.executor.session(limits=limits, files=files)
        answered: list[wire.CellRunResult] = []
        budget = AnswerBudget()
        fetched: dict[str, bytes] = {}
        late = ended = False
        try:
            for code in message.cells:
                left = message.total_timeout - (clock() - began)
                if left <= 0:
                    late = True
                    break
                timeout = min(left, message.cell_timeout or left)
                result = await self.executor.run_cell(session, code, timeout)
                answered.append(budget.admit_cell(wire.cell_run_result(result)))
                late = late or result.status is RunStatus.TIME_LIMIT
                ended = not result.session_alive
                if ended:
                    break
            if message.fetch_files and not ended:
                fetched = await self.executor.fetch_files(session, message.fetch_files)
        except UnknownSessionError:
            ended = True
        except BoxLostError:
            if not blamed:
                raise
            ended = True
        finally:
            await self.executor.close_session(session)
        files, left_out = budget.admit_files(fetched)
        seconds = clock() - began
        return wire.jupyter_response(answered, len(message.cells), late, ended, seconds, files, left_out)

    async def open_session(self, message: wire.SessionRequest) -> wire.SessionResponse:
        """Opens a session that lives until it is closed or idle for too long; raises like `run_code`, and SandboxError."""
        limits = wire.with_limits(self.options.limits, self.options.limits.wall_seconds, message.memory_limit_MB)
        limits = replace(limits, cpu_seconds=max(limits.cpu_seconds, SESSION_LIMITS.cpu_seconds))
        async with self.admission.slot():
            return wire.SessionResponse(
                session_id=await self.executor.session(limits=limits, files=wire.decode_files(message.files))
            )

    async def run_cell(self, session_id: str, message: wire.CellRequest) -> wire.CellResponse:
        """Runs a cell of a session; raises like `run_code`, and UnknownSessionError, SandboxError."""
        wire.with_limits(self.options.limits, message.timeout, -1)
        async with self.admission.slot():
            answer = wire.cell_response(await self.executor.run_cell(session_id, message.code, message.timeout))
            return answer.model_copy(update={"cell": AnswerBudget().admit_cell(answer.cell)})

    def health(self) -> dict[str, Any]:
        """Returns the server's state."""
        return {
            "status": "draining" if self.admission.draining else "ok",
            "isolation": self.executor.isolation.value,
            "languages": [language.value for language in self.executor.languages],
            "workers": self.executor.workers,
            "max_concurrency": self.admission.max_concurrency,
            "running": self.admission.running,
            "waiting": self.admission.waiting,
        }


def _reason(error: BaseException, seconds: float) -> str:
    return one_line(error) if not isinstance(error, TimeoutError) else f"no result within {seconds:g} s"


class ServerBusy(Exception):
    """The request was not admitted; retry after `retry_after` seconds."""

    def __init__(self, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class Admission:
    """Admission control with a bounded queue: limits running and waiting requests. Bound to one event loop."""

    def __init__(self, workers: int, max_concurrency: int, queue_seconds: float) -> None:
        self.max_concurrency = max_concurrency
        self.inside = 0
        self.draining = False
        self._workers = workers
        self._queue_seconds = queue_seconds
        self._running = ConcurrencyLimit(workers)
        self._seconds = 0.05  # moving average of a request's duration

    @property
    def running(self) -> int:
        """Number of running requests."""
        return self._running.held

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return self._running.waiting

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for a free worker and holds it for the block.

        Raises:
            ServerBusy: the queue is full, the wait was too long, or the server is shutting down.
        """
        if self.draining:
            raise ServerBusy("the server is shutting down", 5)
        if self.inside >= self.max_concurrency:
            raise ServerBusy(f"{self.inside} requests are in progress, which is the maximum", self._retry_after())
        self.inside += 1
        try:
            try:
                permit = await self._running.acquire(self._queue_seconds)
            except TimeoutError:
                reason = f"no worker was free within {self._queue_seconds:g} s"
                raise ServerBusy(reason, self._retry_after()) from None
            with permit:
                began = asyncio.get_running_loop().time()
                try:
                    yield
                finally:
                    took = asyncio.get_running_loop().time() - began
                    self._seconds += 0.1 * (took - self._seconds)
        finally:
            self.inside -= 1

    def _retry_after(self) -> int:
        """Returns the estimated seconds until half of the admitted requests are done, from 1 to 60."""
        return min(60, max(1, math.ceil(self._seconds * self.inside / self._workers / 2)))


class AnswerBudget:
    """The remaining bytes of one answer."""

    def __init__(self) -> None:
        self._left = ANSWER_BYTES

    def admit_cell(self, cell: wire.CellRunResult) -> wire.CellRunResult:
        """Returns the cell if it fits, else a truncated one."""
        size = len(cell.model_dump_json().encode())
        if size > self._left:
            return _shorten(cell)
        self._left -= size
        return cell

    def admit_text(self, *texts: str) -> None:
        """Counts texts that are limited elsewhere, at their maximum length as JSON (6 bytes per character)."""
        self._left -= 6 * sum(map(len, texts))

    def admit_files(self, files: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, str]]:
        """Returns the files that fit, and for each of the others why it is omitted."""
        kept, left_out = {}, {}
        for path, content in files.items():
            size = -(-len(content) // 3) * 4  # in base64
            if size > self._left:
                left_out[path] = f"{len(content)} bytes are more than this answer has room for"
            else:
                self._left -= size
                kept[path] = content
        return kept, left_out


def _shorten(cell: wire.CellRunResult) -> wire.CellRunResult:
    texts = [str(bundle["text/plain"])[:_KEPT_CHARS] for bundle in cell.display if "text/plain" in bundle]
    return wire.CellRunResult(
        stdout=cell.stdout[:_KEPT_CHARS],
        stderr=cell.stderr[:_KEPT_CHARS] + _NOTE,
        display=[{"text/plain": text} for text in texts],
        error=[_shorten_error(error) for error in cell.error],
    )


def _shorten_error(error: Mapping[str, Any]) -> dict[str, Any]:
    trace = "\n".join(error["traceback"])[-_KEPT_CHARS:].splitlines()
    return {"ename": error["ename"], "evalue": error["evalue"][:_KEPT_CHARS], "traceback": trace}
