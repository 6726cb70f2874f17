"""`claimed_stdio`: reserves a process's stdin and stdout for a protocol.

Invariant: while they are claimed, nothing else in the process can write into the protocol or read from it: file
descriptor 0 is empty and 1 is stderr, for this process and the ones it starts. Reading happens in the event loop, so that
it can be cancelled; a line longer than `MAX_LINE_BYTES` is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_LINE_BYTES = 16 * 1024 * 1024

logger = logging.getLogger(__name__)


class Lines:
    """The lines of a stream, as text; bytes that are not UTF-8 are replaced."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def __aiter__(self) -> Lines:
        return self

    async def __anext__(self) -> str:
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:  # longer than the limit, and dropped
                logger.warning("a message of more than %d bytes was dropped", MAX_LINE_BYTES)
                continue
            if not line:
                raise StopAsyncIteration
            return line.decode("utf-8", "replace")


class Out:
    """Text to a file descriptor, written by the loop's own writer, which waits for a slow reader."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, text: str) -> None:
        self._writer.write(text.encode("utf-8", "replace"))
        await self._writer.drain()

    async def flush(self) -> None:
        """Waits until everything is written."""


@asynccontextmanager
async def claimed_stdio() -> AsyncIterator[tuple[Lines, Out]]:
    """(lines of stdin, a writer to stdout); both descriptors are restored at the end."""
    loop = asyncio.get_running_loop()
    sys.stdout.flush()
    wire_in, wire_out = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    try:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(wire_in), "rb", buffering=0)
        )
        outgoing, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(os.dup(wire_out), "wb", buffering=0)
        )
        try:
            yield Lines(reader), Out(asyncio.StreamWriter(outgoing, protocol, None, loop))
        finally:
            incoming.close()
            outgoing.close()
    finally:
        sys.stdout.flush()
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        os.close(wire_in)
        os.close(wire_out)
