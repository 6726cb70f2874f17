"""The supervisor of one run or session: process 1 of its PID namespace, the one trusted process in the box.

Order of one run: open the box, prepare a confined process, wait for the request, write files, compile, let the process
become the program, watch it, kill the rest, read files back, report, exit. Invariant: the report is sent once,
after no process of the run is alive; a failure of the box itself is reported as `broken`, and only before the program's
first instruction, so that no program can make its own failure look like the sandbox's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import census, frames, kernel
from .box import Box, limit_disk, open_box, show_limits
from .files import read_files, write_files
from .prepared import Broken, prepare, start
from .settings import Settings

FETCH_BUDGET = 64 << 20
COMPILER_OUTPUT = 64 << 10
_WATCH_SECONDS = 0.02
_IDLE_WATCH_SECONDS = 0.25  # between the cells of a session


@dataclass(frozen=True)
class Connections:
    """The descriptors a run comes with."""

    stdin: int
    stdout: int
    stderr: int
    host: int
    cells: int


@dataclass(frozen=True)
class Ending:
    """How a program ended."""

    status: str
    code: int | None
    wall_seconds: float
    cpu_seconds: float


def main(connections: Connections, settings: Settings) -> NoReturn:
    """Serves one request and ends the process."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        Supervisor(connections, settings).serve()
    except (Broken, OSError, frames.FrameError, KeyError, TypeError) as error:
        with contextlib.suppress(OSError):
            frames.send(connections.host, {"event": "broken", "error": f"{type(error).__name__}: {error}"[:1000]})
    finally:
        os._exit(0)


