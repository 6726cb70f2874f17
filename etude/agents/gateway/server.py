"""The gateway's HTTP interface: OpenAI's chat completions under `/s/<session>/v1`, one session a trajectory.

Invariant: every error is answered in OpenAI's error format, in one line. A client that disconnects ends its request. The
size and read time of a body and the number of sessions and choices are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from etude.agents.gateway.answer import as_events, as_object
from etude.agents.gateway.errors import TOO_LONG, GatewayError, error_body
from etude.agents.gateway.session import GatewaySession
from etude.agents.gateway.store import SessionStore
from etude.agents.gateway.wire import ChatRequest, decode_body
from etude.bounded import settle
from etude.errors import one_line
from etude.sandbox.middleware import BearerToken, BodyLimit, unless_gone

logger = logging.getLogger(__name__)

_ABANDONED = 499
Export = Callable[[GatewaySession], Iterable[bytes]]


@dataclass(frozen=True)
class ServerOptions:
    """A server's limits. `token` authorises all requests; sessions with a secret require that instead."""

    model: str = "policy"
    token: str | None = None
    max_request_mb: int = 32


def create_app(
    store: SessionStore, tokenizer: Any, options: ServerOptions | None = None, export: Export | None = None
) -> FastAPI:
    """The server of `store`, whose sessions end with it; `export` returns a session's rollout as JSON lines."""
    options = options or ServerOptions()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = [asyncio.ensure_future(store.end_idle())] if store.idle_seconds is not None else []
        yield
        await settle(sweeping)
        store.end_all()

    app = FastAPI(
        title="Étude gateway",
        description="OpenAI's chat completions over a policy, recorded token by token.",
        lifespan=lifespan,
    )
    app.add_middleware(BodyLimit, max_bytes=options.max_request_mb << 20, error_body=error_body)
    if options.token is not None:
        app.add_middleware(BearerToken, token=options.token, error_body=error_body)
    _add_chat(app, store, tokenizer)
    _add_models(app, options.model)
    _add_sessions(app, store, export)
    _add_errors(app)
    return app


def _add_chat(app: FastAPI, store: SessionStore, tokenizer: Any) -> None:
    async def answered(session: GatewaySession, chat: ChatRequest, request: Request) -> Response:
        completion = await unless_gone(request, session.complete(chat))
        if completion is None:
            return Response(status_code=_ABANDONED)
        if chat.stream:
            return Response(as_events(completion, tokenizer), media_type="text/event-stream")
        return Response(json.dumps(as_object(completion, tokenizer)), media_type="application/json")

    def read(session: GatewaySession, body: bytes, *, is_new: bool) -> ChatRequest:
        try:
            return session.read(body)
        except GatewayError as error:
            session.declined = error
            if is_new and error.code != TOO_LONG:
                store.remove(session.name)
            raise

    @app.post("/s/{session}/v1/chat/completions")
    async def complete(session: str, request: Request) -> Response:
        """One turn of a session, which begins with its first valid request."""
        key = _key(request)
        if not store.makes(session):
            store.get(session, key)  # raises if there is none, before the body is read
        body = await request.body()
        is_new, found = store.makes(session), store.get_or_make(session, key)
        chat = read(found, body, is_new=is_new)
        try:
            return await answered(found, chat, request)
        except GatewayError as error:
            found.declined = error
            raise

    @app.post("/v1/chat/completions")
    async def complete_alone(request: Request) -> Response:
        """One turn, in its own session."""
        name = f"single-{uuid4().hex}"
        if not store.makes(name):
            store.get(name, "")  # raises if there is none, before the body is read
        body = await request.body()
        session = store.get_or_make(name, "")
        try:
            return await answered(session, read(session, body, is_new=True), request)
        finally:
            store.end(session)


def _add_models(app: FastAPI, name: str) -> None:
    model = {"id": name, "object": "model", "created": 0, "owned_by": "etude"}

    @app.get("/v1/models")
    @app.get("/s/{session}/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_name:path}")
    @app.get("/s/{session}/v1/models/{model_name:path}")
    async def model_of(model_name: str) -> dict[str, Any]:
        """The one model, under any name that an agent asks for."""
        return model | {"id": model_name}


def _add_sessions(app: FastAPI, store: SessionStore, export: Export | None) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the server is up, and its number of sessions."""
        return {"status": "ok", "sessions": len(store), "max_sessions": store.max_sessions}

    @app.post("/s/{session}/reward")
    async def reward(session: str, request: Request) -> dict[str, Any]:
        """A step reward for the session's last turn."""
        found = store.get(session, _key(request))
        found.reward(decode_body(await request.body()))
        return {"rewards": len(found.recording.rewards)}

    if export is None:
        return

    def lines(session: GatewaySession) -> Response:
        return Response(b"".join(export(session)), media_type="application/x-ndjson")

    @app.get("/s/{session}/rollout")
    async def rollout(session: str, request: Request) -> Response:
        """The recording so far, as lines of a rollout dump."""
        return lines(store.get(session, _key(request)))

    @app.post("/s/{session}/end")
    async def end(session: str, request: Request) -> Response:
        """Ends the session and returns its recording."""
        found = store.get(session, _key(request))
        store.end(found)
        return lines(found)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(GatewayError)
    async def refused(_: Request, error: GatewayError) -> Response:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    @app.exception_handler(404)
    @app.exception_handler(405)
    async def no_such_thing(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return JSONResponse(error_body(error.status_code, message), status_code=error.status_code)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        logger.error("a request of the gateway failed", exc_info=error)
        failure = GatewayError(500, f"{type(error).__name__}: {one_line(error)}")
        return JSONResponse(failure.body(), status_code=500, headers=failure.headers)


def _key(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")
