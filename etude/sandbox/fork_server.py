"""The host's side of a fork server, the process that builds a jail and forks boxes in it.

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

from etude.bounded import uninterrupted, within
from etude.errors import one_line
from etude.sandbox import jail
from etude.sandbox.guest.settings import Settings
from etude.sandbox.guests import DEATH_SECONDS, BoxGoneError, Connection, Guest
from etude.sandbox.types import Isolation, SandboxError

START_SECONDS = 30.0
FORK_SECONDS = 15.0


class ForkServer:
    """A handle to a running fork server. Bound to the event loop that started it."""

    def __init__(self, isolation: Isolation, settings: Settings, libraries: tuple[str, ...]) -> None:
        self._settings = settings
        self._pidfd = -1
        self._scratch = jail.jail_scratch()
        ours, theirs = socket.socketpair()
        self._control = Connection(ours)
        try:
            with theirs, open(self._scratch.folder / "log", "wb") as log:
                control = theirs.fileno()
                self._process = subprocess.Popen(
                    jail.command_line(isolation, self._scratch.folder, libraries, control, settings),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                    cwd="/",
                    pass_fds=(control,),
                    start_new_session=True,
                )
        except BaseException as error:
            self._control.close()
            self._scratch.remove()
            if isinstance(error, OSError):
                raise SandboxError(f"the {isolation.value} jail did not start: {one_line(error)}") from error
            raise

    @classmethod
    async def start(cls, isolation: Isolation, settings: Settings, libraries: tuple[str, ...] = ()) -> ForkServer:
        """Starts a fork server in a jail that contains the folders `libraries`, and waits until it is ready.

        Raises:
            SandboxError: it does not start; the message says why.
        """
        fork_server = cls(isolation, settings, libraries)
        try:
            fork_server._pidfd = await within(START_SECONDS, fork_server._control.receive_descriptor)
            if fork_server._pidfd < 0:
                raise SandboxError(f"the {isolation.value} jail did not start: {fork_server._log()}")
        except TimeoutError as error:
            await fork_server.close()
            raise SandboxError(f"the {isolation.value} jail did not start within {START_SECONDS:g} s") from error
        except BaseException:
            await fork_server.close()
            raise
        return fork_server

    @property
    def alive(self) -> bool:
        """Whether the connection to it is open."""
        return self._control.alive

    async def fork(self, output_bytes: int) -> Guest:
        """Forks a box, keeping at most `output_bytes` each of its stdout and stderr.

        Raises:
            BoxGoneError: the fork server has ended or does not answer, or the box ended immediately.
            SandboxError: there are not enough file descriptors for another box.
        """
        opened: list[int] = []
        try:
            for _ in range(3):
                opened += os.pipe()
            for _ in range(2):
                opened += [end.detach() for end in socket.socketpair()]
        except OSError as error:
            for fd in opened:
                os.close(fd)
            raise SandboxError(f"no descriptors for another box: {one_line(error)}") from error
        stdin_end, stdin, stdout, stdout_end, stderr, stderr_end, control, control_end, cells, cells_end = opened
        ends, ours = (
            (stdin_end, stdout_end, stderr_end, control_end, cells_end),
            (stdin, stdout, stderr, control, cells),
        )
        guest = Guest(ours, output_bytes, isolated=self._settings.isolated, outlived=self.answers)
        try:
            try:
                await within(FORK_SECONDS, self._control.send_descriptors, ends)
            finally:
                for fd in ends:
                    os.close(fd)
            await within(FORK_SECONDS, guest.wait_started)
        except BaseException as error:
            await uninterrupted(guest.close())
            if isinstance(error, TimeoutError):
                self._control.close()
                raise BoxGoneError(f"the fork server did not fork within {FORK_SECONDS:g} s") from error
            if isinstance(error, OSError):
                raise BoxGoneError(f"the fork server is gone: {one_line(error)}") from error
            raise
        return guest

    async def answers(self) -> bool:
        """Whether it still forks boxes. A killed one never does, even while its processes are still exiting."""
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
        """Ends the fork server and all its boxes."""
        self._control.close()
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
