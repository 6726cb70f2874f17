"""`McpConnection`: a reconnecting connection to a server; `McpPool`: the connections of a process.

Invariant: a call is sent at most once. If the connection is down, one task opens it first, with back-off, for all
waiting callers; if it breaks during a call, the call fails as infrastructure at once, and the next one reconnects.
Nothing here waits without a limit. A connection lives in its own loop and thread, however many loops use it, in turn or
concurrently: rollouts, commands and tests each run their own.

Left to others: repeating a call that failed (`config.max_retries`, else the trajectory as a whole).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import random
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from etude.bounded import background_loop, settle
from etude.errors import EtudeError, InfrastructureError, ToolError, one_line
from etude.tools.mcp.options import McpServer
from etude.tools.mcp.session import McpSession, SessionLostError, root_cause

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, Tool

_FIRST_PAUSE = 0.25  # seconds between attempts to connect; doubled each time, plus up to half of it
_LONGEST_PAUSE = 8.0
R = TypeVar("R")

_EXIT_SECONDS = 15.0  # for connections to close: a stubborn subprocess takes up to 6
_MAX_PAGES, _MAX_TOOLS = 100, 10_000
_HOPELESS = (
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
)  # retrying a command that cannot be started is useless
_jitter = random.Random()  # our own generator, so that reconnecting disturbs no seed


class McpConnection:
    """One connection to `server`, reopened on demand when it is gone."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.busy = 0
        self.tools: list[Tool] = []
        self._session: McpSession | None = None
        self._opening: asyncio.Task[McpSession] | None = None
        self._proving: asyncio.Task[None] | None = None
        self._closing: dict[McpSession, asyncio.Task[None]] = {}

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> CallToolResult:
        """The result of one call of the tool `name`, an error result included.

        Raises:
            ToolError: the server rejected the arguments, or has no such tool.
            InfrastructureError: it cannot be reached, timed out, or broke meanwhile.
        """
        self.busy += 1
        try:
            return await self._call(name, arguments, timeout)
        finally:
            self.busy -= 1

    async def _call(self, name: str, arguments: dict[str, Any], timeout: float) -> CallToolResult:
        from mcp_types import INVALID_PARAMS

        for again in (True, False):
            session = await self.session()
            try:
                return await session.request(lambda client: client.call_tool(name, arguments, timeout))
            except asyncio.CancelledError:
                self._prove(session)
                raise
            except SessionLostError as error:
                self._drop(session)
                raise InfrastructureError(f"{self.server}: {error}{session.hint()}") from error
            except Exception as error:
                if getattr(error, "code", None) == INVALID_PARAMS:
                    raise ToolError(one_line(error)) from error
                self._judge(session, error)
                if again and _never_ran(error):
                    continue
                why = session.hint() if session.lost.done() or session.status >= 400 else ""
                raise InfrastructureError(f"{self.server}: '{name}': {one_line(root_cause(error))}{why}") from error
        raise AssertionError("unreachable")

    def _judge(self, session: McpSession, error: Exception) -> None:
        """What a failed call tells about its connection: nothing, that it may be dead, or that it is."""
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, REQUEST_TIMEOUT

        code = getattr(error, "code", None)
        if code == REQUEST_TIMEOUT:
            self._prove(session)
        elif code == CONNECTION_CLOSED:
            self._drop(session)
        elif code in (INVALID_REQUEST, METHOD_NOT_FOUND) and self.server.transport != "stdio":
            self._drop(session)  # HTTP statuses of a session, or a server behind an address, that is gone

    async def session(self) -> McpSession:
        """The open session, opened now if there is none.

        Raises:
            InfrastructureError: `connect_attempts` attempts failed; gives the last one's reason.
        """
        if self._session is not None and not self._session.lost.done():
            return self._session
        if self._session is not None:
            self._drop(self._session)
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Task[McpSession]) -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._session = opening.result()

    async def _open(self) -> McpSession:
        pause = _FIRST_PAUSE
        for left in reversed(range(self.server.connect_attempts)):
            session = McpSession(self.server)
            try:
                await session.opened()
                self.tools = await asyncio.wait_for(session.request(_list_tools), self.server.connect_timeout)
                return session
            except EtudeError:
                raise
            except Exception as error:
                await session.close()
                cause = root_cause(error)
                if not left or isinstance(cause, _HOPELESS):
                    raise InfrastructureError(f"{self.server}: {_described(cause)}{session.hint()}") from error
            except BaseException:
                await session.close()
                raise
            await asyncio.sleep(pause * (1 + _jitter.random() / 2))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise AssertionError("unreachable")

    def _prove(self, session: McpSession) -> None:
        """Pings a connection that owes an answer, with the timeout of opening it, as a server may be busy with another
        call. It is dropped if it does not respond."""
        if self._proving is None and not session.lost.done():
            self._proving = asyncio.ensure_future(self._proof(session))
            self._proving.add_done_callback(self._proven)

    async def _proof(self, session: McpSession) -> None:
        try:
            await asyncio.wait_for(session.request(_list_tools), self.server.connect_timeout)
        except Exception:
            self._drop(session)

    def _proven(self, task: asyncio.Task[None]) -> None:
        self._proving = None

    def _drop(self, session: McpSession) -> None:
        if self._session is session:
            self._session = None
        if session not in self._closing:
            self._closing[session] = asyncio.ensure_future(session.close())
            self._closing[session].add_done_callback(lambda _: self._closing.pop(session, None))

    async def close(self) -> None:
        """Closes the session, if open; a later call reopens it."""
        await settle([task for task in (self._opening, self._proving) if task is not None])
        if self._session is not None:
            self._drop(self._session)
        if self._closing:
            await asyncio.wait(set(self._closing.values()))