class Supervisor:
    """State of one run: its box and its connections."""

    def __init__(self, connections: Connections, settings: Settings) -> None:
        self._host = connections.host
        self._settings = settings
        if not settings.isolated:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        self._box: Box = open_box(settings)
        self._codes: dict[int, int] = {}
        self._cpu_seen = 0.0
        if settings.admission and frames.receive(self._host) is None:
            os._exit(0)
        self._stem = prepare(
            settings, self._box, [connections.stdin, connections.stdout, connections.stderr], connections.cells
        )
        for fd in (connections.stdin, connections.stdout, connections.stderr, connections.cells):
            os.close(fd)

    def serve(self) -> None:
        """Waits for the request and serves it; returns at once if the host hangs up instead."""
        try:
            received = frames.receive(self._host)
            if received is None:
                return
            request, payload = received
            limit_disk(self._settings, request["limits"]["disk_mb"])
            show_limits(self._box, request["limits"]["memory_mb"])
            files = _unpacked(request["files"], payload)
            if request["source"]:
                files.append((request["source"], request["code"].encode("utf-8", "surrogatepass")))
            if not self._write(files):
                return
            if request["kind"] == "session":
                self._session(request)
            else:
                self._run(request)
        finally:
            self._kill_all()
            self._box.close()

    def _run(self, request: dict[str, Any]) -> None:
        compiled = None
        if request["compile"]:
            compiled = self._compile(request)
            if compiled["status"] != "finished" or compiled["code"] != 0:
                self._report({"status": "compile_failed", "code": None, "compile": compiled})
                return
        command = [*self._filled_in(request["command"]), *request["args"]] if request["command"] else None
        start(self._stem, request, command)
        self._answer({"event": "started"})
        ending = self._watch(self._stem.pid, request["limits"], request["limits"]["wall_seconds"])
        found, refused = read_files(self._box.work, request["fetch_files"], FETCH_BUDGET)
        self._report({**vars(ending), "compile": compiled, "refused": refused}, found)

    def _session(self, request: dict[str, Any]) -> None:
        start(self._stem, request, None)
        self._answer({"event": "started"})
        self._report(vars(self._watch(self._stem.pid, request["limits"], None)))

    def _filled_in(self, command: Sequence[str]) -> list[str]:
        return [part.replace("{tmp}", self._box.tmp) for part in command]

    def _compile(self, request: dict[str, Any]) -> dict[str, Any]:
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        prepared = prepare(self._settings, self._box, [null, out_end, err_end], null)
        for fd in (null, out_end, err_end):
            os.close(fd)
        start(prepared, request, self._filled_in(request["compile"]))
        kept = {out: bytearray(), err: bytearray()}
        ending = self._watch(prepared.pid, request["limits"], request["compile_seconds"], kept)
        for fd in kept:
            while _drain(fd, kept[fd]):
                pass
            os.close(fd)
        texts = [bytes(kept[fd]).decode("utf-8", "replace") for fd in (out, err)]
        return {**vars(ending), "stdout": texts[0], "stderr": texts[1]}

    def _watch(
        self, pid: int, limits: dict[str, Any], wall_seconds: float | None, kept: dict[int, bytearray] | None = None
    ) -> Ending:
        """Waits for the end of `pid` or of its limits, then kills the rest of the run.

        `kept` maps pipes to read meanwhile to their output. Without `wall_seconds` the host decides when to stop.
        """
        host = self._host
        process = os.pidfd_open(pid)
        poller = select.poll()
        for fd in (process, host, *(kept or ())):
            poller.register(fd, select.POLLIN)
        started = time.monotonic()
        cpu_before = _reaped_cpu_seconds()
        interval, next_look = _WATCH_SECONDS, started + _WATCH_SECONDS
        self._codes.clear()
        over: str | None = None
        while over is None:
            now = time.monotonic()
            if wall_seconds is not None and now >= started + wall_seconds:
                over = "time_limit"
                break
            if now >= next_look:
                busy, over = self._look(limits, cpu_before)
                interval = (
                    _WATCH_SECONDS if busy or wall_seconds is not None else min(2 * interval, _IDLE_WATCH_SECONDS)
                )
                next_look = now + interval
            wake = next_look if wall_seconds is None else min(next_look, started + wall_seconds)
            ready = dict(poller.poll(max(0.0, wake - now) * 1000 + 1))
            if process in ready:
                break
            for fd in ready.keys() & (kept or {}).keys():
                assert kept is not None
                if not _drain(fd, kept[fd]):
                    poller.unregister(fd)
            if host in ready:
                if not self._obey(pid):
                    over = "time_limit"
                interval, next_look = _WATCH_SECONDS, time.monotonic() + _WATCH_SECONDS
        wall = time.monotonic() - started
        os.close(process)
        self._kill_all(self._stem.pid if pid != self._stem.pid else None)
        cpu = _reaped_cpu_seconds() - cpu_before
        if over is None and cpu >= limits["cpu_seconds"]:
            over = "time_limit"
        return Ending(over or "finished", None if over else self._codes.get(pid), wall, cpu)

    def _look(self, limits: dict[str, Any], cpu_before: float) -> tuple[bool, str | None]:
        """Whether the run has used the CPU since the last check, and the limit it broke, if any."""
        self._reap()
        pids = list(census.processes(self._settings.isolated))
        cpu = census.cpu_seconds(pids) + _reaped_cpu_seconds() - cpu_before
        busy, self._cpu_seen = cpu > self._cpu_seen, cpu
        if cpu > limits["cpu_seconds"]:
            return busy, "time_limit"
        memory = (limits["memory_mb"] << 20) - (census.socket_bytes() if self._settings.isolated else 0)
        return busy, "memory_limit" if census.memory_bytes(pids, memory) > memory else None

    def _obey(self, pid: int) -> bool:
        """Serves the host's request in a session; False if it asks for the end."""
        received = frames.receive(self._host)
        if received is None or received[0]["do"] == "close":
            return False
        request, payload = received
        if request["do"] == "interrupt":
            os.kill(pid, signal.SIGINT)
        elif request["do"] == "write":
            if self._write(_unpacked(request["files"], payload)):
                self._answer({"event": "written"})
        elif request["do"] == "fetch":
            found, refused = read_files(self._box.work, request["fetch_files"], FETCH_BUDGET)
            self._answer({"event": "fetched", "refused": refused}, found)
        return True

    def _write(self, files: list[tuple[str, bytes]]) -> bool:
        """Whether the files fit; if not, reports it to the host."""
        try:
            write_files(self._box.work, files)
        except OSError as error:
            self._answer({"event": "refused", "error": error.strerror or str(error)})
            return False
        return True

    def _report(self, ending: dict[str, Any], files: Sequence[tuple[str, bytes]] = ()) -> None:
        self._box.close()
        self._answer({"event": "ended", **ending}, files)

    def _answer(self, message: dict[str, Any], files: Sequence[tuple[str, bytes]] = ()) -> None:
        sizes = [[path, len(content)] for path, content in files]
        frames.send(self._host, {**message, "files": sizes}, b"".join(content for _, content in files))

    def _reap(self, flags: int = os.WNOHANG) -> bool:
        """Reaps ended children, adopted ones included; returns whether any child is left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, flags)
                if pid == 0:
                    return True
                self._codes[pid] = os.waitstatus_to_exitcode(status)
        return False

    def _kill_all(self, spared: int | None = None) -> None:
        """Kills every process of the run but `spared` and this one, and waits until none is left."""
        if self._settings.isolated and spared is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of this namespace except process 1
            self._reap(0)
            return
        while True:
            self._reap()
            victims = [pid for pid in census.processes(self._settings.isolated) if pid != spared]
            if not victims:
                return
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)


def _reaped_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _drain(fd: int, kept: bytearray) -> bool:
    """Reads once from a pipe and keeps what fits; False at its end."""
    part = os.read(fd, 1 << 16)
    kept += part[: COMPILER_OUTPUT - len(kept)]
    return bool(part)


def _unpacked(sizes: Sequence[Sequence[Any]], payload: bytes) -> list[tuple[str, bytes]]:
    """The (path, content) pairs whose contents are concatenated in `payload`."""
    files, start = [], 0
    for path, size in sizes:
        files.append((path, payload[start : start + size]))
        start += size
    return files
