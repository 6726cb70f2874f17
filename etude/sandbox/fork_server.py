"""The host's side of a fork server: the process that builds a jail and forks boxes in it.

Invariant: `close` ends the jail and everything in it, and removes its files; so does the end of the host, since the fork
server ends with its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess

from etude.errors import one_line
from etude.sandbox import jail, launch
from etude.sandbox.guest.settings import Settings
from etude.sandbox.guests import DEATH_SECONDS, Guest
from etude.sandbox.places import jail_scratch
from etude.sandbox.types import Isolation, SandboxError

START_SECONDS = 30.0
FORK_SECONDS = 15.0


class ForkServerGone(SandboxError):
    """The fork server has ended; a new one may work."""


class ForkServer:
    """A running fork server. Bound to the event loop that started it."""

    def __init__(self, isolation: Isolation, settings: Settings, libraries: tuple[str, ...]) -> None:
        self._libraries = libraries
        self.isolation = isolation
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._births: dict[int, asyncio.Future[int | None]] = {}
        self._count = 0
        self._pidfd = -1
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._scratch = jail_scratch()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = self._launch(theirs.fileno())
        except BaseException as error:
            self._control.close()
            self._scratch.remove()
            if isinstance(error, OSError):
                raise SandboxError(f"the {isolation.value} jail did not start: {one_line(error)}") from error
            raise
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._hear)

    @classmethod
    async def start(cls, isolation: Isolation, settings: Settings, libraries: tuple[str, ...] = ()) -> ForkServer:
        """Starts one, in a jail that contains the folders `libraries`, and waits until it is ready to fork.

        Raises:
            SandboxError: it does not start here; the message says why.
        """
        fork_server = cls(isolation, settings, libraries)
        try:
            await asyncio.wait_for(asyncio.shield(fork_server._ready), START_SECONDS)
        except asyncio.TimeoutError as error:
            await fork_server.close()
            raise SandboxError(f"the {isolation.value} jail did not start within {START_SECONDS:g} s") from error
        except BaseException:
            await fork_server.close()
            raise
        return fork_server

    def _launch(self, control: int) -> subprocess.Popen[bytes]:
        plan_needed = self.isolation is not Isolation.NONE
        if plan_needed:
            plan = jail.plan_of(self._scratch.folder, self._libraries)
        if self.isolation is Isolation.BUBBLEWRAP:
            command = launch.bubblewrap(plan, control, self._settings)
        elif self.isolation is Isolation.NAMESPACES:
            command = launch.namespaces(plan, control, self._settings)
        else:
            command = launch.bare(control, self._settings)
        with open(self._scratch.folder / "log", "wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                cwd="/",
                pass_fds=(control,),
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether it can still fork."""
        return self._ready.done() and not self._ready.exception() and self._control.fileno() >= 0

    async def fork(self) -> Guest:
        """A new box.

        Raises:
            ForkServerGone: the fork server has ended, or does not answer.
            SandboxError: there are no descriptors for another box.
        """
        guest, ends = self._connected()
        self._count += 1
        number = self._count
        born = self._births[number] = self._loop.create_future()
        try:
            try:
                await asyncio.wait_for(self._send(json.dumps({"id": number}).encode(), ends), FORK_SECONDS)
            finally:
                for fd in ends:
                    os.close(fd)
            guest.born(await asyncio.wait_for(born, FORK_SECONDS))
        except BaseException as error:
            guest.discard()
            if isinstance(error, (asyncio.TimeoutError, ConnectionError)):
                stopped = isinstance(error, asyncio.TimeoutError)
                reason = f"it did not fork within {FORK_SECONDS:g} s" if stopped else one_line(error)
                self._end(ForkServerGone("the fork server is gone"))
                raise ForkServerGone(f"the fork server is gone: {reason}") from error
            if isinstance(error, OSError):
                raise SandboxError(f"the fork server was not reached: {one_line(error)}") from error
            raise
        finally:
            self._births.pop(number, None)
        return guest

    def _connected(self) -> tuple[Guest, list[int]]:
        """A guest without a box, and the box's ends of its connections."""
        with contextlib.ExitStack() as opened:

            def pipe() -> tuple[int, int]:
                pair = os.pipe()
                for fd in pair:
                    opened.callback(os.close, fd)
                return pair

            def pair() -> tuple[socket.socket, socket.socket]:
                ends = socket.socketpair()
                for end in ends:
                    opened.callback(end.close)
                return ends

            try:
                (stdin_end, stdin), (stdout, stdout_end), (stderr, stderr_end) = pipe(), pipe(), pipe()
                (control, control_end), (cells, cells_end) = pair(), pair()
            except OSError as error:
                raise SandboxError(f"no descriptors for another box: {one_line(error)}") from error
            opened.pop_all()  # from here on they belong to the guest and the caller
        guest = Guest(stdin, stdout, stderr, control, cells, isolated=self._settings.isolated, outlived=self.answers)
        return guest, [stdin_end, stdout_end, stderr_end, control_end.detach(), cells_end.detach()]

    async def answers(self) -> bool:
        """Whether it still forks. A killed one never does, even while its processes are still exiting."""
        try:
            guest = await self.fork()
        except SandboxError:
            return False
        guest.discard()
        return True

    async def _send(self, message: bytes, fds: list[int]) -> None:
        while True:
            if self._control.fileno() < 0:
                raise ForkServerGone("the fork server is gone")
            try:
                socket.send_fds(self._control, [message], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)

    def _hear(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._end(ForkServerGone(f"the {self.isolation.value} jail ended: {self._log()}"))
            return
        message = json.loads(data)
        pidfd = fds[0] if fds else None
        if "id" in message:
            born = self._births.get(message["id"])
            if born is not None and not born.done():
                born.set_result(pidfd)
            elif pidfd is not None:  # nothing waits for it any more
                _kill(pidfd)
        elif "ready" in message and pidfd is not None:
            self._pidfd = pidfd
            self._ready.set_result(None)
        else:
            self._end(SandboxError(f"the {self.isolation.value} jail did not start: {message.get('error')}"))

    def _log(self) -> str:
        with contextlib.suppress(OSError):
            text = (self._scratch.folder / "log").read_bytes()[-1000:].decode("utf-8", "replace")
            return " ".join(text.split()) or "without a word"
        return "without a word"

    def _end(self, error: SandboxError) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # mark as retrieved: `start` may have given up
        for born in self._births.values():
            if not born.done():
                born.set_exception(error)
                born.exception()  # as above: its `fork` may have failed to send

    async def close(self) -> None:
        """Ends the fork server and all its boxes."""
        self._end(SandboxError("the sandbox is closed"))
        if self._pidfd >= 0:
            pidfd, self._pidfd = self._pidfd, -1
            _kill(pidfd)
        deadline = self._loop.time() + DEATH_SECONDS
        while self._process.poll() is None and self._loop.time() < deadline:
            await asyncio.sleep(0.005)
        self._process.kill()  # no-op when it has ended
        self._scratch.remove()


def _kill(pidfd: int) -> None:
    """Kills a process that may have ended, and closes its descriptor."""
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
