"""`etude sandbox serve`: the executor behind Sandbox Fusion's HTTP interface.

Invariant: an answer with status 200 is about the code, or says `SandboxError`; a request that was not run is answered
400 or 422 (invalid), 401 (no token), 413 (too large) or 429 (retry later). A client that hangs up ends its
run. Nothing a client sends is evaluated, and its size, its time and its place in the queue are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from etude.bounded import within
from etude.errors import ConfigError, one_line
from etude.sandbox import wire
from etude.sandbox.admission import Admission, ServerBusy
from etude.sandbox.budget import AnswerBudget
from etude.sandbox.executor import SESSION_LIMITS, Executor
from etude.sandbox.languages import RECIPES
from etude.sandbox.middleware import BearerToken, BodyLimit, unless_gone
from etude.sandbox.types import (
    BoxLostError,
    Isolation,
    Limits,
    RunStatus,
    SandboxError,
    SandboxRequestError,
    SessionClosedError,
    UnknownSessionError,
    checked_paths,
)

R = TypeVar("R")

_ABANDONED = 499
_REQUESTS_PER_WORKER = 64
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ATTEMPTS = 2
"""A request whose box is killed from outside runs once more."""


@dataclass(frozen=True)
class ServerOptions:
    """The limits of a server.

    Raises:
        ConfigError: a number is not positive.
    """

    workers: int | None = None
    """Concurrent programs; None for one per CPU."""
    max_concurrency: int | None = None
    """Concurrent requests, waiting ones included; None for 64 per worker. Beyond it the answer is 429."""
    queue_seconds: float = 60.0
    """How long a request waits for a worker before it is answered 429."""
    token: str | None = None
    """Bearer token that requests must have; None for none."""
    max_request_mb: int = 32
    limits: Limits = field(default_factory=lambda: Limits(wall_seconds=600.0, cpu_seconds=600.0))
    """Maximum of a request's limits, and default of those it does not set (memory, processes, files)."""
    max_compile_seconds: float = 120.0
    """The longest `compile_timeout` of a request in a compiled language."""
    grace_seconds: float = 10.0
    """Beyond a request's own time limits, for the sandbox's work; then the request is answered `SandboxError`."""
    isolation: Isolation = Isolation.AUTO

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not value > 0:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, not {value}")
        if self.token is not None and not self.token:
            raise ConfigError("the token is empty; omit it for a server without one")


