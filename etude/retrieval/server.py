"""The retrieval server: Search-R1's and RL-Factory's `/retrieve` over a `Retriever`.

    POST /retrieve {"queries": [text], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id", "contents", …}, "score": 7.1}]]}      one list for each query
    {"result": [[{"id", "contents", …}]]}                                  with return_scores false, the default

`GET /search?q=text&num=5` does the same for clients of SearXNG: `{"results": [{"title", "content", "score"}]}`.

Invariant: requests are limited in bytes, number of queries, their length and the number of passages; an invalid request is
answered 422 with a one-line reason. Searching runs in a separate thread, in batches of the waiting queries; if more than
`max_waiting` would wait, the request is answered 429.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.retrieval.index import Hit, Retriever
from etude.serving.metrics import RequestMetrics
from etude.serving.middleware import BearerToken, BodyLimit
from etude.timeouts import set_outcome, settle

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_MAX_BATCH = 256  # maximum queries per batch (unless one request has more), so that later ones do not wait for long


@dataclass(frozen=True)
class ServerOptions:
    """Limits of the server. Search-R1 sends all queries of a turn of its batch in one request, hence `max_queries`."""

    topk: int = 3
    max_topk: int = 100
    max_queries: int = 4096
    max_query_chars: int = 8192
    max_passages: int = 20_000
    max_waiting: int = 20_000
    max_request_mb: int = 8
    token: str | None = None


class _Invalid(Exception):
    """The request is invalid; the message says why."""


class _Busy(Exception):
    """Too many queries are waiting."""


class Waiting(NamedTuple):
    """A waiting request: its queries, and the future for their hits."""

    queries: list[str]
    topk: int
    done: asyncio.Future[list[list[Hit]]]


class SearchQueue:
    """Passes waiting requests to the search thread in batches, which dense encoders need for throughput."""

    def __init__(self, retriever: Retriever, max_waiting: int) -> None:
        self._retriever, self._max_waiting = retriever, max_waiting
        self._requests: list[Waiting] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self.waiting = 0

    async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        """Returns the hits of each query.

        Raises:
            _Busy: too many queries are waiting.
        """
        if self.waiting + len(queries) > self._max_waiting:
            raise _Busy
        request = Waiting(queries, topk, asyncio.get_running_loop().create_future())
        self.waiting += len(queries)
        self._requests.append(request)
        self._arrived.set()
        try:
            return await request.done
        finally:
            self.waiting -= len(queries)

    async def run(self) -> None:
        """Processes requests until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._arrived.wait()
                while batch := self._take_batch():
                    await loop.run_in_executor(self._thread, self._answer, batch, loop)
                self._arrived.clear()
        finally:
            self._thread.shutdown(wait=False)

    def _take_batch(self) -> list[Waiting]:
        taken, count = 0, 0
        while taken < len(self._requests) and (not taken or count + len(self._requests[taken].queries) <= _MAX_BATCH):
            count += len(self._requests[taken].queries)
            taken += 1
        batch, self._requests = self._requests[:taken], self._requests[taken:]
        return [request for request in batch if not request.done.done()]  # a client may have disconnected

    def _answer(self, batch: Sequence[Waiting], loop: asyncio.AbstractEventLoop) -> None:
        outcomes: list[tuple[Waiting, list[list[Hit]] | Exception]] = []
        try:
            for topk in {request.topk for request in batch}:  # usually one
                same = [request for request in batch if request.topk == topk]
                found = iter(self._retriever.search([query for request in same for query in request.queries], topk))
                outcomes += [(each, [next(found) for _ in each.queries]) for each in same]
        except Exception as error:  # a bug, here or in a library: each of these requests is answered 500
            outcomes = [(each, error) for each in batch]

        def settle_all() -> None:  # one wake-up of the loop for the whole batch
            for request, outcome in outcomes:
                set_outcome(request.done, outcome)

        loop.call_soon_threadsafe(settle_all)