class McpPool:
    """`num_instances` connections to one server; each call takes the least busy one."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.connections = [McpConnection(server) for _ in range(server.num_instances)]

    async def list_tools(self) -> list[Tool]:
        """The tools of the server, from the first connection; the others are opened on demand.

        Raises:
            InfrastructureError: it cannot be reached.
        """
        await self.connections[0].session()
        return self.connections[0].tools

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> CallToolResult:
        """As `McpConnection.call`."""
        return await min(self.connections, key=lambda each: each.busy).call(name, arguments, timeout)

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(connection.close() for connection in self.connections))


_pools: dict[tuple[asyncio.AbstractEventLoop, McpServer], McpPool] = {}


def pool_of(server: McpServer) -> McpPool:
    """The process's connections to `server`: equal servers, wherever they are configured, share them; a forked child has
    its own loop, and thus its own connections."""
    key = (_loop(), server)
    if key not in _pools:
        _pools.setdefault(key, McpPool(server))  # atomic: only one of two threads creates the pool
        atexit.unregister(_close_at_exit)
        atexit.register(_close_at_exit)
    return _pools[key]


async def in_loop(work: Coroutine[Any, Any, R]) -> R:
    """Runs `work` in the connections' loop; cancelling the caller cancels it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


def run_in_loop(work: Coroutine[Any, Any, R], timeout: float) -> R:
    """Like `in_loop`, for a thread that may run another event loop.

    Raises:
        TimeoutError: it took longer than `timeout` seconds and was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout), _loop())
    try:
        return future.result()
    finally:
        future.cancel()


def close_connections(seconds: float = 30.0) -> None:
    """Closes every MCP connection of this process; later calls reopen them."""
    pools = [pool for (loop, _), pool in list(_pools.items()) if loop is _loop()]
    if pools:
        run_in_loop(_close_all(pools), seconds)


async def _close_all(pools: Sequence[McpPool]) -> None:
    await asyncio.gather(*(pool.close() for pool in pools))


def _close_at_exit() -> None:
    with contextlib.suppress(Exception):  # the process ends; a remaining subprocess sees its stdin close
        close_connections(_EXIT_SECONDS)


def _loop() -> asyncio.AbstractEventLoop:
    return background_loop("etude-mcp")


async def _list_tools(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        tools.extend(page.tools)
        cursor = page.next_cursor
        if cursor is None:
            return tools
        if len(tools) > _MAX_TOOLS:
            break
    raise ValueError(f"it lists more than {_MAX_TOOLS} tools, or its pages have no end")


def _never_ran(error: Exception) -> bool:
    """Whether the server refused the call unread: it was restarted and does not know our session."""
    from mcp_types import INVALID_REQUEST

    return getattr(error, "code", None) == INVALID_REQUEST and "session" in str(error).lower()


def _described(cause: BaseException) -> str:
    return f"cannot connect: {type(cause).__name__}: {one_line(cause)}"
