"""`Container`: one forked container as the host holds it, from its request to its result.

Invariant: a container is used for one run or one session and never again. `close` leaves none of its processes alive (its
PID namespace ends with its supervisor, which the host holds by a pidfd) and no descriptor open. A result is built after
every process has exited and all output has been read. A report of `broken`, or a missing one because the program never
started, is a failure of the sandbox; anything else is how the program itself ended.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import re
import signal
import socket
import sys
import termios
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.errors import one_line
from etude.sandbox.cgroup import Group
from etude.sandbox.guest import cells, messages
from etude.sandbox.languages import RECIPES
from etude.sandbox.types import (
    CommandRequest,
    Limits,
    RunRequest,
    RunResult,
    RunStatus,
    SandboxError,
    SandboxRequestError,
)
from etude.timeouts import set_outcome, settle, uninterrupted

DEATH_SECONDS = 10.0
GRACE_SECONDS = 10.0
"""Seconds that a supervisor may take beyond its program's limits before the host kills the container."""
_CHUNK = 1 << 16


class ContainerGoneError(SandboxError):
    """A container failed before any of its request ran, so the request can be retried in another one."""


class Container:
    """The host's ends of a container's connections, and the pidfd of its supervisor."""

    def __init__(
        self, isolated: bool, server_answers: Callable[[], Awaitable[bool]], fds: Sequence[int], output_bytes: int
    ) -> None:
        """`server_answers`: whether the fork server that made it still forks. `fds`: connections to stdin, stdout, stderr,
        supervisor and session; at most `output_bytes` are kept of each output."""
        stdin, stdout, stderr, control, session = fds
        self.isolated, self.server_answers = isolated, server_answers
        self.stdout, self.stderr = Output(stdout, output_bytes), Output(stderr, output_bytes)
        self.control = Connection(control, messages.MAX_JSON, messages.MAX_PAYLOAD)
        self.cells = Connection(session, cells.MAX_HEADER, cells.MAX_ANSWER)
        self.pidfd = -1
        self.out_of_memory = False
        self._stdin = os.fdopen(stdin, "wb", 0)
        self._feed: asyncio.WriteTransport | None = None
        self._group: Group | None = None
        self._late = False
        self._closing: asyncio.Task[None] | None = None
        self._relay: Relay | None = None

    async def run(self, request: RunRequest) -> RunResult:
        """Runs `request`, and closes the container.

        Raises:
            ContainerGoneError: the container failed before the program started.
            SandboxError: the container failed later.
            SandboxRequestError: the files do not fit into the container.
        """
        loop = asyncio.get_running_loop()
        compiling = request.compile_seconds if RECIPES[request.language].compile else 0.0
        seconds = request.limits.wall_seconds + compiling + GRACE_SECONDS
        timer = loop.call_later(seconds, self._expire)
        report: Mapping[str, Any] | None = None
        files: messages.Parts = []
        started = False
        try:
            await self.feed((request.stdin or "").encode("utf-8", "surrogatepass"))
            await self.control.send(run_message(request), _parts(request))
            if isinstance(request, CommandRequest) and request.port is not None and self.isolated:
                if not await readable(self.control.socket.fileno(), GRACE_SECONDS):
                    raise ContainerGoneError("the container has no port")
                self._relay = await Relay.start(receive_descriptor(self.control.socket), request.port)
            while report is None and (received := await self.control.receive()) is not None:
                if received[0].get("event") == "started":
                    started = True
                elif received[0].get("event") == "ended":
                    report, files = received
                elif started:  # a program that has started may have tampered with its supervisor
                    break
                else:
                    raise failure(received[0])
        except OSError as error:
            if not self._late:
                raise ContainerGoneError(f"the container broke off: {one_line(error)}") from error
        except messages.MessageError as error:
            raise SandboxError(f"the container sent an invalid message: {error}") from error
        finally:
            timer.cancel()
            closed = self._closing is not None  # with the executor
            await self.close()
        if report is None:
            if closed:
                raise SandboxError("the sandbox was closed while the program ran")
            if not started and not self._late:
                raise ContainerGoneError("the container ended before its program started")
            if not self._late and not await self.server_answers():
                raise SandboxError("the sandbox died while the program ran")
            report = {"status": "time_limit", "wall_seconds": seconds} if self._late else {"status": "killed"}
        if self.out_of_memory and report["status"] in ("finished", "killed"):
            report = {**report, "status": "memory_limit", "code": None}
        (out, out_cut), (err, err_cut) = self.stdout.take(), self.stderr.take()
        compiled = report.get("compile")
        return RunResult(
            **_ending(report),
            stdout=out,
            stderr=err,
            stdout_truncated=out_cut,
            stderr_truncated=err_cut,
            compile=compiled and RunResult(**_ending(compiled), stdout=compiled["stdout"], stderr=compiled["stderr"]),
            files={name: content for name, content in files if name},
            folder=dict(files).get(""),
            refused_files=report.get("refused", {}),
        )

    async def feed(self, data: bytes) -> None:
        """Writes standard input in the background, as fast as the program reads, and then closes it."""
        if data:
            loop = asyncio.get_running_loop()
            self._feed, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._stdin)
            self._feed.write(data)
            self._feed.write_eof()
        else:
            self._stdin.close()

    def admit(self, group: Group, limits: Limits, cpus: float) -> None:
        """Moves the container, which is waiting for its request, into its own control group.

        Raises:
            ContainerGoneError: the container has ended.
            SandboxError: the group cannot be written.
        """
        self._group = group
        try:
            group.admit(_process_of(self.pidfd))
        except OSError as error:
            raise ContainerGoneError(f"the container ended before it had a control group: {one_line(error)}") from error
        group.limit(limits, cpus)

    def _expire(self) -> None:
        self._late = True
        self.kill()

    def kill(self) -> None:
        """Ends the container: the kernel kills its processes, and whatever waits for its messages gets the end of them."""
        if self.pidfd >= 0 and self.isolated:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.control.shut_down()  # without isolation, the supervisor then kills the processes; nobody else knows them
        self.cells.shut_down()

    async def close(self) -> None:
        """Kills the container, waits until it has exited, even if the caller is cancelled, and reads the rest of its output.

        Raises:
            SandboxError: it has not exited within `DEATH_SECONDS`.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await uninterrupted(self._closing)

    async def _close(self) -> None:
        self.kill()
        try:
            if self.pidfd >= 0 and not await readable(self.pidfd, DEATH_SECONDS):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                raise SandboxError(f"a container is still alive {DEATH_SECONDS:g} s after its end")
        finally:
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1
            if self._group is not None:
                self.out_of_memory = self._group.out_of_memory()
                self._group.close()
            if self._relay is not None:
                await self._relay.close()
            self.control.close()
            self.cells.close()
            if self._feed is not None and self._feed.get_write_buffer_size():
                self._feed.abort()
            self._stdin.close()
            for output in (self.stdout, self.stderr):
                output.drain()
                output.close()


def run_message(request: RunRequest, session: bool = False) -> dict[str, Any]:
    """Returns the message to the supervisor for a request, without the files; for a `session`, only its limits matter.

    Raises:
        SandboxRequestError: a file has the name of the code's file.
    """
    recipe = RECIPES[request.language]
    message = {
        "kind": "session" if session else "run",
        "source": "" if session else recipe.source,
        "code": request.code,
        "command": recipe.command,
        "compile": recipe.compile,
        "args": list(request.args),
        "address_space": recipe.address_space,
        "environment": {},
        "folder": False,
        "port": None,
        "limits": asdict(request.limits),
        "wall_seconds": None if session else request.limits.wall_seconds,
        "compile_seconds": request.compile_seconds,
        "fetch_files": list(request.fetch_files),
    }
    if isinstance(request, CommandRequest):
        message |= {"kind": "command", "source": "", "command": list(request.command), "compile": None, "args": []}
        message |= {"address_space": False, "environment": dict(request.environment)}
        return message | {"folder": request.folder is not None, "port": request.port}
    if not session and any(name == recipe.source or name.startswith(f"{recipe.source}/") for name in request.files):
        raise SandboxRequestError(f"files: {recipe.source!r} is the name of the code itself; choose another")
    return message


def _parts(request: RunRequest) -> messages.Parts:
    """Returns the files of a request, and last, without a name, its folder."""
    folder = request.folder if isinstance(request, CommandRequest) else None
    return [*request.files.items(), *([] if folder is None else [("", folder)])]


def failure(answer: Mapping[str, Any]) -> Exception:
    """Returns the exception for a supervisor's unexpected answer."""
    if answer.get("event") == "refused":
        return SandboxRequestError(str(answer.get("error")))
    return ContainerGoneError(f"the container could not be set up: {answer.get('error')}")


