"""`etude sandbox serve`: the executor as a server with Sandbox Fusion's HTTP API.

Invariant: an answer with status 200 is about the code, or says `SandboxError`; a request that was not run is answered
400 or 422 (invalid), 401 (no token), 413 (too large) or 429 (retry later). When a client disconnects, its run is cancelled.
Nothing that a client sends is evaluated, and requests are limited in size, time and number. When `serve` returns or raises,
no run, process or mount is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import BaseModel

from etude.errors import one_line
from etude.sandbox import fusion
from etude.sandbox.executor import Executor
from etude.sandbox.service import SandboxService, ServerBusy, ServerOptions
from etude.sandbox.types import RunStatus, SandboxError, SandboxRequestError, SessionClosedError, UnknownSessionError
from etude.serving.listening import limited_protocol, listen, raise_file_limit, server_config, url_of
from etude.serving.metrics import RequestMetrics
from etude.serving.middleware import BearerToken, BodyLimit, unless_gone

_ABANDONED = 499
_ERRORS: dict[type[Exception], tuple[int, str]] = {
    ServerBusy: (429, "busy"),
    SandboxRequestError: (400, "refused"),
    UnknownSessionError: (404, "refused"),
    SessionClosedError: (410, "sandbox_error"),
    SandboxError: (503, "sandbox_error"),
}
"""The status of the answer to each error, and its name in the metrics."""
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_MOST_CONNECTIONS = 4096
_OWN_FILES = 48  # descriptors of the server, and of connections that are accepted but not yet counted
_CONTAINER_FILES = 11  # descriptors of a container while it is forked
_ACCEPTED_AT_ONCE = 8
_BACKLOG = 1024
_ANSWER_SECONDS = 10
"""Seconds that clients have to read their answers after the grace period."""


class SandboxServer(uvicorn.Server):
    """Calls `ready` once it listens; on shutdown cancels the requests that are still in progress after `grace` seconds."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, grace: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._app, self._grace, self._ready = app, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # uvicorn's smaller `backlog` also limits how many are accepted at once
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        def cut_short() -> None:
            self._app.state.cut = True
            for task in self.server_state.tasks:
                task.cancel()

        timer = asyncio.get_running_loop().call_later(self._grace, cut_short)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


