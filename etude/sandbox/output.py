"""`Capture`: reads a program's output continuously and truncates it.

Invariant: a program's output is always read, so that it never blocks on a full pipe. Of output beyond the limit, half is
kept from the start and half from the end, with a note between them that says how many bytes are missing.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import os
import re
import sys
import termios

_CHUNK = 1 << 16


class Capture:
    """Reads a pipe to its end on the event loop. Takes ownership of the descriptor `fd`; `limit` in bytes."""

    def __init__(self, fd: int, limit: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def take(self) -> tuple[str, bool]:
        """Returns the output since the last call, and whether it was truncated."""
        self.drain()
        head, total = bytes(self._head), self._total
        tail = bytes(self._tail[-self._tail_limit :]) if self._tail_limit else b""
        self._head.clear()
        self._tail.clear()
        self._total = 0
        missing = total - len(head) - len(tail)
        if not missing:
            return (head + tail).decode("utf-8", "replace"), False
        # Drop a character cut in two at the end of the head, and at the start of the tail.
        start = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
        end = re.sub(rb"^[\x80-\xbf]{1,3}", b"", tail).decode("utf-8", "replace")
        return f"{start}\n… [{missing} bytes left out] …\n{end}", True

    def drain(self) -> None:
        """Reads what is available now, but not what arrives meanwhile, which may be endless."""
        if self._fd >= 0:
            left = int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)), sys.byteorder)
            while left > 0 and (size := self._read()):
                left -= size

    def close(self) -> None:
        """Stops reading."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> int:
        """Reads a chunk and returns its number of bytes; 0 if nothing is available, or at the end."""
        try:
            chunk = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return 0
        size = len(chunk)
        self._total += size
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > 2 * self._tail_limit + _CHUNK:  # trim rarely, so that each byte is moved about once
            del self._tail[: len(self._tail) - self._tail_limit]
        return size
