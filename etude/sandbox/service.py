"""The sandbox server's answers, without HTTP: validates a request, waits for a worker, runs it, limits the answer's size.

Invariant: at most `workers` requests run, and at most `max_concurrency` are in progress; a request that is not admitted, or
waits longer than `queue_seconds`, is rejected before any of it has run. An answer has at most `ANSWER_BYTES`, counted as the
JSON sent, plus a few thousand characters of each cell that no longer fits, and says which parts are omitted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from etude.errors import ConfigError, one_line
from etude.sandbox import fusion
from etude.sandbox.executor import SESSION_LIMITS, Executor
from etude.sandbox.languages import RECIPES
from etude.sandbox.types import (
    ContainerLostError,
    Isolation,
    Limits,
    RunStatus,
    SandboxError,
    SandboxRequestError,
    UnknownSessionError,
    check_paths,
)
from etude.timeouts import within

ANSWER_BYTES = 32 << 20
ATTEMPTS = 2
"""Maximum runs of a request: one whose container is killed from outside is retried once."""
_REQUESTS_PER_WORKER = 64
_KEPT_CHARS = 1000
_NOTE = "\n[the answer is full: the rest of what this cell printed and showed was left out]\n"


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


class ServerBusy(Exception):
    """The request was not admitted, and has not run."""


class SandboxService:
    """Implements the endpoints, without HTTP. Bound to one event loop."""

    def __init__(self, executor: Executor, options: ServerOptions) -> None:
        self.executor = executor
        self.options = options
        self.max_concurrency = options.max_concurrency or _REQUESTS_PER_WORKER * executor.workers
        self.running = 0
        self.waiting = 0
        self._free = asyncio.Semaphore(executor.workers)

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        """Waits for a free worker and holds it for the block.

        Raises:
            ServerBusy: too many requests are in progress, or the wait was too long.
        """
        if self.running + self.waiting >= self.max_concurrency:
            raise ServerBusy(f"{self.running + self.waiting} requests are in progress, which is the maximum")
        turn = asyncio.ensure_future(self._free.acquire())
        try:
            self.waiting += 1
            try:
                await asyncio.wait({turn}, timeout=self.options.queue_seconds)
            finally:
                self.waiting -= 1
            if not turn.done():
                raise ServerBusy(f"no worker was free within {self.options.queue_seconds:g} s")
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
        finally:
            if turn.done():
                self._free.release()
            else:
                turn.cancel()

    async def run_code(self, message: fusion.RunCodeRequest) -> fusion.RunCodeResponse:
        """Runs one program.

        Raises:
            SandboxRequestError: the request is invalid.
            ServerBusy: the request was not admitted, and has not run.
        """
        language = fusion.known_language(message.language)
        compile_seconds = message.compile_timeout if language and RECIPES[language].compile else 0.0
        limits = fusion.with_limits(self.options.limits, message.run_timeout, message.memory_limit_MB)
        if compile_seconds > self.options.max_compile_seconds:
            raise SandboxRequestError(
                f"compile_timeout: {message.compile_timeout:g} s is above this server's "
                f"{self.options.max_compile_seconds:g} s"
            )
        if language is None or language not in self.executor.languages:
            here = ", ".join(language.value for language in self.executor.languages)
            reason = f"'{message.language}' is not installed on this server (there is {here})"
            return fusion.RunCodeResponse(status=fusion.ResponseStatus.SandboxError, message=reason)
        request = fusion.run_request(message, language, limits)
        async with self.worker():
            seconds = ATTEMPTS * (message.run_timeout + compile_seconds) + self.options.grace_seconds
            try:
                result = await within(seconds, self.executor.run, request)
            except (SandboxError, TimeoutError) as error:
                reason = _reason(error, seconds)
                return fusion.RunCodeResponse(status=fusion.ResponseStatus.SandboxError, message=reason)
        # The texts are limited elsewhere, and count at their maximum length as JSON.
        room = ANSWER_BYTES - 6 * (len(result.stdout) + len(result.stderr))
        files, left_out = _fitting(result.files, room)
        return fusion.run_code_response(
            replace(result, files=files, refused_files={**result.refused_files, **left_out})
        )

    async def run_jupyter(self, message: fusion.RunJupyterRequest) -> fusion.RunJupyterResponse:
        """Runs cells in a fresh session; raises like `run_code`."""
        limits = fusion.with_limits(self.options.limits, message.total_timeout, message.memory_limit_MB)
        files = fusion.decode_files(message.files)
        check_paths("fetch_files", message.fetch_files)

        async def run() -> fusion.RunJupyterResponse:
            try:
                return await self._run_cells(message, limits, files)
            except ContainerLostError:  # presumably killed from outside; if it happens again, by the cells
                return await self._run_cells(message, limits, files, blamed=True)

        async with self.worker():
            seconds = ATTEMPTS * message.total_timeout + self.options.grace_seconds
            try:
                return await within(seconds, run)
            except (SandboxError, TimeoutError) as error:
                reason = _reason(error, seconds)
                return fusion.RunJupyterResponse(status=fusion.ResponseStatus.SandboxError, message=reason)

    async def _run_cells(
        self, message: fusion.RunJupyterRequest, limits: Limits, files: dict[str, bytes], blamed: bool = False
    ) -> fusion.RunJupyterResponse:
        """Runs the cells and returns the response, which is `Failed` if time runs out or the interpreter ends. If the
        interpreter ends, the cells caused it; a lost container is raised as an error unless they are `blamed`."""
        clock = asyncio.get_running_loop().time
        began = clock()
        session = await self.executor.session(limits=limits, files=files)
        answered: list[fusion.CellRunResult] = []
        room = ANSWER_BYTES
        fetched: dict[str, bytes] = {}
        late = ended = False
        try:
            for code in message.cells:
                left = message.total_timeout - (clock() - began)
                if left <= 0:
                    late = True
                    break
                result = await self.executor.run_cell(session, code, min(left, message.cell_timeout or left))
                cell, room = _fit(fusion.cell_run_result(result), room)
                answered.append(cell)
                late = late or result.status is RunStatus.TIME_LIMIT
                ended = not result.session_alive
                if ended:
                    break
            if message.fetch_files and not ended:
                fetched = await self.executor.fetch_files(session, message.fetch_files)
        except UnknownSessionError:
            ended = True
        except ContainerLostError:
            if not blamed:
                raise
            ended = True
        finally:
            await self.executor.close_session(session)
        kept, left_out = _fitting(fetched, room)
        cut_short = ended and not late
        reason = f"the interpreter ended in or after cell {len(answered)} of {len(message.cells)}"
        driver = fusion.CommandRunResult(
            status=fusion.CommandRunStatus.TimeLimitExceeded if late else fusion.CommandRunStatus.Finished,
            execution_time=clock() - began,
            return_code=None if late else int(cut_short),
            stdout="",
            stderr=reason if cut_short else "",
        )
        return fusion.RunJupyterResponse(
            status=fusion.ResponseStatus.Failed if late or cut_short else fusion.ResponseStatus.Success,
            message=fusion.refused_message(left_out),
            driver=driver,
            cells=answered,
            files=fusion.encode_files(kept),
        )

    async def open_session(self, message: fusion.SessionRequest) -> fusion.SessionResponse:
        """Opens a session that lives until it is closed or idle for too long; raises like `run_code`, and SandboxError."""
        limits = fusion.with_limits(self.options.limits, self.options.limits.wall_seconds, message.memory_limit_MB)
        limits = replace(limits, cpu_seconds=max(limits.cpu_seconds, SESSION_LIMITS.cpu_seconds))
        async with self.worker():
            session = await self.executor.session(limits=limits, files=fusion.decode_files(message.files))
        return fusion.SessionResponse(session_id=session)

    async def run_cell(self, session_id: str, message: fusion.CellRequest) -> fusion.CellResponse:
        """Runs a cell of a session; raises like `run_code`, and UnknownSessionError, SandboxError."""
        fusion.with_limits(self.options.limits, message.timeout, -1)
        async with self.worker():
            answer = fusion.cell_response(await self.executor.run_cell(session_id, message.code, message.timeout))
        return answer.model_copy(update={"cell": _fit(answer.cell, ANSWER_BYTES)[0]})

    def health(self) -> dict[str, Any]:
        """Returns the server's state."""
        return {
            "status": "ok",
            "isolation": self.executor.isolation.value,
            "languages": [language.value for language in self.executor.languages],
            "workers": self.executor.workers,
            "max_concurrency": self.max_concurrency,
            "running": self.running,
            "waiting": self.waiting,
        }