async def serve(
    options: ServerOptions,
    host: str = "127.0.0.1",
    port: int = 8080,
    grace: float = 30.0,
    ready: Callable[[str, Executor], None] | None = None,
    allow_hosts: Collection[str] = (),
) -> None:
    """Serves until SIGINT or SIGTERM; then no requests are admitted, and runs have `grace` seconds to finish before they are
    killed and answered 503.

    Connections never use up the file descriptors for containers: half of those left by the containers of `workers` runs are
    for connections, the other half for sessions. `ready` is called with the server's URL and executor once it listens; port
    0 picks a free port; `allow_hosts`: see `server_config`.

    Raises:
        ConfigError: the address cannot be bound.
        SandboxUnavailableError: no isolation works here.
    """
    with listen(host, port) as listener:
        async with await Executor.open(options.isolation, options.workers) as executor:
            app = create_app(executor, options)
            free = raise_file_limit() - _OWN_FILES - 2 * executor.workers * _CONTAINER_FILES
            config = server_config(
                app,
                host,
                allow_hosts,
                timeout_graceful_shutdown=round(grace) + _ANSWER_SECONDS,
                timeout_keep_alive=30,
                http=limited_protocol(max(8, min(_MOST_CONNECTIONS, free // 2))),
                backlog=_ACCEPTED_AT_ONCE,
                lifespan="on",
            )
            url = url_of(listener, host)
            server = SandboxServer(config, app, grace, lambda: ready(url, executor) if ready else None)
            await server.serve(sockets=[listener])


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
    app.state.cut = False
    app.add_middleware(BodyLimit, max_bytes=options.max_request_mb << 20)
    if options.token is not None:
        app.add_middleware(BearerToken, token=options.token)
    service = SandboxService(executor, options)
    outcomes = "success, failed, sandbox_error, busy, refused, abandoned"
    metrics = RequestMetrics("etude_sandbox", outcomes, _BUCKETS)
    metrics.gauge("running", "Programs that run.", lambda: service.running)
    metrics.gauge("waiting", "Requests that wait for a worker.", lambda: service.waiting)

    async def answer(request: Request, endpoint: str, work: Coroutine[Any, Any, BaseModel]) -> Response:
        """Responds with the result of `work`, which is cancelled if the client disconnects; records metrics in any case."""
        began = asyncio.get_running_loop().time()
        outcome = "failed"
        try:
            result = await unless_gone(request, work)
            if result is None:
                outcome = "abandoned"
                return Response(status_code=_ABANDONED)
            outcome = _outcome(result)
            # Serialised here: FastAPI would validate the answer again and copy it several times.
            return Response(result.model_dump_json().encode(), media_type="application/json")
        except asyncio.CancelledError:
            if not app.state.cut:
                raise
            outcome = "sandbox_error"
            raise SandboxError("the server was shut down before the run had ended") from None
        except tuple(_ERRORS) as error:
            _, outcome = _meaning(error)
            raise
        finally:
            metrics.count(endpoint, outcome, asyncio.get_running_loop().time() - began)

    @app.post("/run_code", response_model=fusion.RunCodeResponse, tags=["sandbox"])
    async def run_code(message: fusion.RunCodeRequest, request: Request) -> Any:
        return await answer(request, "run_code", service.run_code(message))

    @app.post("/run_jupyter", response_model=fusion.RunJupyterResponse, tags=["sandbox"])
    async def run_jupyter(message: fusion.RunJupyterRequest, request: Request) -> Any:
        return await answer(request, "run_jupyter", service.run_jupyter(message))

    @app.post("/v1/sessions", response_model=fusion.SessionResponse, tags=["sessions"])
    async def open_session(message: fusion.SessionRequest, request: Request) -> Any:
        return await answer(request, "sessions", service.open_session(message))

    @app.post("/v1/sessions/{session_id}/cells", response_model=fusion.CellResponse, tags=["sessions"])
    async def run_cell(session_id: str, message: fusion.CellRequest, request: Request) -> Any:
        return await answer(request, "cells", service.run_cell(session_id, message))

    @app.delete("/v1/sessions/{session_id}", status_code=204, tags=["sessions"])
    async def close_session(session_id: str) -> None:
        await executor.close_session(session_id)

    @app.get("/v1/ping", tags=["server"])
    async def ping() -> str:
        return "pong"

    @app.get("/health", tags=["server"])
    async def health() -> dict[str, Any]:
        return service.health()

    @app.get("/metrics", tags=["server"])
    async def scrape() -> Response:
        return metrics.page()

    @app.get("/", include_in_schema=False)
    async def index() -> RedirectResponse:
        return RedirectResponse("/docs")

    app.add_exception_handler(RequestValidationError, _invalid)
    for kind in _ERRORS:
        app.add_exception_handler(kind, _failed)
    return app


async def _invalid(_: Request, error: Exception) -> Response:
    """Reports the location and the error, without the input, which may be large or not valid text."""
    assert isinstance(error, RequestValidationError)
    errors = [
        {"loc": [_ascii(str(part)) for part in item["loc"]], "msg": _ascii(item["msg"]), "type": item["type"]}
        for item in error.errors()[:20]
    ]
    return JSONResponse({"detail": errors}, status_code=422)


async def _failed(_: Request, error: Exception) -> Response:
    status = _meaning(error)[0]
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse({"detail": _ascii(one_line(error))}, status_code=status, headers=headers)


def _meaning(error: Exception) -> tuple[int, str]:
    return next(meaning for kind, meaning in _ERRORS.items() if isinstance(error, kind))


def _outcome(result: BaseModel) -> str:
    status = getattr(result, "status", None)
    if status is fusion.ResponseStatus.SandboxError:
        return "sandbox_error"
    return "success" if status in (None, fusion.ResponseStatus.Success, RunStatus.FINISHED) else "failed"


def _ascii(text: str) -> str:
    """Returns at most 1000 characters of text, with non-ASCII characters escaped."""
    return text.encode("ascii", "backslashreplace").decode("ascii")[:1000]
