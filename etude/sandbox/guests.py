"""The host's handle of a box: its connections and the pidfd of its supervisor.

Invariant: a `Guest` is used for one run or one session and never again. Whatever happens to it, `close` leaves none of its
processes alive (its PID namespace ends with its supervisor, which the host holds by a pidfd) and no descriptor open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.sandbox.cgroup import Group
from etude.sandbox.connection import Connection
from etude.sandbox.guest import frames
from etude.sandbox.types import SandboxError

DEATH_SECONDS = 10.0


class BoxGone(SandboxError):
    """A box failed before any of its request ran; another one may work."""


class Guest:
    """One box, waiting for its request. It owns the descriptors until they are taken."""

    def __init__(
        self,
        stdin: int,
        stdout: int,
        stderr: int,
        control: socket.socket,
        cells: socket.socket,
        *,
        isolated: bool,
        outlived: Callable[[], Awaitable[bool]],
    ) -> None:
        """`outlived` says whether the sandbox still answers: then the cause was inside the box."""
        self.isolated, self.outlived = isolated, outlived
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.control = Connection(control, frames.MAX_JSON, frames.MAX_PAYLOAD)
        self.cells = cells
        self._pidfd = -1
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self.group: Group | None = None
        self.out_of_memory = False

    def born(self, pidfd: int | None) -> None:
        """Sets the guest's supervisor; None if it has already ended."""
        if pidfd is None:
            self._gone.set()
            return
        self._pidfd = pidfd
        self._loop.add_reader(pidfd, self._died)

    @property
    def alive(self) -> bool:
        """Whether its supervisor is alive."""
        return not self._gone.is_set()

    async def admit(self, group: Group) -> None:
        """Moves the box, which is waiting for it, into its own control group."""
        self.group = group
        group.admit(_process_of(self._pidfd))
        await self.control.send({"do": "go"})

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self.group is not None:
            self.out_of_memory = self.group.out_of_memory()
            self.group.close()
        self._gone.set()

    def kill(self) -> None:
        """Kills the supervisor, and with it the box."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def take_pipes(self) -> tuple[int, int, int]:
        """Hands over the ends of stdin, stdout and stderr."""
        pipes = self.stdin, self.stdout, self.stderr
        self.stdin = self.stdout = self.stderr = -1
        return pipes

    def discard(self) -> None:
        """Ends the box and closes everything, without waiting."""
        if self.isolated:
            self.kill()
        self.control.close()  # without isolation, only a supervisor that gets this message finds its processes
        self.cells.close()
        for fd in self.take_pipes():
            if fd >= 0:
                os.close(fd)

    async def close(self) -> None:
        """Ends the box and waits until it is gone.

        Raises:
            SandboxError: the kernel does not let it go.
        """
        self.discard()
        try:
            await asyncio.wait_for(self._gone.wait(), DEATH_SECONDS)
        except asyncio.TimeoutError as error:
            self.kill()
            raise SandboxError(f"a box is still alive {DEATH_SECONDS:g} s after its end") from error


def _process_of(pidfd: int) -> int:
    """The number of a pidfd's process, as this process's namespace has it.

    Raises:
        ProcessLookupError: it has ended.
    """
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        if line.startswith("Pid:") and int(line.split()[1]) > 0:
            return int(line.split()[1])
    raise ProcessLookupError("the process has ended")
