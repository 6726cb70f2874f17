"""`McpConnection`: a reconnecting connection to a server; `McpPool`: the connections of a process to one server.

Invariant: a call is executed at most once. If the connection is down, one task opens it first, with exponential back-off,
for all waiting callers; if it breaks during a call, the call fails at once with an infrastructure failure, and the next one
reconnects. Every wait has a time limit. All connections live in one background event loop, whichever loops use them, in turn
or concurrently: rollouts, commands and tests each run their own.

Retrying a failed call is left to others (`config.max_retries`, or the retry of the whole trajectory).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import random
import re
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from etude.errors import EtudeError, InfrastructureError, ToolError, one_line
from etude.timeouts import background_loop, settle
from etude.tools.mcp.options import McpServer
from etude.tools.mcp.session import McpSession, SessionLostError, root_cause, timed_out

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, Tool

_FIRST_PAUSE = 0.25  # seconds between attempts to connect; doubled each time, plus up to 50 % jitter
_LONGEST_PAUSE = 8.0
R = TypeVar("R")

_EXIT_SECONDS = 15.0  # for connections to close: a subprocess that ignores SIGTERM takes up to 6
_UNKNOWN_TOOL = re.compile(r"(?i)unknown tool|no such tool|tool\b.{0,200}\bnot found")
_MAX_PAGES, _MAX_TOOLS = 100, 10_000
_NOT_RETRIED = (FileNotFoundError, PermissionError, NotADirectoryError)  # the command cannot be started
_jitter = random.Random()  # a separate generator, so that reconnecting does not advance the global one


class McpConnection:
    """One connection to `server`, opened on demand and reopened after it is lost.

    `first_listed`: the arguments of each tool when the run's tools were loaded, which prompts show. All connections to the
    server share it.
    """

    def __init__(self, server: McpServer, first_listed: dict[str, Any]) -> None:
        self.server, self._first_listed = server, first_listed
        self.busy = 0
        self.tools: list[Tool] = []
        self._session: McpSession | None = None
        self._opening: asyncio.Task[McpSession] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._closing: dict[McpSession, asyncio.Task[None]] = {}

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> CallToolResult:
        """Calls the tool `name` and returns its result, which may be an error result.

        Raises:
            ToolError: the server rejected the arguments.
            InfrastructureError: the server cannot be reached, timed out, broke meanwhile, or no longer has that tool.
        """
        from mcp_types import INVALID_PARAMS

        for again in (True, False):
            session = await self.session()
            self._require_unchanged(name)
            try:
                result = await session.request(lambda client: client.call_tool(name, arguments, timeout))
                if result.is_error:
                    await self._verify_known(session, name, str(result.content))
                return result
            except asyncio.CancelledError:
                self._probe(session)
                raise
            except SessionLostError as error:
                self._drop(session)
                raise InfrastructureError(f"{self.server}: {error}{session.hint()}") from error
            except Exception as error:
                if isinstance(error, InfrastructureError):
                    raise
                if getattr(error, "code", None) == INVALID_PARAMS:
                    await self._verify_known(session, name, str(error))
                    raise ToolError(one_line(error)) from error
                self._handle_error(session, error)
                if again and _never_ran(error):
                    continue
                why = session.hint() if session.lost.done() or session.status >= 400 else ""
                raise InfrastructureError(f"{self.server}: '{name}': {one_line(root_cause(error))}{why}") from error
        raise AssertionError("unreachable")

    async def _list(self, session: McpSession) -> None:
        self.tools = await asyncio.wait_for(session.request(_list_tools), self.server.connect_timeout)
        if not self._first_listed:
            self._first_listed.update({tool.name: tool.input_schema for tool in self.tools})

    async def _verify_known(self, session: McpSession, name: str, said: str) -> None:
        """Lists the tools again if the server's error says that it does not know `name`; raises as `_require_unchanged`."""
        if _UNKNOWN_TOOL.search(said):
            await self._list(session)
            self._require_unchanged(name)

    def _require_unchanged(self, name: str) -> None:
        """Raises InfrastructureError if the server no longer has the tool as prompts show it: that is no mistake of the
        model's."""
        listed = {tool.name: tool.input_schema for tool in self.tools}
        if name not in listed:
            raise InfrastructureError(f"{self.server}: it has no tool '{name}' (any more)")
        if listed[name] != self._first_listed.get(name, listed[name]):
            raise InfrastructureError(
                f"{self.server}: '{name}' takes other arguments than when the run began, which prompts show: start again"
            )

    def _handle_error(self, session: McpSession, error: Exception) -> None:
        """Drops or probes the connection if the error of a failed call means that it is, or may be, dead."""
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, REQUEST_TIMEOUT

        code = getattr(error, "code", None)
        if code == REQUEST_TIMEOUT:
            self._probe(session)
        elif code == CONNECTION_CLOSED:
            self._drop(session)
        elif code in (INVALID_REQUEST, METHOD_NOT_FOUND) and self.server.transport != "stdio":
            self._drop(session)  # how the SDK reports an HTTP status that means that the session is gone

    async def session(self) -> McpSession:
        """Returns the open session, and opens one if needed.

        Raises:
            InfrastructureError: `connect_attempts` attempts failed; gives the reason of the last one.
        """
        if self._session is not None and not self._session.lost.done():
            return self._session
        if self._session is not None:
            self._drop(self._session)
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> McpSession:
        pause = _FIRST_PAUSE
        for left in reversed(range(self.server.connect_attempts)):
            session = McpSession(self.server)
            try:
                await session.opened()
                await self._list(session)
                self._session = session
                return session
            except EtudeError:
                raise
            except Exception as error:
                await session.close()
                cause = root_cause(error)
                if not left or isinstance(cause, _NOT_RETRIED):
                    key = f" (connect_timeout: {self.server.connect_timeout:g} s)" if timed_out(cause) else ""
                    why = f"cannot connect: {type(cause).__name__}: {one_line(cause)}{key}{session.hint()}"
                    raise InfrastructureError(f"{self.server}: {why}") from error
            except BaseException:
                await session.close()
                raise
            await asyncio.sleep(pause * (1 + _jitter.random() / 2))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise AssertionError("unreachable")

    def _probe(self, session: McpSession) -> None:
        """Probes a connection on which a call timed out or was cancelled by listing its tools, and drops it if there is no
        response within the timeout for connecting: the server may be busy with another call."""

        async def probe() -> None:
            try:
                await asyncio.wait_for(session.request(_list_tools), self.server.connect_timeout)
            except Exception:
                self._drop(session)

        if (self._probing is None or self._probing.done()) and not session.lost.done():
            self._probing = asyncio.ensure_future(probe())

    def _drop(self, session: McpSession) -> None:
        if self._session is session:
            self._session = None
        if session not in self._closing:
            self._closing[session] = asyncio.ensure_future(session.close())
            self._closing[session].add_done_callback(lambda _: self._closing.pop(session, None))

    async def close(self) -> None:
        """Closes the session, if open; a later call reopens it."""
        await settle([task for task in (self._opening, self._probing) if task is not None])
        if self._session is not None:
            self._drop(self._session)
        if self._closing:
            await asyncio.wait(set(self._closing.values()))


