"""`AlgebraProcesses`: symbolic equality in child processes with hard limits on CPU time and memory.

Invariant: a verdict is about the answer; a failure of the processes never is one, and is never cached.

- A question that exceeds its CPU time or memory, or crashes the libraries, is undecided, which counts as not equal: the
  answer is at fault. Otherwise a policy could learn to write slow answers, to be dropped instead of scored 0.
- A child that is killed or hangs raises `InfrastructureError`. Where only the fork that computes was killed, as by the
  kernel for want of memory, the question is asked once more; if that fork is killed too, the answer is at fault.
- Slow questions do not delay the others. Each first gets `FIRST_SECONDS` of CPU time, several times what a right answer
  needs; only if that is not enough, it waits for the one child that gives `seconds`, and is undecided, but not cached,
  if others keep that child busy for `PATIENCE_SECONDS`.

`equal` returns within its limits from any thread; there are never more than `limit` + 1 children, which start on demand,
are reused, and exit with their parent (their standard input closes). What "equal" means is left to math-verify
(`algebra_child.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from etude.errors import InfrastructureError

START_SECONDS = 120.0  # importing sympy on a busy machine
FIRST_SECONDS = 0.5  # of 670 comparisons of answers to MATH-500, 99 % need less than 0.15 s, and none more than 0.35 s
ANSWER_SECONDS = 3.0
PATIENCE_SECONDS = 20.0
HUNG_SECONDS = 60.0  # wall-clock seconds: many times the CPU time that a question can use
_CACHE_SIZE = 4096  # cached verdicts: the rollouts of a group mostly repeat a few answers
_CHILD = Path(__file__).with_name("algebra_child.py")


class _Child:
    """One child process. Only one thread at a time may call `ask`."""

    def __init__(self) -> None:
        # -I keeps this folder, whose math.py would shadow the standard one, off the child's path; it gets ours instead.
        command = [sys.executable, "-I", str(_CHILD), json.dumps(sys.path)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"cannot start the process for symbolic algebra: {error}") from error
        if self._line(START_SECONDS) != b"ready\n":
            self.kill()
            raise InfrastructureError(
                f"the process for symbolic algebra did not start (try: {sys.executable} -c 'import math_verify')"
            )

    def ask(self, question: bytes) -> bytes:
        """Returns `1`, `0`, `?` (undecided) or `!` (the fork that computed it was killed).

        Raises:
            InfrastructureError: the child is dead or hung, and must be killed.
        """
        assert self._process.stdin is not None
        verdict = b""
        with contextlib.suppress(OSError):
            self._process.stdin.write(question)
            self._process.stdin.flush()
            verdict = self._line(HUNG_SECONDS).strip()
        if not verdict:
            raise InfrastructureError("the process for symbolic algebra was killed or hangs")
        return verdict

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with its fork, which may hang too
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
    """A pool of `limit` children for first tries, and one for second tries with at most `seconds` of CPU time; callers wait
    for a free child."""

    def __init__(self, limit: int | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self.seconds = seconds
        self._permits = threading.Semaphore(limit or min(4, os.cpu_count() or 1))
        self._second_try = threading.Lock()
        self._free: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._verdict = functools.lru_cache(_CACHE_SIZE)(self._decide)
        atexit.register(self.close)

    def equal(self, ours: Sequence[str], theirs: Sequence[str]) -> bool:
        """Whether any reading of `ours` is mathematically equal to any of `theirs`; False if undecided within its limits.
        A reading is prose, or text with LaTeX between `$`.

        Raises:
            InfrastructureError: no child could be started, or one was killed or hangs.
        """
        try:
            return self._verdict(tuple(ours), tuple(theirs))
        except _Busy:
            return False

    def _decide(self, ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
        with self._permits:
            verdict = self._try(ours, theirs, min(self.seconds, FIRST_SECONDS))
        if verdict == b"?" and self.seconds > FIRST_SECONDS:
            if not self._second_try.acquire(timeout=PATIENCE_SECONDS):
                raise _Busy
            try:
                verdict = self._try(ours, theirs, self.seconds)
            finally:
                self._second_try.release()
        return verdict == b"1"

    def _try(self, ours: tuple[str, ...], theirs: tuple[str, ...], seconds: float) -> bytes:
        """Returns `1`, `0`, `?`, or `!` if the fork was killed twice."""
        child = self._take()
        verdict = b""
        try:
            question = json.dumps([ours, theirs, seconds]).encode() + b"\n"
            verdict = child.ask(question)
            verdict = child.ask(question) if verdict == b"!" else verdict
        finally:
            if verdict:
                self._free.put(child)
            else:
                child.kill()
        return verdict

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


class _Busy(Exception):
    """Others used the child for second tries all the time."""
