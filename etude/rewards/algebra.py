"""`AlgebraProcesses`: symbolic equality in child processes with hard limits on CPU time and memory.

Invariant: `equal` returns within its limits from any thread; a child that exceeds them is killed and replaced, so there
are never more than `limit` children. Children start on demand, are reused, and exit with their parent (their standard
input closes). What "equal" means is left to math-verify (`algebra_child.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from etude.errors import InfrastructureError

START_SECONDS = 120.0  # importing sympy on a busy machine
ANSWER_SECONDS = 3.0
_CHILD_SECONDS = 60.0  # wall-clock seconds after which the child itself counts as hung
_CACHE_SIZE = 4096  # cached verdicts: the rollouts of a group mostly repeat a few answers
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

    def ask(self, question: bytes) -> bytes:
        """Returns the verdict (`1`, `0`, or `?` for undecided); empty if the child is dead or hung, and must be killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question)
            self._process.stdin.flush()
        except OSError:
            return b""
        return self._line(_CHILD_SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unsent bytes to a dead child
                    pipe.close()

    def _line(self, seconds: float) -> bytes:
        """Returns the child's next line (a few bytes, written at once); empty if it dies or `seconds` pass."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poller = select.poll()  # unlike select(), takes descriptors above 1023
        poller.register(descriptor, select.POLLIN | select.POLLHUP)
        return os.read(descriptor, 64) if poller.poll(seconds * 1000) else b""


class AlgebraProcesses:
    """A pool of at most `limit` children with at most `seconds` of CPU time per question; callers wait for a free child."""

    def __init__(self, limit: int | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self.seconds = seconds
        self._permits = threading.Semaphore(limit or min(4, os.cpu_count() or 1))
        self._free: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._verdict = functools.lru_cache(_CACHE_SIZE)(self._ask)
        atexit.register(self.close)

    def equal(self, ours: Sequence[str], theirs: Sequence[str]) -> bool:
        """Whether any reading of `ours` is mathematically equal to any of `theirs`; False if undecided after `seconds`.
        A reading is prose, or text with LaTeX between `$`.

        Raises:
            InfrastructureError: no child could be started.
        """
        return self._verdict(tuple(ours), tuple(theirs))

    def _ask(self, ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
        with self._permits:
            child = self._take()
            answer = b""
            try:
                answer = child.ask(json.dumps([ours, theirs, self.seconds]).encode() + b"\n")
            finally:
                if answer:
                    self._free.put(child)
                else:
                    child.kill()
            return answer == b"1\n"

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
