"""The host's end of a socket to a supervisor or to a session's interpreter: frames, within limits of length.

Invariant: no more than the limits allow is ever read into memory, and a peer that is gone is an end, not an error.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from etude.sandbox.guest import frames


class Connection:
    """Frames over a socket to a supervisor or a session, within limits of length."""

    def __init__(self, end: socket.socket, max_json: int, max_payload: int) -> None:
        end.setblocking(False)
        self._socket = end
        self._limits = (max_json, max_payload)
        self._loop = asyncio.get_running_loop()

    async def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a frame.

        Raises:
            ConnectionError: the other side is gone.
        """
        await self._loop.sock_sendall(self._socket, frames.encode(message, payload))

    async def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """The next frame; None when the other side is gone.

        Raises:
            FrameError: what came is no frame.
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
                part = await self._loop.sock_recv(self._socket, min(size, 1 << 20))
            except ConnectionError:
                part = b""
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()