class McpPool:
    """`num_instances` connections to one server, in the event loop `loop`; each call goes to the least busy one."""

    def __init__(self, server: McpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.loop = server, loop
        self._first_listed: dict[str, Any] = {}
        self.connections = [McpConnection(server, self._first_listed) for _ in range(server.num_instances)]

    async def list_tools(self) -> list[Tool]:
        """Returns the tools of the server, listed over the first connection; the others are opened on demand.

        Raises:
            InfrastructureError: the server cannot be reached.
        """
        await self.connections[0].session()
        self._first_listed.clear()
        self._first_listed.update({tool.name: tool.input_schema for tool in self.connections[0].tools})
        return self.connections[0].tools

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> CallToolResult:
        """Calls a tool over the least busy connection; see `McpConnection.call`."""
        connection = min(self.connections, key=lambda each: each.busy)
        connection.busy += 1
        try:
            return await connection.call(name, arguments, timeout)
        finally:
            connection.busy -= 1

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self.connections))


_pools: dict[tuple[asyncio.AbstractEventLoop, McpServer], McpPool] = {}


def pool_of(server: McpServer) -> McpPool:
    """Returns this process's connections to `server`, shared by equal servers wherever they are configured. A forked child
    has its own loop, and thus its own connections."""
    key = (_loop(), server)
    if key not in _pools:
        _pools.setdefault(key, McpPool(server, key[0]))  # atomic: only one of two threads creates the pool
        atexit.unregister(_close_at_exit)
        atexit.register(_close_at_exit)
    return _pools[key]


def run_in_loop(work: Coroutine[Any, Any, R], timeout: float) -> R:
    """Runs `work` in the connections' event loop; blocks the calling thread, which may run another one.

    Raises:
        TimeoutError: `work` took longer than `timeout` seconds and was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout), _loop())
    try:
        return future.result()
    finally:
        future.cancel()


def close_connections(seconds: float = 30.0) -> None:
    """Closes every MCP connection of this process; later calls reopen them."""
    pools = [pool for pool in list(_pools.values()) if pool.loop is _loop()]
    if pools:
        run_in_loop(_close_all(pools), seconds)


async def _close_all(pools: Sequence[McpPool]) -> None:
    await asyncio.gather(*(pool.close() for pool in pools))


def _close_at_exit() -> None:
    with contextlib.suppress(Exception):  # the process is exiting; a remaining subprocess gets end-of-file on its stdin
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
    """Whether the server rejected the call unread, because it was restarted and does not know our session."""
    from mcp_types import INVALID_REQUEST

    return getattr(error, "code", None) == INVALID_REQUEST and "session" in str(error).lower()
