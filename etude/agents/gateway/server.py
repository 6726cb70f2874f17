"""The gateway's HTTP server: serves the policy at `/s/<session>/v1`, one session per trajectory, in any of `DIALECTS`.

Invariant: every error is one line in the dialect's error format. A disconnect cancels the client's request, also while a
stream is kept alive. The size and read time of a body and the number of sessions and choices are bounded. A streamed turn
arrives whole, in the events of its API, because training reads and records a turn once it is complete; a request that fails
within `KEEP_ALIVE_SECONDS` gets an ordinary error response.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from etude.agents.gateway.chat_api import CHAT, Dialect
from etude.agents.gateway.messages_api import MESSAGES
from etude.agents.gateway.request import TOO_LONG, ChatRequest, GatewayError, decode_body, error_body
from etude.agents.gateway.responses_api import RESPONSES, conversation, response_id
from etude.agents.gateway.session import GatewaySession
from etude.errors import one_line
from etude.serving.middleware import BearerToken, BodyLimit, hung_up
from etude.timeouts import settle

logger = logging.getLogger(__name__)

DIALECTS = (CHAT, RESPONSES, MESSAGES)
KEEP_ALIVE_SECONDS = 10.0
"""A streamed turn that takes longer begins before it is known whether it fails, and sends a comment this often."""
_CLIENT_CLOSED_REQUEST = 499
Export = Callable[[GatewaySession], Iterable[bytes]]


def create_app(
    store: SessionStore,
    tokenizer: Any,
    export: Export | None = None,
    *,
    model: str = "policy",
    token: str | None = None,
    max_request_mb: int = 32,
) -> FastAPI:
    """Creates the server of `store`, whose sessions end when it shuts down; `export` returns a rollout as JSON lines.

    `token` authorises all requests; a session that has a secret requires that as its API key.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = [asyncio.ensure_future(store.end_idle())] if store.idle_seconds is not None else []
        yield
        await settle(sweeping)
        store.end_all()

    app = FastAPI(
        title="Étude gateway",
        description="A policy behind the interfaces of OpenAI and Anthropic, recorded token by token.",
        lifespan=lifespan,
    )
    app.add_middleware(BodyLimit, max_bytes=max_request_mb << 20, error_body=error_body)
    if token is not None:
        app.add_middleware(BearerToken, token=token, error_body=error_body)
    for dialect in DIALECTS:
        _add_turns(app, dialect, store, tokenizer)
    _add_models(app, model)
    _add_sessions(app, store, export)
    _add_errors(app)
    return app


def _add_turns(app: FastAPI, dialect: Dialect, store: SessionStore, tokenizer: Any) -> None:
    async def respond(session: GatewaySession, chat: ChatRequest, role: str) -> bytes:
        """Returns the response's body: one object or, with `stream`, all its events."""
        completion = await session.complete(chat, role)
        if dialect is RESPONSES and chat.store is not False:
            session.keep_reply(response_id(completion), conversation(completion))
        if not chat.stream:
            return json.dumps(dialect.answer(completion, tokenizer)).encode()
        return "".join([*map(_event_text, dialect.events(completion, tokenizer)), dialect.last]).encode()

    async def take_turn(request: Request, name: str, key: str, *, alone: bool = False) -> Response:
        """Answers a request to the session `name`, which ends afterwards if the request is `alone` in it."""
        if not store.makes(name):
            store.get(name, key)  # raises before the body is read if there is no such session
        body = await request.body()
        is_new, session, role = store.makes(name), store.get_or_make(name, key), request.headers.get(ROLE_HEADER, "")
        tasks: set[asyncio.Task[Any]] = set()
        chat: ChatRequest | None = None
        kept_alive: Response | None = None
        try:
            chat = session.read(body, dialect, role)
            work, gone = asyncio.ensure_future(respond(session, chat, role)), asyncio.ensure_future(hung_up(request))
            tasks = {work, gone}
            patience = KEEP_ALIVE_SECONDS if chat.stream else None
            done, _ = await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                return Response(work.result(), media_type="text/event-stream" if chat.stream else "application/json")
            if gone in done:
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
            kept_alive = _KeptAlive(dialect, session, work, gone, store.end if alone else lambda _: None)
            return kept_alive
        except GatewayError as error:
            session.declined = error
            if chat is None and is_new and error.code != TOO_LONG:
                store.remove(name)
            raise
        finally:
            if kept_alive is None:
                if alone:
                    store.end(session)
                await settle(tasks)

    @app.post(f"/s/{{session}}/v1/{dialect.path}")
    async def complete(session: str, request: Request) -> Response:
        """One turn of a session, which begins with its first valid request."""
        return await take_turn(request, session, _key(request))

    @app.post(f"/v1/{dialect.path}")
    async def complete_alone(request: Request) -> Response:
        """One turn, of the session that the header X-Session-ID names, or else in its own."""
        if named := request.headers.get(SESSION_HEADER):
            return await take_turn(request, named, _key(request))
        return await take_turn(request, f"single-{uuid4().hex}", "", alone=True)


def _event_text(event: tuple[str | None, Any]) -> str:
    name, data = event
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


