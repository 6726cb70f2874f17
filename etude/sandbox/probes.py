"""Proves a mode's guarantees before it is offered: each probe attempts what must be impossible inside.

Invariant: `prove` returns only if every guarantee of the table in `docs/sandbox.md` held against a real attempt in a real
box; the first broken one is named. The programs report what they managed to do, and the host's side (a listener, a secret
file, the process table) is checked as well. A probe shows that a wall exists, not that it has no holes: that is left to
the attack suite in the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.sandbox import probe_programs as programs
from etude.sandbox.guest.settings import PROGRAM_ID
from etude.sandbox.jail import jail_scratch
from etude.sandbox.types import Limits, RunRequest, RunResult, RunStatus, SandboxError

Run = Callable[[RunRequest], Awaitable[RunResult]]

_SMALL = Limits(wall_seconds=20, cpu_seconds=20, memory_mb=256, processes=16, file_size_mb=1, disk_mb=4, open_files=32)


class GuaranteeBroken(SandboxError):
    """A forbidden attempt succeeded; the message names the guarantee."""


@dataclass(frozen=True)
class Host:
    """A probe's targets."""

    file: str
    """World-readable."""
    port: int
    abstract: str
    listeners: tuple[socket.socket, ...]

    def connected(self) -> int:
        """The number of listeners that were reached."""
        reached = 0
        for listener in self.listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                reached += 1
        return reached


def _demand(holds: bool, guarantee: str, seen: object) -> None:
    if not holds:
        raise GuaranteeBroken(f"{guarantee}: not kept here ({str(seen)[:200]})")


async def prove(run: Run) -> None:
    """Makes every attempt in boxes of `run`, after checking that they are confined at all.

    Raises:
        GuaranteeBroken: one succeeded.
        SandboxError: no box was available.
    """
    judge_look(await _reported(run, programs.LOOK))
    with _host() as host:
        goals = {
            "paths": [host.file, "/root/.ssh", "/home", "/etc/shadow", "/var/log", "/run", "/sys/kernel"],
            "pid": os.getpid(),
            "port": host.port,
            "abstract": host.abstract,
        }
        attempts = asyncio.ensure_future(_reported(run, programs.GUARD + programs.ATTEMPTS, json.dumps(goals)))
        await asyncio.gather(
            attempts,
            _wall_time(run),
            _cpu_time(run),
            _memory(run),
            _output(run),
            _process_tree(run),
            _next_run(run),
        )
        judge_attempts(attempts.result(), host.connected())


async def _reported(run: Run, program: str, *arguments: str) -> dict[str, Any]:
    """What a program found out."""
    result = await run(RunRequest(program, args=arguments, limits=_SMALL))
    try:
        seen = json.loads(result.stdout)
    except ValueError:
        raise SandboxError(f"a probe did not run: {result.status.value}, {result.stderr[-500:]!r}") from None
    assert isinstance(seen, dict)
    return seen


def judge_look(seen: dict[str, Any]) -> None:
    """Checks the report of `LOOK`.

    Raises:
        GuaranteeBroken: it is not confined.
    """
    _demand(seen["user"] == PROGRAM_ID and seen["system_owner"] != PROGRAM_ID, "a user of its own", seen["user"])
    _demand(seen["capabilities"] == 0 and seen["no_new_privileges"] == 1, "no privileges", seen["capabilities"])
    _demand(seen["filter"] == 2, "a filter of system calls", seen["filter"])
    _demand(seen["parent"] == 1, "a PID namespace of its own", seen["parent"])
    _demand(seen["host_name"] == "sandbox", "a host name of its own", seen["host_name"])
    inherited = {name for name in os.environ if name not in programs.ENVIRONMENT} & set(seen["environment"])
    _demand(not inherited, "a scrubbed environment", sorted(inherited))