def create_app(retriever: Retriever, options: ServerOptions | None = None) -> Starlette:
    """Creates the application for `retriever`."""
    options = options or ServerOptions()
    queue = SearchQueue(retriever, options.max_waiting)
    metrics, corpus = RequestMetrics("etude_retrieval", "success, refused, busy, failed", _BUCKETS), retriever.corpus
    metrics.gauge("waiting", "Queries that wait for their hits.", lambda: queue.waiting)
    answered = Counter("etude_retrieval_queries", "Queries answered.", registry=metrics.registry)

    async def retrieve(request: Request) -> Response:
        queries, topk, with_scores = _read(await request.body(), options)
        found = await queue.search(queries, topk)
        answered.inc(len(queries))
        pairs = ([(corpus.document_json(row), score) for row, score in hits] for hits in found)
        scored = b'{"document": %b, "score": %.6f}'
        lists = (b", ".join([scored % each if with_scores else each[0] for each in hits]) for hits in pairs)
        return Response(b'{"result": [[' + b"], [".join(lists) + b"]]}", media_type="application/json")

    async def search(request: Request) -> Response:
        given = {"queries": [request.query_params.get("q")], "topk": _number(request.query_params.get("num"))}
        queries, topk, _ = _check(given, options)
        [hits] = await queue.search(queries, topk)
        answered.inc()
        return JSONResponse({"query": queries[0], "results": [_result(corpus.document(hit.row), hit) for hit in hits]})

    async def health(_: Request) -> Response:
        about = {"status": "ok", "passages": len(retriever), "method": retriever.options.method}
        return JSONResponse({**about, "corpus": corpus.path.name, "waiting": queue.waiting})

    async def scrape(_: Request) -> Response:
        return metrics.page()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        running = asyncio.ensure_future(queue.run())
        try:
            yield
        finally:
            await settle({running})

    app = Starlette(
        routes=[
            Route("/retrieve", _counted(retrieve, "retrieve", metrics), methods=["POST"]),
            Route("/search", _counted(search, "search", metrics), methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", scrape, methods=["GET"]),
        ],
        lifespan=lifespan,
    )
    app.add_middleware(BodyLimit, max_bytes=options.max_request_mb << 20)
    if options.token is not None:
        app.add_middleware(BearerToken, token=options.token)
    return app


def _counted(handler: Callable[[Request], Any], endpoint: str, metrics: RequestMetrics) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        clock = asyncio.get_running_loop().time
        began, outcome = clock(), "failed"
        try:
            response: Response = await handler(request)
            outcome = "success"
            return response
        except _Invalid as error:
            outcome = "refused"
            return JSONResponse({"detail": str(error)}, 422)
        except HTTPException:  # the body is too large or too slow
            outcome = "refused"
            raise
        except _Busy:
            outcome = "busy"
            return JSONResponse({"detail": "too many queries wait; try again"}, 429, {"Retry-After": "1"})
        finally:
            metrics.count(endpoint, outcome, clock() - began)

    return answer


def _read(body: bytes, options: ServerOptions) -> tuple[list[str], int, bool]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise _Invalid("the body is not valid JSON") from None
    if not isinstance(given, dict):
        raise _Invalid("the body must be an object with 'queries'")
    return _check(given, options)


def _check(given: dict[str, Any], options: ServerOptions) -> tuple[list[str], int, bool]:
    queries, topk, with_scores = given.get("queries"), given.get("topk"), given.get("return_scores") or False
    topk = options.topk if topk is None else topk
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise _Invalid("'queries' must be a list of texts")
    if not 0 < len(queries) <= options.max_queries:
        raise _Invalid(f"a request may have 1 to {options.max_queries} queries, not {len(queries)}")
    if max(map(len, queries)) > options.max_query_chars:
        raise _Invalid(f"a query may have {options.max_query_chars} characters")
    if type(topk) is not int or not 0 < topk <= options.max_topk:
        raise _Invalid(f"'topk' must be a whole number from 1 to {options.max_topk}")
    if len(queries) * topk > options.max_passages:
        raise _Invalid(f"a request may ask for {options.max_passages} passages, not {len(queries) * topk}")
    if not isinstance(with_scores, bool):
        raise _Invalid("'return_scores' must be true or false")
    return queries, topk, with_scores


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else -1  # rejected by _check


def _result(document: dict[str, Any], hit: Hit) -> dict[str, Any]:
    title, _, text = document["contents"].partition("\n")
    return {"title": title.strip('"'), "content": text, "url": str(document.get("url", "")), "score": hit.score}
