"""The child process of `algebra.py`: answers one question after another with `equal`, `different`, `undecided` (the question
exceeded its CPU time, or crashed the libraries) or `killed` (what computed it was killed from outside).

Invariant: this process imports the libraries once but answers no question itself: a fork of it does, with limits on CPU time
and memory, and is replaced within milliseconds when it dies. The fork lives on between questions, because the libraries'
caches make it several times faster than a new one. This file imports nothing from the package, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

MEMORY_BYTES = 2 << 30  # the libraries need 0.12 GiB
KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what no library does to its own process

_WORDED = re.compile(
    r"\\(?:text[a-z]*|mathrm|mbox)\s*\{(?:[^{}]|\{[^{}]*\})*\}(?:\^\s*\{?-?\d\}?)?|\{\s*\\rm\b[^{}]*\}"
)
_WORDED_LAST = re.compile(rf"(?<=\S)(?:\s*(?:\\cdot\s*|/)?(?:{_WORDED.pattern}))+\s*(?=\$?\Z)")
_UNIT_LAST = re.compile(  # of a formula, as Math-Verify knows them
    r"(?<=[\w})])(?:\s+(?:square|cubic))?\s+(?:units?|inch(?:es)?|(?:centi|kilo|milli)?(?:meter|metre|gram)s?|[ckm]m|[km]g|ft|feet|foot"
    r"|miles?|hours?|hrs?|min(?:ute)?s?|sec(?:ond)?s?|days?|weeks?|months?|years?|degrees?|dollars?|cents?|lit(?:er|re)s?|mph)\s*(?=\$?\Z)"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WITH_UNIT = re.compile(r"[^a-zA-Z]*\d[^a-zA-Z]*?(?:\s[a-zA-Z]+|(?!(?:ab|bc|st|rs|th|rd)\b)[a-zA-Z]{2,})[\s.$]*")
"""A number and a unit: 5 m or 5kg. Math-Verify takes the last letters of 5ab and \\pi r^2 h for one, too."""


class Worker:
    """A forked process that answers questions."""

    def __init__(self, parent: int) -> None:
        asked, self._ask = os.pipe()
        self._answer, answered = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for descriptor in (self._ask, self._answer, parent):
                    os.close(descriptor)
                _serve(os.fdopen(asked), answered)
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answered)

    def ask(self, question: Any) -> bytes:
        """Returns `1` or `0`; empty if the worker died: it must then be ended."""
        try:
            os.write(self._ask, json.dumps(question).encode() + b"\n")
        except OSError:
            return b""
        return os.read(self._answer, 1)

    def end(self) -> bool:
        """Reaps the dead worker; returns whether it was killed from outside."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self._ask)
        os.close(self._answer)
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) in KILLED


def _serve(questions: Any, answers: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in questions:
        ours, theirs, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # an unhandled SIGPROF kills this process even inside C code
        try:
            verdict = equal(ours, theirs)
        except Exception:  # sympy may raise anything on malformed input: not equal
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, b"1" if verdict else b"0")


def equal(ours: list[str], theirs: list[str]) -> bool:
    """Whether any reading of the prediction is equivalent to any reading of the reference."""
    from math_verify import verify

    ours_named, theirs_named = (any(map(_letters, texts)) for texts in (ours, theirs))
    references = [_parse(text, _has_unit(text) and not ours_named) for text in theirs]
    for text in ours:
        found = _parse(text, not theirs_named)
        for reference in references:
            solved = all(isinstance(each, str) or _is_solved(each) for each in found)
            if verify(reference, found, timeout_seconds=None, allow_set_relation_comp=solved):
                return True
    return False


def _letters(text: str) -> bool:
    return bool(re.search("[a-zA-Z]", _COMMAND.sub("", _WORDED.sub("", text))))


def _has_unit(text: str) -> bool:
    return not _letters(text) or bool(_WITH_UNIT.fullmatch(_COMMAND.sub("", _WORDED.sub("", text))))


def _parse(text: str, is_with_unit: bool) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from sympy import Basic, I  # type: ignore[import-untyped]

    formula = text.startswith("$") and text.endswith("$")  # parsed as a whole or not at all
    latex = LatexExtractionConfig()
    if not is_with_unit:
        text = _UNIT_LAST.sub("", _WORDED_LAST.sub("", text))
        latex = replace(latex, normalization_config=replace(latex.normalization_config, units=False))
    kinds = [latex] if formula else [latex, ExprExtractionConfig()]
    found = parse(text, kinds, parsing_timeout=None)
    for number, each in enumerate(found):
        if isinstance(each, Basic):
            units = {symbol: I for symbol in each.free_symbols if str(symbol) == "i"}
            found[number] = each.subs(units) if units else each
    return found


def _is_solved(relation: Any) -> bool:
    """Whether `relation` is a solution (x ≥ 5) rather than a problem (2x - 4 ≥ 6), which sympy would solve."""
    parts = getattr(relation, "_unsorted_args", None) or [relation]
    if not all(getattr(each, "is_Relational", False) for each in parts):
        return True  # not a relation
    return all(
        any(side.is_Symbol and not other.free_symbols for side, other in ((each.lhs, each.rhs), (each.rhs, each.lhs)))
        for each in parts
    )


def main() -> None:
    """Answers questions until the pipe closes."""
    descriptor = int(sys.argv[1])
    pipe: Connection[Any, Any] = Connection(descriptor)
    for stream in (1, 2):  # whatever the libraries print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    with contextlib.suppress(EOFError, OSError):
        sys.path[:] = pipe.recv()
        equal(["$x+1$"], ["$1+x$"])  # triggers every lazy import before the first fork
        worker = Worker(descriptor)
        pipe.send("ready")
        while True:
            verdict = {b"1": "equal", b"0": "different"}.get(worker.ask(pipe.recv()))
            if verdict is None:
                verdict = "killed" if worker.end() else "undecided"
                worker = Worker(descriptor)
            pipe.send(verdict)


if __name__ == "__main__":
    main()
