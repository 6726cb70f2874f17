"""Bounded streams of messages: of a server that is a subprocess, and of an HTTP answer.

Invariant: a message longer than the limit ends its stream, so that whoever waits for it fails at once, and it costs memory
and time in proportion to the limit, not to its length. A subprocess is gone when its streams are closed: it has 2 s to
leave after its stdin is closed, 2 s after SIGTERM to its group, and is then killed.

The SDK's own stdio transport joins what it has read of a line anew with every piece that arrives (26 s for 50 MB,
measured), which would stop every other connection of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from etude.bounded import settle
from etude.tools.mcp.options import McpServer

_PATIENCE_SECONDS = 2.0  # after stdin is closed, and again after SIGTERM
_POLL_SECONDS = 0.01
_LAST_WORDS_SECONDS = 0.5
_SHOWN_CHARS = 300

_stopping: set[asyncio.Task[None]] = set()  # kept from the garbage collector


@asynccontextmanager
async def subprocess_streams(server: McpServer, hear: Callable[[str], None]) -> AsyncIterator[tuple[Any, Any]]:
    """(messages from the server, messages to it) of a subprocess; `hear` gets each line of its stderr.

    It sees of our environment only what the SDK deems safe (HOME, PATH and the like), and `server.env`. The command
    `python` is the Python that runs here, whether or not its virtual environment is activated.

    Raises:
        OSError: the command cannot be started.
    """
    import anyio
    from mcp.client.stdio import get_default_environment

    command = sys.executable if server.command in ("python", "python3") else server.command
    process = await asyncio.create_subprocess_exec(
        command,
        *server.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=get_default_environment() | dict(server.env),
        cwd=server.cwd,
        limit=server.max_message_bytes,
        start_new_session=True,
    )
    to_reader, from_server = anyio.create_memory_object_stream[Any](0)
    to_server, from_writer = anyio.create_memory_object_stream[Any](0)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    listening = asyncio.ensure_future(_listen(process.stderr, hear))
    traffic = [
        asyncio.ensure_future(_read(process.stdout, to_reader, hear)),
        asyncio.ensure_future(_write(process.stdin, from_writer, to_reader)),
    ]
    try:
        yield from_server, to_server
    finally:
        stopping = asyncio.ensure_future(_stop(process, traffic, listening))
        _stopping.add(stopping)
        stopping.add_done_callback(_stopping.discard)
        for stream in (from_server, to_server, to_reader, from_writer):
            stream.close()
        await asyncio.shield(stopping)


async def _read(stdout: asyncio.StreamReader, to_reader: Any, hear: Callable[[str], None]) -> None:
    """Hands over each message; what is none is heard, and a line that is too long ends the stream."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    with to_reader, contextlib.suppress(Exception):  # whatever ends it, the session sees the end of the stream
        while True:
            try:
                line = await stdout.readline()
            except ValueError:
                hear("a message was longer than max_message_bytes")
                return
            if not line:
                return
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                hear(f"on stdout: {_shown(line)}")
                continue
            await to_reader.send(SessionMessage(message))


async def _write(stdin: asyncio.StreamWriter, from_writer: Any, to_reader: Any) -> None:
    with contextlib.suppress(Exception):
        async for item in from_writer:
            stdin.write(
                item.message.model_dump_json(by_alias=True, exclude_unset=True).encode("utf-8", "replace") + b"\n"
            )
            await stdin.drain()
        return
    to_reader.close()  # it does not read any more: nobody should wait for its answers


async def _listen(stderr: asyncio.StreamReader, hear: Callable[[str], None]) -> None:
    while True:
        try:
            line = await stderr.readline()
        except ValueError:
            continue
        if not line:
            return
        hear(_shown(line))


def _shown(line: bytes) -> str:
    return line[: 4 * _SHOWN_CHARS].decode("utf-8", "replace").strip()[:_SHOWN_CHARS]


async def _stop(
    process: asyncio.subprocess.Process, traffic: list[asyncio.Task[None]], listening: asyncio.Task[None]
) -> None:
    """Ends the process and everything in its group."""
    await asyncio.wait(traffic[1:], timeout=_POLL_SECONDS)  # what was handed over is written
    if process.stdin is not None:
        process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await _has_left(process):
            break
        _signal_group(process, number)
    await _has_left(process)
    _signal_group(process, signal.SIGKILL)  # what it started and left behind
    await asyncio.wait({listening}, timeout=_LAST_WORDS_SECONDS)
    await settle([*traffic, listening])
    transport = getattr(process, "_transport", None)
    if transport is not None:  # else it stays open while a descendant holds a pipe
        transport.close()


async def _has_left(process: asyncio.subprocess.Process) -> bool:
    """Whether it ends within two seconds; not `process.wait()`, which also waits for whoever inherited its pipes."""
    for _ in range(round(_PATIENCE_SECONDS / _POLL_SECONDS)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(_POLL_SECONDS)
    return False


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def bounded_stream(stream: Any, limit: int) -> Any:
    """The body of an HTTP response, which fails once more than `limit` bytes of it have arrived."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in stream:
                size += len(piece)
                if size > limit:
                    raise httpx2.StreamError(f"an answer of more than {limit} bytes")
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()
