"""`Finding`: what an inspection says of one thing, with what to do about it; `Findings` collects them.

Invariant: an inspection goes on after a failure: what a step raises is an error, what it logs a warning, a step that lacks
the result of another is skipped, and nothing is reported twice. Errors and warnings come with advice that names a key, file,
command or piece of code.
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
"""What advice has that names something: a command, a value, a path, a key or a function."""
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
_PLACE = re.compile(r"\(([^()]+\.py:\d+)[^()]*\)")  # as `errors.describe_error` writes it


class Level(str, Enum):
    """How serious a finding is; `SKIPPED`: not there, or not looked at because something else failed."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One line on `subject`, and one on what to do: never empty for an error or a warning."""

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
        """Whether one is an error."""
        return any(finding.level is Level.ERROR for finding in self.all)

    def add(self, level: Level, subject: str, message: str, fix: str = "") -> None:
        """Adds a finding."""
        self.all.append(Finding(level, subject, " ".join(message.split()), " ".join(fix.split())))

    def add_line(self, level: Level, subject: str, line: str, fix: str) -> None:
        """Adds a one-line error or warning of another part of the program, which mostly ends with its own advice. Where that
        names nothing, the user's file that raised, and `fix`, follow. A line that repeats an earlier one is left out."""
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
        """Runs a step; the line it returns is its finding where it raised, logged and added nothing. Skipped if not
        `ready`: what it needs is not there."""
        if not ready:
            self.add(Level.SKIPPED, subject, "not checked: an error above stands in the way")
            return
        before = len(self.all)
        with self._warnings(subject, fix):
            try:
                summary = step()
            except ConfigErrors as error:
                for line in str(error).splitlines()[1:]:
                    self.add_line(Level.ERROR, subject, line, fix)
            except EtudeError as error:
                self.add_line(Level.ERROR, subject, " ".join(str(error).split()), fix)
            except Exception as error:  # a user's code may raise anything
                self.add_line(Level.ERROR, subject, describe_error(error), fix)
            else:
                if summary and all(each.level is Level.OK for each in self.all[before:]):
                    self.add(Level.OK, subject, summary)

    @contextmanager
    def _warnings(self, subject: str, fix: str) -> Iterator[None]:
        """What the package logs as a warning meanwhile becomes a finding."""
        ours, found = logging.getLogger("etude"), _Collector()
        propagates, ours.propagate = ours.propagate, False
        ours.addHandler(found)
        try:
            yield
        finally:
            ours.removeHandler(found)
            ours.propagate = propagates
            for line in found.lines:
                self.add_line(Level.WARNING, subject, line, fix)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(" ".join(record.getMessage().split()))


def split_advice(line: str) -> tuple[str, str]:
    """(what is wrong, what to do) of an error line; the second is empty where the line has no imperative.

    "unknown key trainer.sed; did you mean trainer.seed?" is split at the semicolon.
    """
    found = None
    for found in _ADVICE.finditer(line):
        if not line[found.end() :].startswith("known:"):
            break
    return (line, "") if found is None else (line[: found.start()], line[found.end() :])
