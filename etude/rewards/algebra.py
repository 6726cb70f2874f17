"""`AlgebraProcesses`: symbolic equality in child processes with hard limits on CPU time and memory.

Invariant: a verdict is about the answer; a failure of the processes never is one, and is never cached.

- A question that exceeds its CPU time or memory, or crashes the libraries, is undecided, which counts as not equal: the
  answer is at fault. Otherwise a policy could learn to write slow answers, to be dropped instead of scored 0.
- A child that is killed or hangs raises `InfrastructureError`. Where only the fork that computes was killed, as by the
  kernel for want of memory, the question is asked once more; if that fork is killed too, the answer is at fault.
- Slow questions do not delay the others. Each first gets `FIRST_SECONDS` of CPU time, several times what a right answer
  needs; only if that is not enough, it waits for the one child that gives `seconds`, and is undecided, but not cached,
  if others keep that child busy for `PATIENCE_SECONDS`.

`equal` returns within its limits from any thread; there are never more than `limit` + 1 children. What "equal" means is left
to math-verify (`algebra_child.py`).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from etude.errors import InfrastructureError
from etude.rewards.processes import START_SECONDS, Child, ChildPool

FIRST_SECONDS = 0.5  # of 670 comparisons of answers to MATH-500, 99 % need less than 0.15 s, and none more than 0.35 s
ANSWER_SECONDS = 3.0
PATIENCE_SECONDS = 20.0
HUNG_SECONDS = 60.0  # wall-clock seconds: many times the CPU time that a question can use
_CACHE_SIZE = 4096  # cached verdicts: the rollouts of a group mostly repeat a few answers
_CHILD = str(Path(__file__).with_name("algebra_child.py"))


class AlgebraProcesses:
    """A pool of `limit` children for first tries, and one for second tries with at most `seconds` of CPU time; callers wait
    for a free child."""

    def __init__(self, limit: int | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self.seconds = seconds
        self._permits = threading.Semaphore(limit or min(4, os.cpu_count() or 1))
        self._second_try = threading.Lock()
        self._children = ChildPool(_start)
        self._verdict = functools.lru_cache(_CACHE_SIZE)(self._decide)
        self.close = self._children.close

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
        if verdict == "undecided" and self.seconds > FIRST_SECONDS:
            if not self._second_try.acquire(timeout=PATIENCE_SECONDS):
                raise _Busy
            try:
                verdict = self._try(ours, theirs, self.seconds)
            finally:
                self._second_try.release()
        return verdict == "equal"

    def _try(self, ours: tuple[str, ...], theirs: tuple[str, ...], seconds: float) -> str:
        """Returns `equal`, `different`, `undecided`, or `killed` if the fork that computed it was killed twice."""
        question = ours, theirs, seconds
        try:
            verdict: str = self._children.ask(question, HUNG_SECONDS)
            if verdict == "killed":
                verdict = self._children.ask(question, HUNG_SECONDS)
        except (EOFError, OSError) as error:
            raise InfrastructureError("the process for symbolic algebra was killed or hangs") from error
        return verdict


def _start() -> Child:
    # -I keeps this folder, whose math.py would shadow the standard one, off the child's path; it gets ours instead.
    child = Child("-I", _CHILD, forks=True)
    try:
        child.ask(sys.path, START_SECONDS)
    except BaseException as error:
        child.kill()
        if isinstance(error, EOFError | OSError):
            command = f"{sys.executable} -c 'import math_verify'"
            text = f"the process for symbolic algebra did not start (try: {command})"
            raise InfrastructureError(text) from error
        raise
    return child


class _Busy(Exception):
    """Others used the child for second tries all the time."""