class SandboxService:
    """The endpoints' logic, without HTTP."""

    def __init__(self, executor: Executor, options: ServerOptions) -> None:
        self.executor = executor
        self.options = options
        most = options.max_concurrency or _REQUESTS_PER_WORKER * executor.workers
        self.admission = Admission(executor.workers, most, options.queue_seconds)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._cut = False

    async def until_cut(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of `work`.

        Raises:
            SandboxError: the server ended first.
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
        """Ends all active requests."""
        self._cut = True
        for task in self._under_way:
            task.cancel()

    async def run_code(self, message: wire.RunCodeRequest) -> wire.RunCodeResponse:
        """One program.

        Raises:
            SandboxRequestError: the request is invalid.
            ServerBusy: it was not run.
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
        """Cells in a fresh session: raises like `run_code`."""
        limits = wire.with_limits(self.options.limits, message.total_timeout, message.memory_limit_MB)
        files = wire.decoded_files(message.files)
        checked_paths("fetch_files", message.fetch_files)
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
        except BoxLostError:  # presumably from outside; by the cells, if it happens again
            return await self._cells(message, limits, files, blamed=True)

    async def _cells(
        self, message: wire.RunJupyterRequest, limits: Limits, files: dict[str, bytes], blamed: bool = False
    ) -> wire.RunJupyterResponse:
        """The cells' answer; they caused the end of an interpreter, but the loss of a box only if they are `blamed`."""
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
        """A session that lives until it is closed or idle for too long: raises like `run_code`, and SandboxError."""
        limits = wire.with_limits(self.options.limits, self.options.limits.wall_seconds, message.memory_limit_MB)
        limits = replace(limits, cpu_seconds=max(limits.cpu_seconds, SESSION_LIMITS.cpu_seconds))
        async with self.admission.slot():
            return wire.SessionResponse(
                session_id=await self.executor.session(limits=limits, files=wire.decoded_files(message.files))
            )

    async def run_cell(self, session_id: str, message: wire.CellRequest) -> wire.CellResponse:
        """One cell of a session: raises like `run_code`, and UnknownSessionError, SandboxError."""
        wire.with_limits(self.options.limits, message.timeout, -1)
        async with self.admission.slot():
            answer = wire.cell_response(await self.executor.run_cell(session_id, message.code, message.timeout))
            return answer.model_copy(update={"cell": AnswerBudget().admit_cell(answer.cell)})

    def health(self) -> dict[str, Any]:
        """The server's state."""
        return {
            "status": "draining" if self.admission.draining else "ok",
            "isolation": self.executor.isolation.value,
            "languages": [language.value for language in self.executor.languages],
            "workers": self.executor.workers,
            "max_concurrency": self.admission.max_concurrency,
            "running": self.admission.running,
            "waiting": self.admission.waiting,
        }


def create_app(executor: Executor, options: ServerOptions) -> FastAPI:
    """The application for `executor`, which it closes on shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await executor.close()

    app = FastAPI(
        title="Étude sandbox",
        description="Runs model-written code in isolation. Compatible with Sandbox Fusion's /run_code and /run_jupyter.",
        lifespan=lifespan,
    )
    app.state.service = service = SandboxService(executor, options)
    app.add_middleware(BodyLimit, max_bytes=options.max_request_mb << 20)
    if options.token is not None:
        app.add_middleware(BearerToken, token=options.token)
    _add_endpoints(app, service)
    _add_errors(app)
    return app


class _Metrics:
    """A server's counters, in Prometheus format: every request ends in exactly one `etude_sandbox_requests_total`."""

    def __init__(self, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        help_text = "Requests by endpoint and outcome (success, failed, sandbox_error, busy, refused, abandoned)."
        self.requests = Counter("etude_sandbox_requests", help_text, ["endpoint", "outcome"], registry=self._registry)
        self.seconds = Histogram(
            "etude_sandbox_request_seconds",
            "Seconds from admission to the answer, by endpoint.",
            ["endpoint"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        running = Gauge("etude_sandbox_running", "Programs that run.", registry=self._registry)
        running.set_function(lambda: admission.running)
        waiting = Gauge("etude_sandbox_waiting", "Requests that wait for a worker.", registry=self._registry)
        waiting.set_function(lambda: admission.waiting)

    def page(self) -> Response:
        """For a scrape."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


def _add_endpoints(app: FastAPI, service: SandboxService) -> None:
    metrics = _Metrics(service.admission)

    async def answer(request: Request, endpoint: str, work: Coroutine[Any, Any, BaseModel]) -> Response:
        """The result of `work`, which is cancelled when the client hangs up; counts it either way."""
        began = asyncio.get_running_loop().time()
        outcome = "failed"
        try:
            result = await unless_gone(request, service.until_cut(work))
            if result is None:
                outcome = "abandoned"
                return Response(status_code=_ABANDONED)
            outcome = _outcome(result)
            # FastAPI would validate the answer again and copy it several times
            return Response(result.model_dump_json().encode(), media_type="application/json")
        except ServerBusy:
            outcome = "busy"
            raise
        except (SandboxRequestError, UnknownSessionError):
            outcome = "refused"
            raise
        except SandboxError:
            outcome = "sandbox_error"
            raise
        finally:
            metrics.requests.labels(endpoint, outcome).inc()
            metrics.seconds.labels(endpoint).observe(asyncio.get_running_loop().time() - began)

    @app.post("/run_code", response_model=wire.RunCodeResponse, tags=["sandbox"])
    async def run_code(message: wire.RunCodeRequest, request: Request) -> Any:
        return await answer(request, "run_code", service.run_code(message))

    @app.post("/run_jupyter", response_model=wire.RunJupyterResponse, tags=["sandbox"])
    async def run_jupyter(message: wire.RunJupyterRequest, request: Request) -> Any:
        return await answer(request, "run_jupyter", service.run_jupyter(message))

    @app.post("/v1/sessions", response_model=wire.SessionResponse, tags=["sessions"])
    async def open_session(message: wire.SessionRequest, request: Request) -> Any:
        return await answer(request, "sessions", service.open_session(message))

    @app.post("/v1/sessions/{session_id}/cells", response_model=wire.CellResponse, tags=["sessions"])
    async def run_cell(session_id: str, message: wire.CellRequest, request: Request) -> Any:
        return await answer(request, "cells", service.run_cell(session_id, message))

    @app.delete("/v1/sessions/{session_id}", status_code=204, tags=["sessions"])
    async def close_session(session_id: str) -> None:
        await service.executor.close_session(session_id)

    @app.get("/v1/ping", tags=["server"])
    async def ping() -> str:
        return "pong"

    @app.get("/health", tags=["server"])
    async def health() -> JSONResponse:
        return JSONResponse(service.health(), status_code=503 if service.admission.draining else 200)

    @app.get("/metrics", tags=["server"])
    async def scrape() -> Response:
        return metrics.page()

    @app.get("/", include_in_schema=False)
    async def index() -> RedirectResponse:
        return RedirectResponse("/docs")


def _outcome(result: BaseModel) -> str:
    status = getattr(result, "status", None)
    if status is wire.ResponseStatus.SandboxError:
        return "sandbox_error"
    return "success" if status in (None, wire.ResponseStatus.Success, RunStatus.FINISHED) else "failed"


def _reason(error: BaseException, seconds: float) -> str:
    return one_line(error) if not isinstance(error, TimeoutError) else f"no result within {seconds:g} s"


def _add_errors(app: FastAPI) -> None:
    def refused(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(_: Request, error: Exception) -> Response:
            return JSONResponse({"detail": _ascii(one_line(error))}, status_code=status)

        return answer

    async def busy(_: Request, error: Exception) -> Response:
        assert isinstance(error, ServerBusy)
        headers = {"Retry-After": str(error.retry_after)}
        return JSONResponse({"detail": str(error)}, status_code=429, headers=headers)

    async def invalid(_: Request, error: Exception) -> Response:
        """Says where and what, but does not echo the input: it may be large, or not valid text."""
        assert isinstance(error, RequestValidationError)
        found = [
            {"loc": [_ascii(str(part)) for part in item["loc"]], "msg": _ascii(item["msg"]), "type": item["type"]}
            for item in error.errors()[:20]
        ]
        return JSONResponse({"detail": found}, status_code=422)

    app.add_exception_handler(ServerBusy, busy)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(SandboxRequestError, refused(400))
    app.add_exception_handler(UnknownSessionError, refused(404))
    app.add_exception_handler(SessionClosedError, refused(410))
    app.add_exception_handler(SandboxError, refused(503))


def _ascii(text: str) -> str:
    """Text that is encodable, whatever it quotes."""
    return text.encode("ascii", "backslashreplace").decode("ascii")[:1000]