def _reason(error: BaseException, seconds: float) -> str:
    return one_line(error) if not isinstance(error, TimeoutError) else f"no result within {seconds:g} s"


def _fit(cell: fusion.CellRunResult, room: int) -> tuple[fusion.CellRunResult, int]:
    """Returns the cell if its JSON fits into `room` bytes, else a truncated one; and the bytes that are left."""
    size = len(cell.model_dump_json().encode())
    if size <= room:
        return cell, room - size
    texts = [str(bundle["text/plain"])[:_KEPT_CHARS] for bundle in cell.display if "text/plain" in bundle]
    errors = [
        {
            "ename": error["ename"],
            "evalue": error["evalue"][:_KEPT_CHARS],
            "traceback": "\n".join(error["traceback"])[-_KEPT_CHARS:].splitlines(),
        }
        for error in cell.error
    ]
    truncated = fusion.CellRunResult(
        stdout=cell.stdout[:_KEPT_CHARS],
        stderr=cell.stderr[:_KEPT_CHARS] + _NOTE,
        display=[{"text/plain": text} for text in texts],
        error=errors,
    )
    return truncated, room


def _fitting(files: Mapping[str, bytes], room: int) -> tuple[dict[str, bytes], dict[str, str]]:
    """Returns the files that fit into `room` bytes, and for each of the others why it is omitted."""
    kept, left_out = {}, {}
    for path, content in files.items():
        size = -(-len(content) // 3) * 4  # in base64
        if size > room:
            left_out[path] = f"{len(content)} bytes are more than this answer has room for"
        else:
            room -= size
            kept[path] = content
    return kept, left_out
