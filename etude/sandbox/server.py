"""`etude sandbox serve`: the executor behind Sandbox Fusion's HTTP API.

Invariant: an answer with status 200 is about the code, or says `SandboxError`; a request that was not run is answered
400 or 422 (invalid), 401 (no token), 413 (too large) or 429 (retry later). When a client disconnects, its run is cancelled.
Nothing that a client sends is evaluated, and requests are limited in size, time and number.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import BaseModel

from etude.errors import one_line
from etude.sandbox import wire
from etude.sandbox.executor import Executor
from etude.sandbox.service import SandboxService, ServerBusy, ServerOptions
from etude.sandbox.types import (
    RunStatus,
    SandboxError,
    SandboxRequestError,
    SessionClosedError,
    UnknownSessionError,
)
from etude.serving.metrics import RequestMetrics
from etude.serving.middleware import BearerToken, BodyLimit, unless_gone

_ABANDONED = 499
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def create_app(executor: Executor, options: ServerOptions) -> FastAPI:
    """Creates the application for `executor`, which it closes on shutdown."""

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


def _add_endpoints(app: FastAPI, service: SandboxService) -> None:
    outcomes = "success, failed, sandbox_error, busy, refused, abandoned"
    metrics, admission = RequestMetrics("etude_sandbox", outcomes, _BUCKETS), service.admission
    metrics.gauge("running", "Programs that run.", lambda: admission.running)
    metrics.gauge("waiting", "Requests that wait for a worker.", lambda: admission.waiting)

    async def answer(request: Request, endpoint: str, work: Coroutine[Any, Any, BaseModel]) -> Response:
        """Responds with the result of `work`, which is cancelled if the client disconnects; records metrics in any case."""
        began = asyncio.get_running_loop().time()
        outcome = "failed"
        try:
            result = await unless_gone(request, service.run_unless_cut(work))
            if result is None:
                outcome = "abandoned"
                return Response(status_code=_ABANDONED)
            outcome = _outcome(result)
            # Serialised here: FastAPI would validate the answer again and copy it several times.
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
            metrics.count(endpoint, outcome, asyncio.get_running_loop().time() - began)

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
        """Reports the location and the error, without the input, which may be large or not valid text."""
        assert isinstance(error, RequestValidationError)
        errors = [
            {"loc": [_ascii(str(part)) for part in item["loc"]], "msg": _ascii(item["msg"]), "type": item["type"]}
            for item in error.errors()[:20]
        ]
        return JSONResponse({"detail": errors}, status_code=422)

    app.add_exception_handler(ServerBusy, busy)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(SandboxRequestError, refused(400))
    app.add_exception_handler(UnknownSessionError, refused(404))
    app.add_exception_handler(SessionClosedError, refused(410))
    app.add_exception_handler(SandboxError, refused(503))


def _ascii(text: str) -> str:
    """Returns at most 1000 characters of text, with non-ASCII characters escaped."""
    return text.encode("ascii", "backslashreplace").decode("ascii")[:1000]