def _ending(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": RunStatus(report["status"]),
        "return_code": report.get("code"),
        "wall_seconds": report.get("wall_seconds", 0.0),
        "cpu_seconds": report.get("cpu_seconds", 0.0),
    }


def _process_of(pidfd: int) -> int:
    """Returns the PID of a pidfd's process, in this process's namespace.

    Raises:
        ProcessLookupError: the process has ended.
    """
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        if line.startswith("Pid:") and int(line.split()[1]) > 0:
            return int(line.split()[1])
    raise ProcessLookupError("the process has ended")


def receive_descriptor(end: socket.socket) -> int:
    """Receives a file descriptor; returns -1 if the other side is disconnected."""
    try:
        _, fds, _, _ = socket.recv_fds(end, 1, 1)
    except OSError:
        return -1
    return fds[0] if fds else -1


class Relay:
    """What a program's only connections lead to: a port of this machine's 127.0.0.1, which has the same number inside.

    The listener was made in the container's network, which is connected to nothing; this process accepts for it.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()

    @classmethod
    async def start(cls, listener: int, port: int) -> Relay:
        """Takes over the descriptor of the listener; raises ContainerGoneError if there is none."""
        if listener < 0:
            raise ContainerGoneError("the container ended before it had its port")
        relay = cls(port)
        relay._server = await asyncio.start_server(relay._connect, sock=socket.socket(fileno=listener))
        return relay

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await settle(list(self._open))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = asyncio.current_task()
        assert own is not None
        self._open.add(own)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))
            finally:
                far_writer.close()
        except OSError:  # either end is gone: so is the other
            pass
        finally:
            writer.close()
            self._open.discard(own)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def readable(fd: int, seconds: float) -> bool:
    """Waits until a descriptor is readable (a pidfd: until its process has ended); returns False after `seconds`."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()
    loop.add_reader(fd, set_outcome, ready, True)
    timer = loop.call_later(seconds, set_outcome, ready, False)
    try:
        return await ready
    finally:
        timer.cancel()
        loop.remove_reader(fd)


