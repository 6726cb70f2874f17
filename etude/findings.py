"""`Finding`: one result of an inspection, with advice on what to do; `Findings` collects them.

Invariant: an inspection continues after a failure: an exception in a step is an error, what it logs is a warning, a step
that lacks the result of another is skipped, and nothing is reported twice. Errors and warnings come with advice that names a
key, file, command or piece of code.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from etude.errors import ConfigErrors, EtudeError, describe_error

_ADVICE = re.compile(
    r"(?:; |: |, or )(?=(?:set|write|raise|take|name|use|give|run|did you mean|install|put|choose|add|make|start|delete|free"
    r"|lower|leave|list|known:|sample|export) )"
)
_NAMES = re.compile(r"[`'=/]|\w[._(]\w|(?<!\S)--?\w")
"""Matches advice that names something concrete: a command, a value, a path, a key or a function."""
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
_PLACE = re.compile(r"\(([^()]+\.py:\d+)[^()]*\)")  # as written by `errors.describe_error`


class Level(str, Enum):
    """Severity of a finding; `SKIPPED`: not present, or not checked because something else failed."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One line about `subject`, and one with the fix, which is never empty for an error or a warning."""

    level: Level
    subject: str
    message: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.level in (Level.ERROR, Level.WARNING) and not self.fix:
            raise ValueError(f"no advice for: {self.message}")


class Findings:
    """The findings of one inspection, in order."""

    def __init__(self) -> None:
        self.all: list[Finding] = []
        self._lines: list[str] = []

    @property
    def failed(self) -> bool:
        """Whether any finding is an error."""
        return any(finding.level is Level.ERROR for finding in self.all)

    def add(self, level: Level, subject: str, message: str, fix: str = "") -> None:
        self.all.append(Finding(level, subject, " ".join(message.split()), " ".join(fix.split())))

    def add_line(self, level: Level, subject: str, line: str, fix: str) -> None:
        """Adds a one-line error or warning from another part of the program, which usually ends with its own advice. If
        that names nothing concrete, the user's file that raised and `fix` are appended. Repeated lines are ignored."""
        reason = line.partition(": ")[2] or line
        if any(reason in earlier or earlier in line for earlier in self._lines):
            return
        self._lines.append(line)
        message, advice = split_advice(line)
        if not _NAMES.search(advice):
            place = _PLACE.search(line)
            advice = "; ".join(filter(None, (advice, f"mend {place[1]}" if place else "", fix)))
        if key := _KEY.match(line):
            advice = advice.replace("set it to", f"set {key[0]} to")
        self.add(level, subject, message, advice)

    def run(self, subject: str, step: Callable[[], str | None], *, fix: str, ready: bool = True) -> None:
        """Runs a step; the line that it returns is added as OK, unless the step raised, logged a warning, or added an error
        or warning itself. Skipped unless `ready`, that is, if something that it needs is missing."""
        if not ready:
            self.add(Level.SKIPPED, subject, "not checked: an error above stands in the way")
            return
        before, summary = len(self.all), None
        with self._warnings(subject, fix):
            try:
                summary = step()
            except ConfigErrors as error:
                for line in str(error).splitlines()[1:]:
                    self.add_line(Level.ERROR, subject, line, fix)
            except EtudeError as error:
                self.add_line(Level.ERROR, subject, " ".join(str(error).split()), fix)
            except Exception as error:  # user code may raise anything
                self.add_line(Level.ERROR, subject, describe_error(error), fix)
        if summary and all(each.level is Level.OK for each in self.all[before:]):
            self.add(Level.OK, subject, summary)

    @contextmanager
    def _warnings(self, subject: str, fix: str) -> Iterator[None]:
        """Turns warnings that the package logs inside the block into findings."""
        ours, collector = logging.getLogger("etude"), _Collector()
        propagates, ours.propagate = ours.propagate, False
        ours.addHandler(collector)
        try:
            yield
        finally:
            ours.removeHandler(collector)
            ours.propagate = propagates
            for line in collector.lines:
                self.add_line(Level.WARNING, subject, line, fix)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(" ".join(record.getMessage().split()))


def split_advice(line: str) -> tuple[str, str]:
    """Splits an error line into (problem, advice); the advice is empty if the line has no imperative.

    "unknown key trainer.sed; did you mean trainer.seed?" is split at the semicolon.
    """
    match = None
    for match in _ADVICE.finditer(line):
        if not line[match.end() :].startswith("known:"):
            break
    return (line, "") if match is None else (line[: match.start()], line[match.end() :])
