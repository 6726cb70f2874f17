"""Forks a process that drops all privileges and runs the model's program.

Invariant: the first line of the model's code runs only after all privileges are dropped and all limits set. If a step fails,
the program never starts and the supervisor reports a failure of the sandbox; only a compiled program that cannot be started
is the model's own failure. Python code runs in the forked process, a warm interpreter; other programs are executed directly,
without a shell.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Sequence
from typing import Any, NoReturn

from . import cells, interpreter, kernel, landlock, rlimits, seccomp
from .namespaces import Folders
from .settings import PROGRAM_ID, SHM, Settings

_NO_PROGRAM = b"NoProgram: "
_SECCOMP = seccomp.assemble(kernel.machine())


class Broken(Exception):
    """The program could not be started."""


class NoProgram(Broken):
    """There is no such program here, or it is none."""


def start(
    settings: Settings,
    folders: Folders,
    descriptors: Sequence[int],
    request: dict[str, Any],
    command: Sequence[str] | None,
) -> int:
    """Starts `command`, or if it is None the request's Python code or session; returns its PID once its code starts.

    `descriptors` become its descriptors 0, 1, 2, and 3 for a session's cells; it has no others.

    Raises:
        Broken: the process could not be confined, or the interpreter could not be started.
        NoProgram: the request names a program that is not here.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(settings, folders, [*descriptors, writer], request, command)
    os.close(writer)
    with open(reader, "rb") as pipe:
        failure = pipe.read()
    if failure:
        missing = request["kind"] == "command" and failure.startswith(_NO_PROGRAM)
        raise (NoProgram if missing else Broken)(failure.decode("utf-8", "replace"))
    return pid


def _become(
    settings: Settings,
    folders: Folders,
    descriptors: Sequence[int],
    request: dict[str, Any],
    command: Sequence[str] | None,
) -> NoReturn:
    """Runs the program in the forked process; the last of `descriptors` receives the reason if it cannot start."""
    failure = descriptors[-1]
    try:
        _take_descriptors(descriptors)
        failure = len(descriptors) - 1
        _confine(settings, folders)
        rlimits.impose(request["limits"], request["address_space"], settings.isolated)
        if command is not None:
            _execute(command, request["environment"])
        os.close(failure)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:1000].encode("utf-8", "replace")
        compiled = command is not None and command[0].startswith(folders.tmp)  # then it is the model's own failure
        os.write(2 if compiled else failure, text)
        os._exit(126)
    if request["kind"] == "session":
        cells.serve(3, folders.work)
    os.close(3)
    interpreter.run_python(os.path.join(folders.work, request["source"]), request["code"], request["args"])


def _take_descriptors(descriptors: Sequence[int]) -> None:
    """Makes `descriptors` this process's 0, 1, 2 …, of which children inherit the first three; closes all others."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(descriptors)) for fd in descriptors]
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=number < 3)
    os.closerange(len(descriptors), min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], (1 << 31) - 1))


def _confine(settings: Settings, folders: Folders) -> None:
    """Permanently drops the privileges that no program may have; `rlimits` sets the rest.

    Raises:
        OSError: a step failed.
    """
    os.setsid()
    os.chdir(folders.work)
    os.umask(0o022)
    if settings.isolated:
        kernel.enter_user_namespace(PROGRAM_ID)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # when the host runs out of memory, the kernel kills the program first
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if settings.isolated:
        kernel.drop_capabilities()
        landlock.restrict((folders.work, folders.tmp, SHM), ("/dev", "/proc"))
        kernel.install_seccomp(_SECCOMP)
    os.environ.update(HOME=folders.tmp, TMPDIR=folders.tmp, PWD=folders.work)


def _execute(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Executes `command`, found on the program's PATH, in this process, with `environment` besides its own.

    Raises:
        OSError: it cannot be started.
    """
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter changed them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), {**os.environ, **environment})
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC):
            raise NoProgram(f"{command[0]}: {error.strerror}") from error
        raise
