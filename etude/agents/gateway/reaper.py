"""Runs a program and ends all that it started: `python -IS reaper.py FD PROGRAM …`, with nothing of this package.

Invariant: when this process ends, no process that descends from the program is left, whatever session it moved to: orphans
become children of this process (a subreaper), which kills its children until it has none. It ends as the program did, or by
SIGTERM. Only a program that kills this process, which it may, gets away, and orphans where there are no subreapers.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36


def main(report: int, command: list[str]) -> None:
    """Writes the `errno` into the descriptor `report` if the program cannot be started."""
    os.set_inheritable(report, False)
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _end)
    try:
        ours = os.posix_spawnp(
            command[0], command, os.environ, setsid=True, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
        )
    except OSError as error:
        os.write(report, str(error.errno).encode())
        os._exit(127)
    for descriptor in (0, 1, 2):  # the program's alone: a pipe ends when it closes it
        with suppress(OSError):
            os.close(descriptor)
    pid = status = 0
    while pid != ours:
        pid, status = os.waitpid(-1, 0)
    kill_children()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def kill_children() -> None:
    """Kills and waits for children until there are none: each round's orphans are the next one's children."""
    with suppress(ChildProcessError, PermissionError):
        while True:
            for pid in _children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _end(number: int, frame: object) -> None:
    kill_children()
    os._exit(128 + number)


def _children() -> list[int]:
    """Process ids of the children; empty without `/proc`."""
    found, own = [], os.getpid()
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == own:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
