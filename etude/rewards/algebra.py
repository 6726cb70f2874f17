"""`AlgebraProcesses`: symbolic equality in child processes with a hard time and memory limit.

Invariant: `equal` returns within its limits from any thread; a child that exceeds them is killed and replaced. Children are
started on demand, reused, and end with their parent (their standard input closes). What "equal" means is left to math-verify
(`algebra_child.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
from pathlib import Path

from etude.errors import InfrastructureError

START_SECONDS = 120.0  # importing sympy on a busy machine
ANSWER_SECONDS = 5.0
_CHILD = Path(__file__).with_name("algebra_child.py")


class _Child:
    """One child process. Only one thread at a time may call `ask`."""

    def __init__(self) -> None:
        # -I keeps this folder, whose math.py would shadow the standard one, off the child's path; it gets ours instead.
        command = [sys.executable, "-I", str(_CHILD), json.dumps(sys.path)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise InfrastructureError(f"cannot start the process for symbolic algebra: {error}") from error
        if self._line(START_SECONDS) != b"ready\n":
            self.kill()
            raise InfrastructureError(
                f"the process for symbolic algebra did not start (try: {sys.executable} -c 'import math_verify')"
            )

    def ask(self, prediction: str, ground_truth: str, seconds: float) -> bool | None:
        """The verdict, or None when the child died or did not answer in time; it must then be killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([prediction, ground_truth]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return {b"1\n": True, b"0\n": False}.get(self._line(seconds))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unsent bytes to a dead child
                    pipe.close()

    def _line(self, seconds: float) -> bytes:
        """The child's next line (a few bytes, written at once); empty if it dies or after `seconds`."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poller = select.poll()  # unlike select(), takes descriptors above 1023
        poller.register(descriptor, select.POLLIN | select.POLLHUP)
        return os.read(descriptor, 64) if poller.poll(seconds * 1000) else b""


class AlgebraProcesses:
    """At most `limit` children; a question waits for a free one."""

    def __init__(self, limit: int | None = None) -> None:
        self._permits = threading.Semaphore(limit or min(4, os.cpu_count() or 1))
        self._free: queue.LifoQueue[_Child] = queue.LifoQueue()
        atexit.register(self.close)

    def equal(self, prediction: str, ground_truth: str, seconds: float = ANSWER_SECONDS) -> bool:
        """Whether both answers are mathematically equal; False if undecided after `seconds`.

        Raises:
            InfrastructureError: no child could be started.
        """
        with self._permits:
            child = self._take()
            verdict = None
            try:
                verdict = child.ask(prediction, ground_truth, seconds)
            finally:
                if verdict is None:
                    child.kill()
                else:
                    self._free.put(child)
            return bool(verdict)

    def close(self) -> None:
        """Stops the idle children."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait().kill()

    def _take(self) -> _Child:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return _Child()