def judge_attempts(seen: dict[str, Any], connections: int) -> None:
    """Checks the report of `ATTEMPTS`, and how many listeners of the host were reached.

    Raises:
        GuaranteeBroken: an attempt succeeded.
    """
    _demand(seen["readable"] == [], "no files of the host", seen["readable"])
    _demand(seen["written"] == [], "a read-only system", seen["written"])
    _demand(seen["private"] == [True, True], "a private work directory and /tmp", seen["private"])
    _demand(seen["processes"] <= 3 and not seen["signalled"], "a PID namespace of its own", seen["processes"])
    _demand(seen["connected"] == [] and connections == 0, "no network", seen["connected"] or connections)
    _demand(seen["interfaces"] == ["lo"], "no network interface but loopback", seen["interfaces"])
    _demand(seen["families"] == [], "no other kind of socket", seen["families"])
    _demand(seen["calls"] == [], "a filter of system calls", seen["calls"])
    _demand(seen["forks"] < _SMALL.processes, "a limit of processes", seen["forks"])
    _demand(seen["file_bytes"] <= _SMALL.file_size_mb << 20, "a limit of a file's size", seen["file_bytes"])
    _demand(seen["disk_bytes"] <= _SMALL.disk_mb << 20, "a limit of disk", seen["disk_bytes"])
    _demand(seen["open_files"] <= _SMALL.open_files, "a limit of open files", seen["open_files"])


async def _wall_time(run: Run) -> None:
    result = await run(RunRequest(programs.SLEEP, limits=Limits(wall_seconds=0.2)))
    _demand(result.status is RunStatus.TIME_LIMIT, "a limit of wall time", result.status)


async def _cpu_time(run: Run) -> None:
    result = await run(RunRequest(programs.GUARD + programs.SPIN, limits=Limits(cpu_seconds=0.2)))
    _demand(result.status is RunStatus.TIME_LIMIT and result.wall_seconds < 25, "a limit of CPU time", result.status)


async def _memory(run: Run) -> None:
    result = await run(RunRequest(programs.GUARD + programs.MEMORY_OF_ONE, limits=Limits(memory_mb=128)))
    _demand("MemoryError" in result.stderr, "a limit of one process's memory", result.stderr)
    result = await run(RunRequest(programs.GUARD + programs.MEMORY_OF_MANY, limits=Limits(memory_mb=128)))
    _demand(result.status is RunStatus.MEMORY_LIMIT, "a limit of all processes' memory", result.status)
    result = await run(RunRequest(programs.GUARD + programs.MEMORY_OF_SOCKETS, limits=Limits(memory_mb=128)))
    _demand(result.status is RunStatus.MEMORY_LIMIT, "a limit of sockets' memory", result.status)


async def _output(run: Run) -> None:
    result = await run(RunRequest(programs.GUARD + programs.OUTPUT, limits=Limits(output_bytes=1000)))
    complete = result.status is RunStatus.FINISHED and result.stdout_truncated and len(result.stdout) < 2000
    _demand(complete, "bounded output", (result.status, len(result.stdout)))


async def _process_tree(run: Run) -> None:
    marker = secrets.token_hex(8)
    result = await run(RunRequest(programs.GUARD + programs.DAEMON, args=[marker]))
    _demand(result.stdout == "left\n", "the death of the whole process tree", result.stderr)
    _demand(_processes_with(marker) == [], "the death of the whole process tree", marker)


def _processes_with(marker: str) -> list[int]:
    """The host's processes with `marker` on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


async def _next_run(run: Run) -> None:
    await run(RunRequest(programs.GUARD + programs.LEAVE_TRACES))
    result = await run(RunRequest(programs.FIND_TRACES))
    _demand(result.stdout == "[]\n", "a fresh state for every run", result.stdout or result.stderr)


@contextlib.contextmanager
def _host() -> Iterator[Host]:
    """Creates the targets: a readable file, a TCP listener, an abstract socket."""
    name = f"etude-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        scratch = jail_scratch()  # accessible to other users; a killed process's leftovers are removed by the next one
        stack.callback(scratch.remove)
        scratch.folder.chmod(0o755)
        file = scratch.folder / "secret"
        file.write_text("secret", encoding="ascii")
        file.chmod(0o644)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{name}")
        abstract.listen()
        for listener in (tcp, abstract):
            listener.setblocking(False)
        yield Host(str(file), tcp.getsockname()[1], name, (tcp, abstract))