class _KeptAlive(Response):
    """Streams a turn that takes long: comments that keep the connection alive, then all its events at once; `on_end` is
    called with the session when it ends, also after errors."""

    media_type = "text/event-stream"

    def __init__(
        self,
        dialect: Dialect,
        session: GatewaySession,
        work: asyncio.Task[bytes],
        gone: asyncio.Task[None],
        on_end: Callable[[GatewaySession], None],
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._dialect, self._session, self._work, self._gone, self._on_end = dialect, session, work, gone, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            done: set[asyncio.Task[Any]] = set()
            while not done:
                await send(
                    {"type": "http.response.body", "body": b": the turn is being sampled\n\n", "more_body": True}
                )
                done, _ = await asyncio.wait(
                    {self._work, self._gone}, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            if self._work.done():
                await send({"type": "http.response.body", "body": self._events()})
        except OSError:  # the client disconnected
            pass
        finally:
            await settle({self._work, self._gone})
            self._on_end(self._session)

    def _events(self) -> bytes:
        try:
            return self._work.result()
        except GatewayError as error:
            self._session.declined = error
            return (_event_text(self._dialect.error_event(error)) + self._dialect.last).encode()


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
        """A step reward for the session's last turn, or a role's; one for all requests with the same `Idempotency-Key`."""
        found = store.get(session, _key(request))
        found.reward(decode_body(await request.body()), request.headers.get("Idempotency-Key"))
        return {"rewards": len(found.tree.rewards)}

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
    async def refused(request: Request, error: GatewayError) -> Response:
        return JSONResponse(_dialect_of(request).error(error), status_code=error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    @app.exception_handler(404)
    @app.exception_handler(405)
    async def not_found(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        if error.status_code == 404:
            message += "; base URLs end in /s/NAME/v1 (Anthropic's client: /s/NAME), rewards go to /s/NAME/reward"
        body = _dialect_of(request).error(GatewayError(message, status=error.status_code))
        return JSONResponse(body, status_code=error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        logger.error("a request of the gateway failed", exc_info=error)
        return await refused(request, GatewayError(f"{type(error).__name__}: {one_line(error)}", status=500))


def _dialect_of(request: Request) -> Dialect:
    return next((each for each in DIALECTS if request.url.path.endswith(f"/v1/{each.path}")), CHAT)


def _key(request: Request) -> str:
    return request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")


SESSION_HEADER, ROLE_HEADER = "x-session-id", "x-agent-role"
"""Names the session of a request whose URL names none, for clients that keep one URL; names which agent asks."""


_NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")


class SessionStore:
    """A server's sessions by name, with their API keys; they are added, or created by `make(name)` on their first request.

    Invariant: requests create at most `max_sessions` at once, single-request sessions included. A session created here ends
    exactly once (on request, after `idle_seconds` without a request, or at shutdown) and is then passed to `on_end`.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 4096,
        idle_seconds: float | None = None,
        make: Callable[[str], GatewaySession] | None = None,
        on_end: Callable[[GatewaySession], None] | None = None,
    ) -> None:
        self.max_sessions, self.idle_seconds = max_sessions, idle_seconds
        self._make, self._on_end = make, on_end
        self._sessions: dict[str, tuple[GatewaySession, str | None]] = {}  # with their keys, by name

    def __len__(self) -> int:
        return len(self._sessions)

    def makes(self, name: str) -> bool:
        """Whether a request for `name` would create a session now."""
        return self._make is not None and name not in self._sessions

    def add(self, session: GatewaySession, secret: str | None) -> None:
        """Adds a session; with `secret`, its requests must carry that as their API key."""
        self._sessions[session.name] = session, secret

    def remove(self, name: str) -> None:
        """Removes a session without ending it; its requests are rejected from now on."""
        self._sessions.pop(name, None)

    def get(self, name: str, key: str) -> GatewaySession:
        """Returns the session `name` for a request with API key `key`.

        Raises:
            GatewayError: the session does not exist, or has a different key.
        """
        if name not in self._sessions:
            raise GatewayError(f"there is no session '{name[:128]}' (any more)", code="session_not_found", status=404)
        session, secret = self._sessions[name]
        if secret is not None and not hmac.compare_digest(key.encode(), secret.encode()):
            raise GatewayError("the API key is not this session's", code="invalid_api_key", status=401)
        return session

    def get_or_make(self, name: str, key: str) -> GatewaySession:
        """Like `get`, but creates a missing session if the store has `make`.

        Raises:
            GatewayError: as for `get`, or the name is invalid, or there are too many sessions.
        """
        if self._make is None or name in self._sessions:
            return self.get(name, key)
        if not _NAME.fullmatch(name):
            raise GatewayError("a session's name has up to 128 letters, digits and . _ ~ -", param="session")
        if len(self) >= self.max_sessions:
            raise GatewayError(f"all {self.max_sessions} sessions are in use: end some", again=True, status=429)
        session = self._make(name)
        self.add(session, None)
        return session

    def end(self, session: GatewaySession) -> None:
        """Ends a session, unless it has already ended."""
        if self._sessions.get(session.name, (None, None))[0] is session:
            self.remove(session.name)
            session.end()
            if self._on_end is not None:
                self._on_end(session)

    def end_all(self) -> None:
        """Ends all sessions."""
        for session, _ in list(self._sessions.values()):
            self.end(session)

    async def end_idle(self) -> None:
        """Ends sessions idle for `idle_seconds`, until cancelled."""
        assert self.idle_seconds is not None
        while True:
            await asyncio.sleep(min(self.idle_seconds / 4, 10.0))
            before = time.monotonic() - self.idle_seconds
            for session, _ in list(self._sessions.values()):
                if not session.in_flight and session.last_used < before:
                    self.end(session)
