"""Turns a trusted process into the model's program: drops every privilege, then runs the code.

Invariant: the first line of the model's code runs only after all of `confine` succeeded; if a step fails, the program
never starts and the supervisor reports it. Python code runs in this very process, which is a fork of a warm interpreter and
behaves as `python main.py` would; everything else is executed directly, without a shell.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import io
import linecache
import os
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import kernel, landlock, seccomp
from .box import Box
from .identity import enter_user_namespace
from .settings import PROGRAM_ID, SHM, Settings

_MIB = 1 << 20
_SECCOMP = seccomp.assemble(kernel.machine())


@dataclass(frozen=True)
class Bounds:
    """The per-process limits enforced by the kernel; those of the whole tree are the supervisor's."""

    cpu_seconds: float
    memory_mb: int
    processes: int
    file_size_mb: int
    open_files: int
    address_space: bool
    """Whether `memory_mb` also bounds the address space (JavaScript engines reserve far more than they use)."""

    @classmethod
    def of(cls, limits: dict[str, Any], address_space: bool = True) -> Bounds:
        """From the limits of a request."""
        names = ("cpu_seconds", "memory_mb", "processes", "file_size_mb", "open_files")
        return cls(**{name: limits[name] for name in names}, address_space=address_space)


def take_descriptors(descriptors: Sequence[int]) -> None:
    """Makes `descriptors` this process's numbers 0, 1, 2 …, the first three inherited by its children; closes all others."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(descriptors)) for fd in descriptors]
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=number < 3)
    os.closerange(len(descriptors), _most_descriptors())


def confine(settings: Settings, box: Box) -> None:
    """Drops every privilege that no program may have, for good; `limit` drops the rest.

    Raises:
        OSError: a step failed.
    """
    os.setsid()
    os.chdir(box.work)
    os.umask(0o022)
    if settings.isolated:
        enter_user_namespace(PROGRAM_ID)
        _write("/proc/self/oom_score_adj", "1000")  # out of memory, the kernel kills the program and not the host
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if settings.isolated:
        kernel.drop_capabilities()
        landlock.restrict((box.work, box.tmp, SHM), ("/dev", "/proc"))
        kernel.install_seccomp(_SECCOMP)
    os.environ.update(HOME=box.tmp, TMPDIR=box.tmp, PWD=box.work)


def _most_descriptors() -> int:
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], (1 << 31) - 1)


def limit(bounds: Bounds, isolated: bool) -> None:
    """Sets this process's limits, for good."""
    memory = bounds.memory_mb * _MIB
    cpu = int(bounds.cpu_seconds) + 1
    limits = {
        resource.RLIMIT_AS if bounds.address_space else resource.RLIMIT_DATA: (memory, memory),
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_FSIZE: (bounds.file_size_mb * _MIB,) * 2,
        resource.RLIMIT_NOFILE: (bounds.open_files,) * 2,
        resource.RLIMIT_CORE: (
            1,
            1,
        ),  # 0 would forbid a file, but not the program that the host's core_pattern may name
        resource.RLIMIT_MEMLOCK: (1 << 16, 1 << 16),
        resource.RLIMIT_MSGQUEUE: (1 << 16, 1 << 16),
        resource.RLIMIT_SIGPENDING: (1024, 1024),
        resource.RLIMIT_RTPRIO: (0, 0),
        resource.RLIMIT_NICE: (0, 0),
        resource.RLIMIT_STACK: (8 * _MIB, resource.getrlimit(resource.RLIMIT_STACK)[1]),
    }
    if isolated:  # counted in the program's own user namespace; without one it would count the host user's processes
        limits[resource.RLIMIT_NPROC] = (bounds.processes,) * 2
    for which, (soft, hard) in limits.items():
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            hard = ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)
        resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def execute(command: Sequence[str]) -> NoReturn:
    """Becomes `command`, found on the program's PATH.

    Raises:
        OSError: it cannot be started.
    """
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter changed them
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(command[0], list(command), dict(os.environ))


def run_python(path: str, code: str, arguments: Sequence[str]) -> NoReturn:
    """Runs `code` as the file `path`, and ends the process as the interpreter would."""
    main = become_main(path, arguments)
    os._exit(_ending(lambda: exec(compile(code, path, "exec", dont_inherit=True), main.__dict__), main, path, code))


def become_main(path: str, arguments: Sequence[str]) -> types.ModuleType:
    """A fresh `__main__`, and an interpreter that looks newly started; returns the module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    for name in [name for name in sys.modules if name == "guest" or name.startswith("guest.")]:
        del sys.modules[name]
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.getcwd())
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = _text_output(1, line_buffering=False, errors="strict")
    sys.stderr = _text_output(2, line_buffering=True, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    site = sys.modules["site"]
    for name in ("setquit", "setcopyright", "sethelper"):  # `-S` omitted `exit`, `quit` and `help`
        getattr(site, name)()
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    return main


def _text_output(fd: int, line_buffering: bool, errors: str) -> io.TextIOWrapper:
    stream = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(stream, encoding="utf-8", errors=errors, line_buffering=line_buffering)


def _ending(run: Callable[[], object], main: types.ModuleType, path: str, code: str) -> int:
    """Calls `run` and shuts down like the interpreter; returns the exit code."""
    linecache.cache[path] = (len(code), None, code.splitlines(keepends=True), path)
    status = 0
    try:
        run()
    except SystemExit as error:
        status = _exit_status(error)
    except BaseException as error:
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        _report(error)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        main.__dict__.clear()  # finalizers of the program's objects
        gc.collect()
    return _flush() or status


def _report(error: BaseException) -> None:
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    with contextlib.suppress(BaseException):
        hook = sys.excepthook
        if hook is sys.__excepthook__:
            traceback.print_exception(type(error), error, own)
        else:
            hook(type(error), error, own)


def _exit_status(error: SystemExit) -> int:
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.write(f"{code}\n")
    return 1


def _flush() -> int:
    """The interpreter's status 120 if the output could not be written."""
    try:
        sys.stdout.flush()
    except BaseException:
        return 120
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    return 0
