"""The web viewer's server: serves the pages in the package, and JSON of a run's files.

Invariant: read-only; the server handles GET only. Clients refer to runs and trajectories by the names in earlier responses,
and the names are looked up: nothing that a client sends becomes a path. Responses are bounded (see `answers`). The content
security policy lets pages load only their own files, and forbids turning text into markup. With a token, a request without
it is rejected before anything is read.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from etude.errors import EtudeError, one_line
from etude.jsonl import json_line
from etude.serving.listening import limited_protocol, listen, server_config, url_of
from etude.serving.middleware import is_loopback
from etude.viewer import answers
from etude.viewer.page import PAGES
from etude.viewer.query import Filter
from etude.viewer.runs import Runs, RunView

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_COOKIE = "etude-view"
_MAX_CONNECTIONS = 64

Name = Annotated[str, Query(max_length=500)]
Step = Annotated[int | None, Query(ge=0, le=2**53)]
Number = Annotated[float | None, Query(allow_inf_nan=False)]
Offset = Annotated[int, Query(ge=0, le=10_000_000)]


def create_app(path: Path | str, token: str | None = None) -> FastAPI:
    """Creates the application over a run folder, a folder of runs, or dumps. With a `token`, every request must carry it: as
    `?token=` once, then as a cookie; or as a bearer token.

    Raises:
        DataError: `path` does not exist.
    """
    runs = Runs(Path(path))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refusal(request, token) or await call_next(request)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(EtudeError)
    async def refuse(request: Request, error: EtudeError) -> JSONResponse:
        return JSONResponse({"detail": one_line(error)}, 422)

    # read on every request: they are small, and can be edited while the server runs
    pages = {path.name: path for path in PAGES.iterdir() if path.suffix in _TYPES}

    @app.get("/")
    @app.get("/{name}")
    def page(name: str = "index.html") -> Response:
        if name not in pages:
            raise HTTPException(404, "no such page")
        return Response(pages[name].read_bytes(), media_type=_TYPES[pages[name].suffix])

    _add_answers(app, runs)
    return app


def _refusal(request: Request, token: str | None) -> Response | None:
    """The response to a request without the token; a valid `?token=` is exchanged for a cookie. None if the request may
    proceed."""
    if token is None:
        return None
    asked = request.query_params.get("token")
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    given = asked or request.cookies.get(_COOKIE) or bearer
    if not hmac.compare_digest(given.encode(), token.encode()):
        return JSONResponse({"detail": "open the address that etude view printed: it has the token"}, 401)
    if asked is None:
        return None
    response = RedirectResponse(request.url.path, 303)  # drops the token from the URL and the browser history
    response.set_cookie(_COOKIE, token, httponly=True, samesite="lax")
    return response


def _add_answers(app: FastAPI, runs: Runs) -> None:
    def run_of(name: str) -> RunView:
        if (run := runs.get(name)) is None:
            raise HTTPException(404, "no such run; reload the page")
        return run

    def answer(content: Any) -> Response:
        return Response(json_line(content), media_type="application/json")

    @app.get("/api/runs")
    def list_runs() -> Response:
        return answer(answers.list_runs(runs))

    @app.get("/api/overview")
    def overview(run: Name = "") -> Response:
        return answer(answers.overview(run_of(run)))

    @app.get("/api/results")
    def results(run: Name = "") -> Response:
        return answer(answers.results(run_of(run)))

    @app.get("/api/curves")
    def curves(run: Name = "", version: Name = "") -> Response:
        return answer(answers.curves(run_of(run), version))

    @app.get("/api/why")
    def why(run: Name = "", step: Step = None) -> Response:
        return answer(answers.why(run_of(run), step))

    @app.get("/api/trajectories")
    def trajectories(
        run: Name = "",
        q: Name = "",
        regex: bool = False,
        stop: Name = "",
        tool: Name = "",
        source: Name = "",
        flag: Name = "",
        split: Name = "",
        step: Step = None,
        low: Number = None,
        high: Number = None,
        sort: Name = "step",
        desc: bool = False,
        group: bool = False,
        offset: Offset = 0,
    ) -> Response:
        wanted = Filter(
            min_score=low,
            max_score=high,
            min_step=step,
            max_step=step,
            split=split or None,
            stop_reason=stop or None,
            tool=tool or None,
            data_source=source or None,
            flag=flag or None,
            text=q,
            regex=regex,
        )
        return answer(answers.trajectories(run_of(run), wanted, sort, desc, group, offset))

    @app.get("/api/trajectory")
    def trajectory(place: Name, run: Name = "") -> Response:
        return answer(answers.trajectory(run_of(run), place))

    @app.get("/api/tokens")
    def tokens(place: Name, run: Name = "", sequence: Offset = 0, offset: Offset = 0) -> Response:
        return answer(answers.tokens(run_of(run), place, sequence, offset))

    @app.get("/api/timeline")
    def timeline(run: Name = "", step: Step = None) -> Response:
        return answer(answers.timeline(run_of(run), step))

    @app.get("/api/compare")
    def compare(other: Name, run: Name = "") -> Response:
        return answer(answers.compare(run_of(run), run_of(other)))


def serve(
    path: Path | str,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] = print,
    allow_hosts: Collection[str] = (),
) -> None:
    """Serves until SIGINT or SIGTERM. Calls `ready` with the URL, which includes a new random token unless `host` is a
    loopback address. Port 0 picks a free port; `allow_hosts`: see `server_config`.

    Raises:
        ConfigError: the address cannot be bound.
        DataError: `path` does not exist.
    """
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    app, http = create_app(path, token), limited_protocol(_MAX_CONNECTIONS)
    with listen(host, port) as listener:
        config = server_config(app, host, allow_hosts, timeout_graceful_shutdown=1, http=http, lifespan="off")
        ready(url_of(listener, host) + (f"/?token={token}" if token else ""))  # the socket is already listening
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
