"""`McpSession`: one live session with an MCP server, from connecting to closing, over the SDK's transports.

Invariants: a session is opened and closed in one task, as the SDK's cancel scopes require; requests run in separate tasks
and fail at once when the session ends, whether the server died, the stream closed or `close` was called. A message longer
than `max_message_bytes` ends the session. A session that ended is never reused; opening the next one is left to
`McpConnection`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from etude.errors import MissingExtraError, one_line
from etude.timeouts import retrieve, settle
from etude.tools.mcp.options import McpServer
from etude.tools.mcp.stdio import subprocess_streams

if TYPE_CHECKING:
    from mcp import Client

R = TypeVar("R")

_CLOSE_SECONDS = 8.0  # a subprocess has 2 s to exit, then 2 s after SIGTERM, then is killed
_LAST_ANSWER_SECONDS = 0.5  # grace period for a response that arrived just before the stream ended
_KEPT_LINES = 20
_MAX_CONNECTIONS = 200  # concurrent, to one HTTP server
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

logger = logging.getLogger(__name__)


class SessionLostError(ConnectionError):
    """The session with the server ended before or during a request."""


class McpSession:
    """Starts connecting when constructed, in the running event loop; `opened` waits for the result."""

    def __init__(self, server: McpServer) -> None:
        loop = asyncio.get_running_loop()
        self.server = server
        self.lost: asyncio.Future[None] = loop.create_future()
        self.status = 0  # HTTP status of the last response; 0 if there was none
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Client] = loop.create_future()
        self._logged: deque[str] = deque(maxlen=_KEPT_LINES)
        self._owner = asyncio.ensure_future(self._run())

    async def opened(self) -> None:
        """Waits until the session is ready; await it once, and always call `close` afterwards.

        Raises:
            MissingExtraError: the MCP SDK is not installed.
            TimeoutError: the session was not ready within `server.connect_timeout`.
            Exception: raised by the transport.
        """
        waiting: set[asyncio.Future[Any]] = {self._owner, self._ready}
        await asyncio.wait(waiting, timeout=self.server.connect_timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return
        error = None if not self._owner.done() or self._owner.cancelled() else self._owner.exception()
        if not self._owner.done() or timed_out(error):
            raise TimeoutError(f"no answer within {self.server.connect_timeout:g} s (connect_timeout)")
        raise SessionLostError("the connection closed") if error is None else root_cause(error)

    async def request(self, make: Callable[[Client], Awaitable[R]]) -> R:
        """Returns the result of `make(client)`.

        Raises:
            SessionLostError: the session ended before or during the request.
        """
        if self.lost.done():
            raise SessionLostError("the connection closed")
        task: asyncio.Future[R] = asyncio.ensure_future(make(self._ready.result()))
        either: set[asyncio.Future[Any]] = {task, self.lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=_LAST_ANSWER_SECONDS)
            if not task.done():
                raise SessionLostError("the connection closed during the call")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(retrieve)

    def hint(self) -> str:
        """Returns a possible cause of a failure, for messages: an HTTP status of 400 or more, or the subprocess's last line
        of output."""
        if self.status >= 400:
            return f" (HTTP {self.status})"
        lines = [line for line in self._logged if line.strip()]
        return f" (it said: {lines[-1]})" if lines else ""

    async def close(self) -> None:
        """Ends the session; returns when the transport is closed, and a subprocess has exited or is abandoned."""
        self._end()
        if not self._ready.done():
            self._owner.cancel()  # it is still connecting; cancelling closes the transport
        await asyncio.wait({self._owner}, timeout=_CLOSE_SECONDS)
        await settle({self._owner})

    def _end(self) -> None:
        self._stop.set()
        if not self.lost.done():
            self.lost.set_result(None)

    async def _run(self) -> None:
        try:
            from mcp import Client
        except ImportError as error:
            raise MissingExtraError("an MCP tool", "mcp") from error
        if (sdk := logging.getLogger("mcp.client")).level == logging.NOTSET:
            sdk.setLevel(logging.CRITICAL)  # it logs tracebacks of errors that are reported here
        mode = "legacy" if self.server.transport == "sse" else "auto"
        try:
            # Half of the time for each: a server that ignores the newer protocol's probe still gets the older handshake.
            patience = self.server.connect_timeout / (2 if mode == "auto" else 1)
            async with Client(self._transport(), mode=mode, cache=None, read_timeout_seconds=patience) as client:
                self._ready.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if self._ready.done() and not self._stop.is_set():
                logger.info("%s: %s", self.server, one_line(root_cause(error)))
            raise
        finally:
            self._end()

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[tuple[Any, Any]]:
        """Opens the SDK's transport, watched so that the session ends when its message stream does."""
        server = self.server
        async with AsyncExitStack() as opened:
            if server.transport == "stdio":
                streams: AbstractAsyncContextManager[tuple[Any, Any]] = subprocess_streams(server, self._log_line)
            elif server.transport == "sse":
                from mcp.client.sse import sse_client

                streams = sse_client(server.url, httpx_client_factory=self._http_client)
            else:
                from mcp.client.streamable_http import streamable_http_client

                client = await opened.enter_async_context(self._http_client())
                limit = server.max_message_bytes
                streams = streamable_http_client(server.url, http_client=client, max_sse_event_size=limit)
            read, write = await opened.enter_async_context(streams)
            yield _Watched(read, self._end), write

    def _http_client(self, headers: Any = None, timeout: Any = None, auth: Any = None) -> Any:
        """Creates the HTTP client as configured; ignores the arguments, which are the SDK's defaults."""
        import httpx2

        server = self.server
        return httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity", **server.request_headers},
            # No timeout for a free connection: the call's own time limit applies.
            timeout=httpx2.Timeout(server.connect_timeout, read=server.sse_read_timeout, pool=None),
            limits=httpx2.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS // 4),
            trust_env=urlsplit(server.url).hostname not in _LOOPBACK,  # a proxy cannot reach this machine
            event_hooks={"response": [self._watch_response]},
        )

    async def _watch_response(self, response: Any) -> None:
        """Stores the status, and limits the body, decompressed; of a stream of events, the transport limits each event."""
        self.status = response.status_code
        streams = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        encoding = response.headers.pop("content-encoding", "")  # else the client would decompress without a limit
        response.stream = _bounded_stream(response.stream, encoding, None if streams else self.server.max_message_bytes)

    def _log_line(self, line: str) -> None:
        self._logged.append(line)
        logger.debug("%s says: %s", self.server, line)


class _Watched:
    """Wraps a stream of messages; calls `ended` when it ends or fails."""

    def __init__(self, stream: Any, ended: Callable[[], None]) -> None:
        self._stream = stream
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> Any:
        self._ended()
        return await self._stream.__aexit__(*details)

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._ended()
            raise


def _bounded_stream(stream: Any, encoding: str, limit: int | None) -> Any:
    """Decompresses the body of an HTTP response; it raises after more than `limit` bytes (None: no limit)."""
    import httpx2

    from etude.serving.json_service import decompress  # imported lazily: it imports aiohttp

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            try:
                async for chunk in decompress(stream, encoding):
                    size += len(chunk)
                    if limit is not None and size > limit:
                        raise httpx2.StreamError(f"an answer of more than {limit} bytes")
                    yield chunk
            except ValueError as error:
                raise httpx2.StreamError(str(error)) from error

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def timed_out(error: BaseException | None) -> bool:
    """Whether the SDK gave up on a request that had no answer."""
    from mcp_types import REQUEST_TIMEOUT

    return error is not None and getattr(root_cause(error), "code", None) == REQUEST_TIMEOUT


def root_cause(error: BaseException) -> BaseException:
    """Returns the first exception in the nested exception groups that the SDK's task groups raise."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return error
