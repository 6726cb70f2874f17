"""`Guest`, the host's handle to a box: its connections and the pidfd of its supervisor.

Invariant: a `Guest` is used for one run or one session and never again. `close` always leaves none of its processes alive
(its PID namespace ends with its supervisor, which the host holds by a pidfd) and no descriptor open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from etude.bounded import wake, within
from etude.errors import one_line
from etude.sandbox.cgroup import Group
from etude.sandbox.guest import cells, frames
from etude.sandbox.output import Capture
from etude.sandbox.types import Limits, SandboxError, SandboxRequestError

DEATH_SECONDS = 10.0


class BoxGoneError(SandboxError):
    """A box failed before any of its request ran, so the request can be retried in another one."""


class Connection:
    """The host's end of a socket to a fork server, a supervisor or a session's interpreter; sends and receives frames of
    limited length.

    Frames over the limits are never read into memory; for the reader a disconnected peer is an end of file, not an error.
    `close` ends pending operations before it closes the descriptor: the event loop never watches a number that may be
    reused.
    """

    def __init__(
        self, end: socket.socket, max_json: int = frames.MAX_JSON, max_payload: int = frames.MAX_PAYLOAD
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._limits = (max_json, max_payload)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Callable[[int], object], asyncio.Future[None]] = {}

    @property
    def alive(self) -> bool:
        """Whether both sides are connected."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def send(self, message: dict[str, Any], parts: Sequence[tuple[str, bytes]] = ()) -> None:
        """Sends a frame.

        Raises:
            ConnectionError: the other side is disconnected.
            SandboxRequestError: the message exceeds the maximum frame length.
        """
        try:
            rest = memoryview(frames.encode(message, parts))
        except frames.FrameError as error:
            raise SandboxRequestError(f"the request is too long: {error}") from error
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            except OSError as error:
                raise ConnectionError(f"the other side is gone: {error.strerror}") from error

    async def receive(self) -> tuple[dict[str, Any], frames.Parts] | None:
        """Receives the next frame; returns None if the other side is disconnected.

        Raises:
            FrameError: the data is not a valid frame.
        """
        header = await self._exactly(frames.HEADER.size)
        if header is None:
            return None
        text, payload = frames.lengths(header, *self._limits)
        body = await self._exactly(text + payload)
        return None if body is None else frames.decode(body[:text], body[text:])

    async def send_descriptors(self, fds: Sequence[int]) -> None:
        """Sends file descriptors in one message.

        Raises:
            OSError: the other side is disconnected.
        """
        while True:
            try:
                socket.send_fds(self._socket, [b"\0"], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)

    async def receive_descriptor(self) -> int:
        """Receives a file descriptor; returns -1 if the other side is disconnected."""
        await self._ready(self._loop.add_reader, self._loop.remove_reader)
        try:
            _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError:
            return -1
        return fds[0] if fds else -1

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
            if size:  # a peer that sends as fast as we read must not block the event loop
                await asyncio.sleep(0)
        return b"".join(parts)

    async def _ready(self, watch: Callable[..., object], unwatch: Callable[[int], object]) -> None:
        """Waits until the socket is readable or writable, or closed by `close`."""
        waiter = self._waiting[unwatch] = self._loop.create_future()
        watch(self._socket.fileno(), wake, waiter)
        try:
            await waiter
        finally:
            if self._waiting.pop(unwatch, None) is not None:  # otherwise `close` has done it
                unwatch(self._socket.fileno())

    def close(self) -> None:
        """Closes the socket; pending receives return as if the other side were disconnected."""
        while self._waiting:
            unwatch, waiter = self._waiting.popitem()
            unwatch(self._socket.fileno())
            wake(waiter)
        self._socket.close()


class Guest:
    """A box, with the host's ends of all its connections."""

    def __init__(
        self, fds: Sequence[int], output_bytes: int, *, isolated: bool, outlived: Callable[[], Awaitable[bool]]
    ) -> None:
        """`fds`: connections to stdin, stdout, stderr, supervisor and session. `outlived`: returns whether the sandbox
        still answers; if so, the cause of a failure was inside the box."""
        self.isolated, self.outlived = isolated, outlived
        stdin, stdout, stderr, control, session = fds
        self._stdin = os.fdopen(stdin, "wb", 0)
        self._feed: asyncio.WriteTransport | None = None
        self.stdout, self.stderr = Capture(stdout, output_bytes), Capture(stderr, output_bytes)
        self.control = Connection(socket.socket(fileno=control))
        self.cells = Connection(socket.socket(fileno=session), cells.MAX_HEADER, cells.MAX_ANSWER)
        self._pidfd = -1
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._group: Group | None = None
        self.out_of_memory = False

    async def wait_started(self) -> None:
        """Waits until the box's supervisor has started.

        Raises:
            BoxGoneError: it has already ended.
        """
        self._pidfd = await self.control.receive_descriptor()
        if self._pidfd < 0:
            raise BoxGoneError("the box ended before it had its request")
        self._loop.add_reader(self._pidfd, self._died)

    def admit(self, group: Group, limits: Limits, cpus: float) -> None:
        """Moves the box, which is waiting for its request, into its own control group.

        Raises:
            BoxGoneError: the box has ended.
            SandboxError: the group cannot be written.
        """
        self._group = group
        try:
            group.admit(_process_of(self._pidfd))
        except OSError as error:
            raise BoxGoneError(f"the box was gone before it had a control group: {one_line(error)}") from error
        group.limit(limits, cpus)

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._group is not None:
            self.out_of_memory = self._group.out_of_memory()
            self._group.close()
        self._gone.set()

    def kill(self) -> None:
        """Kills the supervisor, and with it the whole box."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def feed(self, data: bytes) -> None:
        """Writes standard input in the background, as fast as the program reads, and then closes it."""
        self._feed, _ = await self._loop.connect_write_pipe(asyncio.BaseProtocol, self._stdin)
        self._feed.write(data)
        self._feed.write_eof()

    async def close(self) -> None:
        """Ends the box, waits until it has exited, and reads the rest of its output.

        Raises:
            SandboxError: the box has not exited within `DEATH_SECONDS`.
        """
        if self.isolated:
            self.kill()
        self.control.close()  # without isolation, the supervisor then kills the box's processes; nobody else knows them
        try:
            if self._pidfd >= 0:
                await within(DEATH_SECONDS, self._gone.wait)
        except TimeoutError as error:
            self.kill()
            raise SandboxError(f"a box is still alive {DEATH_SECONDS:g} s after its end") from error
        finally:
            self.cells.close()
            if self._feed is not None and self._feed.get_write_buffer_size():
                self._feed.abort()
            self._stdin.close()
            for capture in (self.stdout, self.stderr):
                capture.drain()
                capture.close()


def _process_of(pidfd: int) -> int:
    """Returns the PID of a pidfd's process, in this process's namespace.

    Raises:
        ProcessLookupError: the process has ended.
    """
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        if line.startswith("Pid:") and int(line.split()[1]) > 0:
            return int(line.split()[1])
    raise ProcessLookupError("the process has ended")
