"""The fork server: an interpreter in the jail that has preimported common modules and forks a supervisor per run.

Invariant: it never sees a request. It only sends the host a pidfd of itself, receives file descriptors, and forks; code,
files and output are exchanged directly between host and supervisor, so nothing of one run can reach the next through the
fork server's memory. A supervisor is process 1 of a new PID namespace: when it ends, the kernel kills the run's other
processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys

from . import kernel, supervisor
from .settings import Settings

FDS_PER_RUN = 5  # stdin, stdout, stderr, the supervisor's connection, the cells' connection

_USUAL_MODULES = (
    *("ast", "atexit", "bisect", "collections", "copy", "datetime", "enum", "functools", "heapq", "io", "itertools"),
    *("json", "linecache", "math", "operator", "random", "re", "site", "string", "threading", "time", "traceback"),
    "typing",
)


def main(arguments: list[str]) -> None:
    """Serves the host until it disconnects; `arguments`: the descriptor of the socket to it, and the encoded settings."""
    host = socket.socket(fileno=int(arguments[0]))
    settings = Settings.decode(arguments[1])
    host.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host handles Ctrl-C in its terminal
    try:
        if settings.isolated:
            _enter(host)
        _warm_up(settings)
    except (OSError, ImportError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; the host watches pidfds
    own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    itself = os.pidfd_open(os.getpid())
    socket.send_fds(host, [b"\0"], [itself])
    os.close(itself)
    while True:
        data, fds, _, _ = socket.recv_fds(host, 1, FDS_PER_RUN)
        if not data:
            os._exit(0)
        with contextlib.suppress(OSError):  # the fork failed: to the host the container has ended
            if settings.isolated:
                kernel.setns(own_namespace, kernel.CLONE_NEWPID)  # otherwise the next `unshare` would fail
                kernel.unshare(kernel.CLONE_NEWPID)
            if os.fork() == 0:
                os.close(host.detach())
                os.close(own_namespace)
                supervisor.main(settings, *fds)
        for fd in fds:
            os.close(fd)


def _enter(host: socket.socket) -> None:
    """Enters new namespaces as process 1 and root; runs are set up in them."""
    kernel.enter_user_namespace(0, kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        host.close()
        os.waitpid(pid, 0)
        os._exit(0)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def _warm_up(settings: Settings) -> None:
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    sys.path.extend(settings.search_path)
    for name in _USUAL_MODULES:
        importlib.import_module(name)
    os.environ.clear()
    os.environ.update(settings.environment)
    # Otherwise garbage collection in each run's process would touch, and so copy, all objects that exist here.
    gc.collect()
    gc.freeze()
    gc.disable()
