"""`ToolServer`: serves configured tools to any MCP client (`etude tools serve`).

Invariant: each MCP session has one `ToolSession`: a stateful tool keeps its state per client, is created once
and is released when the session ends, however it ends. Over stdio the process is the session. Over streamable HTTP it is the
session that the handshake opened; the server therefore offers only protocol versions with a handshake, and a client
that insists on the stateless version 2026-07-28 gets a session per request. Errors, infrastructure failures included,
are results with `is_error`; nothing a client sends ends the server.

`calc_reward` is never called: an MCP client has no use for it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from etude.errors import EtudeError, InfrastructureError, MissingExtraError, one_line
from etude.schemas import FunctionCall, ToolResponse
from etude.tools.base import BaseTool
from etude.tools.contract import merge_responses
from etude.tools.session import ToolSession

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolResult, ContentBlock

SESSION_IDLE_SECONDS = 1800.0
MAX_SESSIONS = 1000
MAX_REQUEST_BYTES = 4 * 1024 * 1024
MAX_LINE_BYTES = 16 * 1024 * 1024
_STATE = "etude"  # the key of the `ClientSession` in a connection's state

logger = logging.getLogger(__name__)

_closing: set[asyncio.Task[None]] = set()  # referenced so that none is garbage-collected


class ClientSession:
    """The tools of one client: opened by its first call, closed with its connection."""

    def __init__(self, tools: Mapping[str, BaseTool], tools_kwargs: Mapping[str, Any]) -> None:
        self._tools = tools
        self._tools_kwargs = tools_kwargs
        self._opening: asyncio.Task[ToolSession] | None = None
        self._running: set[asyncio.Task[tuple[ToolResponse, bool]]] = set()
        self._initial_response = ToolResponse()
        self._turn = 0

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[ToolResponse, bool]:
        """Calls a tool; returns (response, whether it is an error). The response of `create` is prepended to the first
        response."""
        work = asyncio.ensure_future(self._call(name, arguments))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        try:
            await asyncio.wait({work})  # a separate task, as the SDK cancels repeatedly and a session cleans up once
        except asyncio.CancelledError:
            work.cancel()
            raise
        return work.result()

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> tuple[ToolResponse, bool]:
        try:
            session = await self._session()
            self._turn += 1
            call = FunctionCall(name=name, arguments=json.dumps(arguments))
            [outcome] = await session.execute([call], self._turn - 1)
        except (InfrastructureError, EtudeError) as error:
            logger.warning("%s", one_line(error))
            return ToolResponse(text=f"The tool is not available: {one_line(error)}"), True
        initial_response, self._initial_response = self._initial_response, ToolResponse()
        return merge_responses(initial_response, outcome.response), outcome.error is not None

    async def _session(self) -> ToolSession:
        """Returns the tool session, opened once for all waiting calls; after a failure, the next call tries again."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except Exception:
            if self._opening is opening:
                self._opening = None
            raise

    async def _open(self) -> ToolSession:
        session = ToolSession(self._tools, self._tools_kwargs, request_id=f"mcp-{uuid4()}")
        await session.__aenter__()
        for response in session.initial_responses:
            self._initial_response = merge_responses(self._initial_response, response)
        return session

    async def close(self) -> None:
        """Releases the tools; runs to completion even if the caller is cancelled."""
        if (opening := self._opening) is None:
            return

        async def close() -> None:
            await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().__aexit__(None, None, None)

        closing = asyncio.ensure_future(close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        await asyncio.wait({closing})


class ToolServer:
    """An MCP server of `tools`; `tools_kwargs` has the form of a row's, and is the same for every client.

    Raises:
        MissingExtraError: the MCP SDK is not installed.
    """

    def __init__(
        self, tools: Sequence[BaseTool], tools_kwargs: Mapping[str, Any] | None = None, *, name: str = "etude"
    ) -> None:
        try:
            from mcp.server.lowlevel import Server
        except ImportError as error:
            raise MissingExtraError("serving tools over MCP", "mcp") from error
        self._tools = {tool.name: tool for tool in tools}
        self._tools_kwargs = dict(tools_kwargs or {})
        ToolSession(self._tools, self._tools_kwargs, request_id="check")  # reject invalid names before clients connect
        self._only: ClientSession | None = None
        self.server: Server[Any] = Server(
            name,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            lifespan=self._lifespan,
            get_tool_input_schema=lambda name: _parameters(self._tools[name]) if name in self._tools else None,
        )

    async def serve_stdio(self) -> None:
        """Serves one client over this process's stdin and stdout, until it closes them or the caller is cancelled.

        Meanwhile tools see an empty stdin, and their output goes to stderr.
        """
        from mcp.server.stdio import stdio_server

        self._only = ClientSession(self._tools, self._tools_kwargs)
        async with _claimed_stdin() as lines, stdio_server(lines) as (read, write):  # type: ignore[arg-type]
            await self.server.run(read, write, self.server.create_initialization_options())

    async def serve_http(
        self, listener: socket.socket, *, path: str = "/mcp", host: str = "", allow_hosts: Collection[str] = ()
    ) -> None:
        """Serves clients over streamable HTTP at `path` of `listener`, a bound socket, until SIGINT or SIGTERM. `host` is
        the name that it was bound to, if any; `allow_hosts`: see `server_config`."""
        import uvicorn
        from mcp.server.transport_security import TransportSecuritySettings
        from mcp_types import RequestParams

        from etude.serving.listening import server_config

        self.server.add_request_handler("server/discover", RequestParams, self._discover)
        app = self.server.streamable_http_app(
            streamable_http_path=path,
            transport_security=TransportSecuritySettings(
                enable_dns_rebinding_protection=False
            ),  # `server_config` has ours
            max_request_body_size=MAX_REQUEST_BYTES,
            session_idle_timeout=SESSION_IDLE_SECONDS,
            max_sessions=MAX_SESSIONS,
        )
        host = host or listener.getsockname()[0]
        config = server_config(app, host, allow_hosts, log_level="warning", timeout_graceful_shutdown=5, lifespan="on")
        await uvicorn.Server(config).serve(sockets=[listener])

    @asynccontextmanager
    async def _lifespan(self, server: Server[Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            yield {}
        finally:
            if self._only is not None:
                await self._only.close()

    async def _list_tools(self, context: Any, params: Any) -> Any:
        from mcp_types import ListToolsResult, Tool

        listed = [
            Tool(
                name=tool.name,
                description=tool.get_openai_tool_schema().function.description or None,
                input_schema=_parameters(tool),
            )
            for tool in self._tools.values()
        ]
        return ListToolsResult(tools=listed)

    async def _call_tool(self, context: Any, params: Any) -> CallToolResult:
        from mcp_types import CallToolResult

        session = self._only or self._session_of(context)
        response, is_error = await session.call(params.name, params.arguments or {})
        return CallToolResult(content=content_of(response), is_error=is_error)

    def _session_of(self, context: Any) -> ClientSession:
        """Returns the session of the request's connection, and has the connection close it; the SDK gives no public access
        to a connection."""
        connection = context.session._connection
        session = connection.state.get(_STATE)
        if session is None:
            session = connection.state[_STATE] = ClientSession(self._tools, self._tools_kwargs)
            connection.exit_stack.push_async_callback(session.close)
        return session

    async def _discover(self, context: Any, params: Any) -> Any:
        """Offers only versions whose handshake opens a session, so that clients fall back to one of them."""
        from mcp_types import DiscoverResult
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

        return DiscoverResult(
            supported_versions=list(HANDSHAKE_PROTOCOL_VERSIONS),
            capabilities=self.server.get_capabilities(protocol_version=context.protocol_version),
        )


def content_of(response: ToolResponse) -> list[ContentBlock]:
    """Converts a tool's response to MCP content: its text, then its images as PNG; other media become a text note."""
    from mcp_types import ImageContent, TextContent

    blocks: list[ContentBlock] = []
    if response.text:
        blocks.append(TextContent(type="text", text=response.text))
    for image in response.image or []:
        data = _png(image)
        if data is None:
            blocks.append(
                TextContent(type="text", text=f"[image of type {type(image).__name__}, which cannot be sent]")
            )
        else:
            blocks.append(ImageContent(type="image", data=data, mime_type="image/png"))
    blocks.extend(TextContent(type="text", text="[video, which cannot be sent]") for _ in response.video or [])
    return blocks


def _png(image: Any) -> str | None:
    """Encodes a PIL image as a base64 PNG; returns None for anything else."""
    from PIL.Image import Image

    if not isinstance(image, Image):
        return None
    file = io.BytesIO()
    shown = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else image.convert("RGB")
    shown.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def _parameters(tool: BaseTool) -> dict[str, Any]:
    schema = tool.get_openai_tool_schema().to_openai()["function"].get("parameters") or {}
    return {"type": "object", **schema}


@asynccontextmanager
async def _claimed_stdin() -> AsyncIterator[AsyncIterator[str]]:
    """Yields the lines of stdin, read in the event loop: the SDK's own reader is a thread, which no signal can end.
    Meanwhile file descriptor 0 is /dev/null; the SDK redirects stdout to stderr."""
    wire, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    try:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(wire), "rb", buffering=0)
        )
        try:
            yield _lines(reader)
        finally:
            pipe.close()
    finally:
        os.dup2(wire, 0)
        os.close(wire)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            line = await reader.readline()
        except ValueError:
            logger.warning("a message of more than %d bytes was dropped", MAX_LINE_BYTES)
            continue
        if not line:
            return
        yield line.decode("utf-8", "replace")