class Connection:
    """The host's end of a socket to a supervisor or a session's interpreter; sends and receives messages of limited length.

    Messages over the limits are never read into memory; for the reader a disconnected peer is an end of file, not an error.
    `shut_down` ends pending operations as if the other side were disconnected; `close` comes after them.
    """

    def __init__(self, fd: int, max_json: int, max_payload: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self.socket.setblocking(False)
        self._limits = (max_json, max_payload)

    async def send(self, message: dict[str, Any], parts: Sequence[tuple[str, bytes]] = ()) -> None:
        """Sends a message.

        Raises:
            OSError: the other side is disconnected.
            SandboxRequestError: the message exceeds the maximum length.
        """
        try:
            data = messages.encode(message, parts)
        except messages.MessageError as error:
            raise SandboxRequestError(f"the request is too long: {error}") from error
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    def send_now(self, message: dict[str, Any]) -> None:
        """Sends a short message without waiting; does nothing if the peer is disconnected, or does not read."""
        with contextlib.suppress(OSError):
            self.socket.send(messages.encode(message))

    async def receive(self) -> tuple[dict[str, Any], messages.Parts] | None:
        """Receives the next message; returns None if the other side is disconnected.

        Raises:
            MessageError: the data is not a valid message.
        """
        header = await self._exactly(messages.HEADER.size)
        if header is None:
            return None
        text, payload = messages.lengths(header, *self._limits)
        body = await self._exactly(text + payload)
        return None if body is None else messages.decode(body[:text], body[text:])

    async def _exactly(self, size: int) -> bytes | None:
        parts: list[bytes] = []
        while size:
            try:
                part = await asyncio.get_running_loop().sock_recv(self.socket, min(size, 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            size -= len(part)
            if size:  # a peer that sends as fast as we read must not block the event loop
                await asyncio.sleep(0)
        return b"".join(parts)

    def shut_down(self) -> None:
        """Ends pending and later operations."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket, which the event loop no longer watches: its number may be reused."""
        if self.socket.fileno() >= 0:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self.socket)
            loop.remove_writer(self.socket)
            self.socket.close()


class Output:
    """Reads a program's output continuously, so that it never blocks on a full pipe, and truncates it.

    Of output beyond `limit` bytes, half is kept from the start and half from the end, with a note between them that says how
    many bytes are missing. Takes ownership of the pipe `fd`.
    """

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
