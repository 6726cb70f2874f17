"""The supervisor of one run or session: process 1 of its PID namespace, and the only trusted process in the container.

Order of one run: send the host a pidfd, wait for the request, enter the namespaces, write files, compile, start the
program, watch it, kill remaining processes, read files back, report, exit. Invariant: the report is sent once, when no
process of the run is alive; a failure of the container itself is reported as `broken`, and only before the program's first
instruction, so that a program cannot make its own failure look like the sandbox's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from . import kernel, messages, program, usage
from .files import FOLDER_BYTES, pack, read_files, unpack, write_files
from .namespaces import enter_namespaces
from .settings import Settings

FETCH_BUDGET = 64 << 20
COMPILER_OUTPUT = 64 << 10
_WATCH_SECONDS = 0.02
_IDLE_WATCH_SECONDS = 0.25  # between the cells of a session
_IDLE_CPU_SECONDS = 0.5
"""CPU seconds that a session may use between cells, when its processes are stopped: a timer or another may wake them."""


def main(settings: Settings, stdin: int, stdout: int, stderr: int, host: int, cells: int) -> NoReturn:
    """Serves one request and exits."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        itself = os.pidfd_open(os.getpid())
        _send_descriptor(host, itself)
        os.close(itself)
        received = messages.receive(host)
        if received is not None:  # otherwise the host has closed the container unused
            Supervisor([stdin, stdout, stderr, cells], host, settings, *received).serve()
    except (program.Broken, OSError, messages.MessageError, KeyError, TypeError) as error:
        with contextlib.suppress(OSError):
            messages.send(host, {"event": "broken", "error": f"{type(error).__name__}: {error}"[:1000]})
    finally:
        os._exit(0)


