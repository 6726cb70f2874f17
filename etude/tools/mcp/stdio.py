"""`subprocess_streams`: the SDK's stdio transport to a subprocess, with a limit on the length of a line.

Invariant: a message longer than the limit ends the stream, so that its caller fails at once, and costs memory and time in
proportion to the limit, not to its length. Closing the streams ends the subprocess: it has 2 s to exit after its stdin is
closed, another 2 s after SIGTERM to its process group, and is then killed.

The process is started and stopped here because the SDK's `stdio_client` has no limit and rejoins a partial line with
every chunk that arrives. CPU time measured, ours and the SDK's: for a response of 5 MB 0.02 and 0.11 s, for one of 15 MB
0.06 and 1.2 s, for 100,000 lines (2 MB) on stdout that are not messages 0.2 and 3.9 s (21 s until the response); the SDK
never gives up on an endless line. The messages themselves are parsed and written by the SDK.
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

from etude.timeouts import settle
from etude.tools.mcp.options import McpServer

_PATIENCE_SECONDS = 2.0  # after stdin is closed, and again after SIGTERM
_POLL_SECONDS = 0.01
_LAST_LINES_SECONDS = 0.5
_LOGGED_CHARS = 300

_stopping: set[asyncio.Task[None]] = set()  # referenced so that none is garbage-collected


class _Out:
    """Writes text to a subprocess; `write` waits for a slow reader."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, text: str) -> None:
        self._writer.write(text.encode("utf-8", "replace"))
        await self._writer.drain()

    async def flush(self) -> None:
        """Does nothing: `write` drains."""


@asynccontextmanager
async def subprocess_streams(server: McpServer, log_line: Callable[[str], None]) -> AsyncIterator[tuple[Any, Any]]:
    """Starts the subprocess and yields (stream of messages from the server, stream of messages to it). `log_line` is called
    with each line of its stderr, and with lines of its stdout that are not messages.

    It inherits the environment variables that the SDK deems safe (HOME, PATH and the like), plus `server.env`. The
    command `python` is the current interpreter, whether or not its virtual environment is activated.

    Raises:
        OSError: the command cannot be started.
    """
    from mcp.client.stdio import get_default_environment
    from mcp.server.stdio import stdio_server

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
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stderr = asyncio.ensure_future(_log_stderr(process.stderr, log_line))
    incoming: Any = _messages(process.stdout, log_line)
    outgoing: Any = _Out(process.stdin)
    stopping: asyncio.Task[None] | None = None
    try:
        # The SDK's framing is the same on both ends: a server reads from stdin what a client reads from a pipe.
        async with stdio_server(incoming, outgoing) as (read, write):
            try:
                yield read, write
            finally:
                stopping = asyncio.ensure_future(_stop(process, stderr))  # closes the pipes, and so the transport
                read.close()
                write.close()
    finally:
        stopping = stopping or asyncio.ensure_future(_stop(process, stderr))
        _stopping.add(stopping)
        stopping.add_done_callback(_stopping.discard)
        await asyncio.shield(stopping)


async def _messages(stdout: asyncio.StreamReader, log_line: Callable[[str], None]) -> AsyncIterator[bytes]:
    """Yields the lines of stdout that look like messages, until one is too long."""
    while True:
        try:
            line = await stdout.readline()
        except ValueError:
            log_line("a message was longer than max_message_bytes")
            return
        if not line:
            return
        if line.lstrip().startswith(b"{"):
            yield line
        else:
            log_line(f"on stdout: {_truncate(line)}")


async def _log_stderr(stderr: asyncio.StreamReader, log_line: Callable[[str], None]) -> None:
    while True:
        try:
            line = await stderr.readline()
        except ValueError:  # longer than the limit: dropped
            continue
        if not line:
            return
        log_line(_truncate(line))


def _truncate(line: bytes) -> str:
    return line[: 4 * _LOGGED_CHARS].decode("utf-8", "replace").strip()[:_LOGGED_CHARS]


async def _stop(process: asyncio.subprocess.Process, stderr: asyncio.Task[None]) -> None:
    """Ends the process and everything in its group."""
    if process.stdin is not None:
        process.stdin.close()  # flush pending messages first
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await _exits(process):
            break
        _signal_group(process, number)
    await _exits(process)
    _signal_group(process, signal.SIGKILL)  # children that are still running
    await asyncio.wait({stderr}, timeout=_LAST_LINES_SECONDS)
    await settle([stderr])
    transport = getattr(process, "_transport", None)
    if transport is not None:  # otherwise it stays open while a descendant holds a pipe
        transport.close()


async def _exits(process: asyncio.subprocess.Process) -> bool:
    """Whether the process exits within two seconds; polls, as `process.wait()` also waits for children that hold its
    pipes."""
    for _ in range(round(_PATIENCE_SECONDS / _POLL_SECONDS)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(_POLL_SECONDS)
    return False


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
