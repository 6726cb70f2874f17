"""The host's side of a fork server, the process that builds a jail and forks containers in it.

Invariant: `close` ends the jail with all its processes and removes its files. When the host ends, so do the processes, since
the fork server exits when its socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess

from etude.errors import one_line
from etude.sandbox import jail
from etude.sandbox.container import DEATH_SECONDS, Container, ContainerGoneError, readable, receive_descriptor
from etude.sandbox.guest.settings import Settings
from etude.sandbox.types import Isolation, SandboxError

START_SECONDS = 30.0
FORK_SECONDS = 15.0


class ForkServer:
    """A handle to a running fork server. Bound to the event loop that started it."""

    def __init__(
        self, isolation: Isolation, settings: Settings, libraries: tuple[str, ...], folders: tuple[str, ...]
    ) -> None:
        self.isolated = settings.isolated
        self._pidfd = -1
        self._scratch = jail.jail_scratch()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            with theirs, open(self._scratch.folder / "log", "wb") as log:
                control = theirs.fileno()
                self._process = subprocess.Popen(
                    jail.command_line(isolation, self._scratch.folder, libraries, control, settings, folders),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                    cwd="/",
                    pass_fds=(control,),
                    start_new_session=True,
                )
        except BaseException as error:
            self._socket.close()
            self._scratch.remove()
            if isinstance(error, OSError):
                raise SandboxError(f"the {isolation.value} jail did not start: {one_line(error)}") from error
            raise

    @classmethod
    async def start(
        cls, isolation: Isolation, settings: Settings, libraries: tuple[str, ...] = (), folders: tuple[str, ...] = ()
    ) -> ForkServer:
        """Starts a fork server in a jail that contains the folders `libraries`, and `folders` at their own paths, and waits
        until it is ready.

        Raises:
            SandboxError: it does not start; the message says why.
        """
        fork_server = cls(isolation, settings, libraries, folders)
        try:
            if not await readable(fork_server._socket.fileno(), START_SECONDS):
                raise SandboxError(f"the {isolation.value} jail did not start within {START_SECONDS:g} s")
            fork_server._pidfd = receive_descriptor(fork_server._socket)
            if fork_server._pidfd < 0:
                raise SandboxError(f"the {isolation.value} jail did not start: {fork_server._log()}")
        except BaseException:
            await fork_server.close()
            raise
        return fork_server

    @property
    def alive(self) -> bool:
        """Whether the connection to it is open."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def fork(self, output_bytes: int) -> Container:
        """Forks a container, keeping at most `output_bytes` each of its stdout and stderr.

        Raises:
            ContainerGoneError: the fork server has ended or does not answer, or the container ended immediately.
            SandboxError: there are not enough file descriptors for another container.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FORK_SECONDS
        opened: list[int] = []
        try:
            for _ in range(3):
                opened += os.pipe()
            for _ in range(2):
                opened += [end.detach() for end in socket.socketpair()]
        except OSError as error:
            for fd in opened:
                os.close(fd)
            raise SandboxError(f"no descriptors for another container: {one_line(error)}") from error
        stdin_end, stdin, stdout, stdout_end, stderr, stderr_end, control, control_end, cells, cells_end = opened
        ends = (stdin_end, stdout_end, stderr_end, control_end, cells_end)
        for fd in (stdin_end, stdout_end, stderr_end):
            os.fchmod(fd, 0o666)  # programs open /dev/stdin by name, also as another user than the pipe's
        container = Container(self.isolated, self.answers, (stdin, stdout, stderr, control, cells), output_bytes)
        try:
            try:
                while not _send_descriptors(self._socket, ends):
                    if loop.time() > deadline:
                        raise TimeoutError
                    await asyncio.sleep(0.01)
            finally:
                for fd in ends:
                    os.close(fd)
            if not await readable(control, deadline - loop.time()):
                raise TimeoutError
            container.pidfd = receive_descriptor(container.control.socket)
            if container.pidfd < 0:
                raise ContainerGoneError("the container ended before it had its request")
        except BaseException as error:
            await container.close()
            if isinstance(error, TimeoutError):
                self._socket.close()
                raise ContainerGoneError(f"the fork server did not fork within {FORK_SECONDS:g} s") from error
            if isinstance(error, OSError):
                raise ContainerGoneError(f"the fork server is gone: {one_line(error)}") from error
            raise
        return container

    async def answers(self) -> bool:
        """Whether it still forks containers. A killed one never does, even while its processes are still exiting."""
        try:
            await (await self.fork(1)).close()
        except SandboxError:
            return False
        return True

    def _log(self) -> str:
        with contextlib.suppress(OSError):
            text = (self._scratch.folder / "log").read_bytes()[-1000:].decode("utf-8", "replace")
            return " ".join(text.split()) or "without a word"
        return "without a word"

    async def close(self) -> None:
        """Ends the fork server and all its containers."""
        self._socket.close()
        if self._pidfd >= 0:
            pidfd, self._pidfd = self._pidfd, -1
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        else:
            self._process.kill()  # it was never ready; processes that it started exit when their socket closes
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEATH_SECONDS
        while self._process.poll() is None and loop.time() < deadline:
            await asyncio.sleep(0.005)
        self._process.kill()  # no-op if it has ended
        self._scratch.remove()


def _send_descriptors(end: socket.socket, fds: tuple[int, ...]) -> bool:
    """Sends file descriptors in one message; returns False if the other side has to read first.

    Raises:
        OSError: the other side is disconnected.
    """
    try:
        socket.send_fds(end, [b"\0"], fds)
    except BlockingIOError:
        return False
    return True
