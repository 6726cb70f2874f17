"""The host's end of a socket to a supervisor or a session's interpreter: frames of bounded length.

Invariant: no more than the limits allow is ever read into memory, and a disconnected peer is an end, not an error. `close`
ends pending operations before closing the descriptor: the event loop never watches a number that may be reused.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from etude.bounded import wake
from etude.sandbox.guest import frames
from etude.sandbox.types import SandboxRequestError


class Connection:
    """Frames of bounded length over a socket to a supervisor or a session."""

    def __init__(self, end: socket.socket, max_json: int, max_payload: int) -> None:
        end.setblocking(False)
        self._socket = end
        self._limits = (max_json, max_payload)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Callable[[int], object], asyncio.Future[None]] = {}

    async def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a frame.

        Raises:
            ConnectionError: the other side is gone.
            SandboxRequestError: it is longer than a frame may be.
        """
        try:
            rest = memoryview(frames.encode(message, payload))
        except frames.FrameError as error:
            raise SandboxRequestError(f"the request is too long: {error}") from error
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            except OSError as error:
                raise ConnectionError(f"the other side is gone: {error.strerror}") from error

    async def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """The next frame; None when the other side is gone.

        Raises:
            FrameError: it is not a frame.
        """
        header = await self._exactly(frames.HEADER.size)
        if header is None:
            return None
        text, payload = frames.lengths(header, *self._limits)
        body = await self._exactly(text + payload)
        return None if body is None else (frames.decode(body[:text]), body[text:])

    async def _exactly(self, size: int) -> bytes | None:
        parts: list[bytes] = []
        while size:
            try:
                part = self._socket.recv(min(size, 1 << 20))
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError:
                part = b""
            if not part:
                return None
            parts.append(part)
            size -= len(part)
            if size:  # a peer that sends as fast as we read must not hog the event loop
                await asyncio.sleep(0)
        return b"".join(parts)

    async def _ready(self, watch: Callable[..., object], unwatch: Callable[[int], object]) -> None:
        """Waits until the socket can be read or written, or is closed here."""
        waiter = self._waiting[unwatch] = self._loop.create_future()
        watch(self._socket.fileno(), wake, waiter)
        try:
            await waiter
        finally:
            if self._waiting.pop(unwatch, None) is not None:  # otherwise `close` was first
                unwatch(self._socket.fileno())

    def close(self) -> None:
        """Hangs up; pending receives see the other side as gone."""
        while self._waiting:
            unwatch, waiter = self._waiting.popitem()
            unwatch(self._socket.fileno())
            wake(waiter)
        self._socket.close()