class Supervisor:
    """One run or session: its folders, its connections and its request."""

    def __init__(
        self, descriptors: list[int], host: int, settings: Settings, request: dict[str, Any], files: messages.Parts
    ) -> None:
        self._descriptors = descriptors
        self._host = host
        self._settings = settings
        self._request = request
        self._files = files
        self._limits: dict[str, Any] = request["limits"]
        self._codes: dict[int, int] = {}
        self._cpu_seen = 0.0
        self._cpu_when_stopped: float | None = None  # between the cells of a session
        if not settings.isolated:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        self._folders = enter_namespaces(settings, self._limits["disk_mb"], self._limits["memory_mb"])

    def serve(self) -> None:
        """Runs the request and reports to the host."""
        request = self._request
        try:
            if request["port"] and self._settings.isolated:  # who connects to it is relayed by the host
                with socket.create_server(("127.0.0.1", request["port"])) as listener:
                    _send_descriptor(self._host, listener.fileno())
            packed = self._files.pop()[1] if request["folder"] else None
            if request["source"]:
                self._files.append((request["source"], request["code"].encode("utf-8", "surrogatepass")))
            if not self._write(self._files, packed):
                return
            self._files.clear()  # otherwise each process of the run would inherit a copy
            packed = None
            compiled = self._compile() if request["compile"] else None
            if compiled and (compiled["status"] != "finished" or compiled["code"] != 0):
                self._folders.close()
                ending = {"status": "compile_failed", "code": None, "compile": compiled}
                messages.send(self._host, {"event": "ended", **ending})
                return
            command = [*self._fill_in(request["command"]), *request["args"]] if request["command"] else None
            try:
                pid = program.start(self._settings, self._folders, self._descriptors, request, command)
            except program.NoProgram as error:
                messages.send(self._host, {"event": "refused", "error": f"command: {error}"})
                return
            for fd in self._descriptors:
                os.close(fd)
            messages.send(self._host, {"event": "started"})
            ending = self._watch(pid, request["wall_seconds"])
            found, refused = read_files(self._folders.work, request["fetch_files"], FETCH_BUDGET)
            if request["folder"] and (after := pack(self._folders.work, FOLDER_BYTES)) is not None:
                found.append(("", after))
            self._folders.close()
            messages.send(self._host, {"event": "ended", **ending, "compile": compiled, "refused": refused}, found)
        finally:
            self._kill_all()
            self._folders.close()

    def _fill_in(self, command: Sequence[str]) -> list[str]:
        return [part.replace("{tmp}", self._folders.tmp) for part in command]

    def _compile(self) -> dict[str, Any]:
        with (
            open("/dev/null", "rb") as nothing,
            tempfile.TemporaryFile(dir=self._folders.tmp) as stdout,
            tempfile.TemporaryFile(dir=self._folders.tmp) as stderr,
        ):
            descriptors = [nothing.fileno(), stdout.fileno(), stderr.fileno()]
            command = self._fill_in(self._request["compile"])
            pid = program.start(self._settings, self._folders, descriptors, self._request, command)
            ending = self._watch(pid, self._request["compile_seconds"])
            texts = [os.pread(fd, COMPILER_OUTPUT, 0).decode("utf-8", "replace") for fd in descriptors[1:]]
        return {**ending, "stdout": texts[0], "stderr": texts[1]}

    def _watch(self, pid: int, wall_seconds: float | None) -> dict[str, Any]:
        """Waits until `pid` ends or exceeds a limit, kills the run's other processes, and returns how it ended.

        Without `wall_seconds` (a session) the host decides when to stop.
        """
        process = os.pidfd_open(pid)
        poller = select.poll()
        for fd in (process, self._host):
            poller.register(fd, select.POLLIN)
        started = time.monotonic()
        deadline = float("inf") if wall_seconds is None else started + wall_seconds
        cpu_before = _reaped_cpu_seconds()
        interval, next_look = _WATCH_SECONDS, started + _WATCH_SECONDS
        self._codes.clear()
        over: str | None = None
        while over is None:
            now = time.monotonic()
            if now >= deadline:
                over = "time_limit"
                break
            if now >= next_look:
                busy, over = self._check_limits(cpu_before)
                idle = wall_seconds is None and not busy
                interval = min(2 * interval, _IDLE_WATCH_SECONDS) if idle else _WATCH_SECONDS
                next_look = now + interval
            ready = dict(poller.poll(max(0.0, min(next_look, deadline) - now) * 1000 + 1))
            if process in ready:
                break
            if self._host in ready:
                if not self._handle_command(pid, cpu_before):
                    over = "time_limit"
                interval, next_look = _WATCH_SECONDS, time.monotonic() + _WATCH_SECONDS
        wall = time.monotonic() - started
        os.close(process)
        self._kill_all()
        cpu = _reaped_cpu_seconds() - cpu_before
        if over is None and cpu >= self._limits["cpu_seconds"]:
            over = "time_limit"
        code = None if over else self._codes.get(pid)
        return {"status": over or "finished", "code": code, "wall_seconds": wall, "cpu_seconds": cpu}

    def _check_limits(self, cpu_before: float) -> tuple[bool, str | None]:
        """Returns whether the run has used the CPU since the last check, and which limit it exceeds, if any."""
        self._reap()
        pids = list(usage.processes(self._settings.isolated))
        cpu = self._cpu_seconds(cpu_before, pids)
        busy, self._cpu_seen = cpu > self._cpu_seen, cpu
        if cpu > self._limits["cpu_seconds"]:
            return busy, "time_limit"
        if self._cpu_when_stopped is not None:
            if cpu > self._cpu_when_stopped + _IDLE_CPU_SECONDS:
                return busy, "time_limit"
            self._signal_all(signal.SIGSTOP)
        memory = (self._limits["memory_mb"] << 20) - (usage.socket_bytes() if self._settings.isolated else 0)
        return busy, "memory_limit" if usage.memory_bytes(pids, memory) > memory else None

    def _cpu_seconds(self, before: float, pids: list[int] | None = None) -> float:
        """Returns the CPU seconds of the run's processes, living and reaped, without `before`."""
        pids = list(usage.processes(self._settings.isolated)) if pids is None else pids
        return usage.cpu_seconds(pids) + _reaped_cpu_seconds() - before

    def _handle_command(self, pid: int, cpu_before: float) -> bool:
        """Handles a command from the host during a session; returns False if the host has disconnected."""
        received = messages.receive(self._host)
        if received is None:
            return False
        order, files = received
        if order["do"] == "interrupt":
            os.kill(pid, signal.SIGINT)
        elif order["do"] == "stop":
            self._signal_all(signal.SIGSTOP)
            self._cpu_when_stopped = self._cpu_seconds(cpu_before)
        elif order["do"] == "resume":
            self._cpu_when_stopped = None
            self._signal_all(signal.SIGCONT)
        elif order["do"] == "write":
            if self._write(files):
                messages.send(self._host, {"event": "written"})
        elif order["do"] == "fetch":
            found, refused = read_files(self._folders.work, order["fetch_files"], FETCH_BUDGET)
            messages.send(self._host, {"event": "fetched", "refused": refused}, found)
        return True

    def _write(self, files: messages.Parts, packed: bytes | None = None) -> bool:
        """Writes a packed folder and files into the work directory; if they do not fit, reports it to the host and returns
        False."""
        try:
            if packed is not None:
                unpack(self._folders.work, packed)
            write_files(self._folders.work, files)
        except OSError as error:
            messages.send(self._host, {"event": "refused", "error": f"files: {error.strerror or error}"})
            return False
        return True

    def _reap(self, flags: int = os.WNOHANG) -> bool:
        """Reaps ended children, including adopted ones; returns whether any child is left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, flags)
                if pid == 0:
                    return True
                self._codes[pid] = os.waitstatus_to_exitcode(status)
        return False

    def _kill_all(self) -> None:
        """Kills all processes of the run except this one, and waits until none is left."""
        self._signal_all(signal.SIGKILL)
        if self._settings.isolated:
            self._reap(0)
            return
        while self._reap() or any(usage.processes(isolated=False)):
            self._signal_all(signal.SIGKILL)
            time.sleep(0.001)

    def _signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to all processes of the run except this one."""
        if self._settings.isolated:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)  # all of this namespace except process 1
            return
        for pid in usage.processes(isolated=False):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _send_descriptor(host: int, fd: int) -> None:
    with socket.socket(fileno=os.dup(host)) as connection:
        socket.send_fds(connection, [b"\0"], [fd])


def _reaped_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
