"""`@check(stage)` registers a check; `Findings` runs the checks of a stage and collects what they find.

A check is a generator. It yields an error for what would stop a run, a `Finding` for a warning, and a line of text
for what is as it should be.

Invariant: an inspection continues after a failure: an exception in a check is an error, what it logs is a warning, a check
that lacks the result of another is skipped, and nothing is reported twice. Errors and warnings come with a fix that names a
key, file, command or piece of code.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from logging.handlers import BufferingHandler
from typing import Any, Literal, TypeVar

from etude.errors import WARNING, ConfigError, ConfigErrors, EtudeError, describe_error

logger = logging.getLogger(__name__)
_PLACE = re.compile(r"\(([^()]+\.py:\d+)[^()]*\)")  # as written by `errors.describe_error`


def place_in(line: str) -> str:
    """The user's `file:line` that an error names; empty if it names none."""
    found = _PLACE.search(line)
    return found[1] if found else ""


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


def warning(message: str, fix: str, subject: str = "") -> Finding:
    """A warning; without a subject, of the check that yields it."""
    return Finding(Level.WARNING, subject, message, fix)


def error(message: str, fix: str, subject: str = "") -> Finding:
    """An error; without a subject, of the check that yields it."""
    return Finding(Level.ERROR, subject, message, fix)


def ok(message: str, subject: str = "") -> Finding:
    """What is as it should be, also beside warnings; a line of text is left out where there is one."""
    return Finding(Level.OK, subject, message)


def skipped(message: str) -> Finding:
    """What could not be found out."""
    return Finding(Level.SKIPPED, "", message)


Result = Iterator[Finding | Exception | str]
Stage = Literal[
    "estimator and loss", "training", "fine-tuning", "start", "setup", "loaded", "machine", "run", "environment",
    "conformance", "gpu",
]  # fmt: skip
"""When a check runs: on the options, again when plug-ins have registered what they name, before torch is imported, when
plug-ins are imported, when tools are loaded; in `etude doctor`, `check`, `env test`, `env check`, `doctor --gpu`."""
F = TypeVar("F", bound=Callable[..., Iterable[Any]])


@dataclass(frozen=True)
class Check:
    """A registered check. `fix` is for what it raises, where that has none; `needs`: see `check`."""

    function: Callable[..., Iterable[Any]]
    subject: str
    fix: str | Callable[[Any], str]
    needs: str


_CHECKS: dict[Stage, list[Check]] = {}


def check(
    stage: Stage, subject: str = "", *, fix: str | Callable[[Any], str] = "", needs: str = ""
) -> Callable[[F], F]:
    """Registers a check of what the stage is about, such as a run's options.

    Args:
        fix: the fix of what it raises; may be a function of what is checked.
        needs: attributes of what is checked, separated by spaces; without one the check is skipped: an earlier one has not
            set it.
    """

    def register(function: F) -> F:
        _CHECKS.setdefault(stage, []).append(Check(function, subject, fix, needs))
        return function

    return register


def faults_of(stage: Stage, *of: Any) -> Iterator[ConfigError]:
    """What the checks of a stage that only yields errors find."""
    for each in _CHECKS[stage]:
        yield from each.function(*of)


def require(stage: Stage, of: Any) -> None:
    """Runs the checks of a stage for a run that is about to start: warnings are logged.

    Raises:
        EtudeError: the first error.
    """
    for each in _CHECKS[stage]:
        for found in each.function(of):
            if isinstance(found, Exception):
                raise found
            if isinstance(found, Finding) and found.level is Level.ERROR:
                raise ConfigError(found.message, fix=found.fix)
            if isinstance(found, Finding) and found.level is Level.WARNING:
                logger.warning(WARNING, found.message, found.fix)


class Findings:
    """The findings of one inspection, in order."""

    def __init__(self) -> None:
        self.all: list[Finding] = []
        self._lines: list[str] = []

    @property
    def failed(self) -> bool:
        """Whether any finding is an error."""
        return any(finding.level is Level.ERROR for finding in self.all)

    def run_stage(
        self, stage: Stage, of: Any, *, fix: str = "", leave_out: str = "", only: Collection[str] = ()
    ) -> Findings:
        """Runs the checks of a stage on `of`, in the order of their registration, but for one subject; or of some subjects
        `only`. `fix`: of those that have none."""
        for each in _CHECKS[stage]:
            if each.subject == leave_out or (only and each.subject not in only):
                continue
            if not all(hasattr(of, name) for name in each.needs.split()):
                self.skip(each.subject, "not checked: an error above stands in the way")
            else:
                own = each.fix if isinstance(each.fix, str) else each.fix(of)
                self.run(each.subject, lambda each=each: each.function(of), own or fix)  # type: ignore[misc]
        return self

    def skip(self, subject: str, why: str) -> None:
        """Adds that something was not checked."""
        self.all.append(Finding(Level.SKIPPED, subject, why))

    def run(self, subject: str, check: Callable[[], Result], fix: str) -> None:
        """Runs a check and collects what it yields, raises and logs. Its lines are added as OK if nothing else was found."""
        before, lines = len(self.all), list[str]()
        with self._warnings(subject, fix):
            try:
                for found in check():
                    if isinstance(found, str):
                        lines.append(found)
                    elif isinstance(found, Finding):
                        self._add(replace(found, subject=found.subject or subject))
                    else:
                        self.add_error(subject, found, fix)
            except Exception as raised:  # user code may raise anything
                self.add_error(subject, raised, fix)
        if all(each.level is Level.OK for each in self.all[before:]):
            for line in lines:
                self._add(ok(line, subject))

    def _add(self, found: Finding) -> None:
        self.all.append(replace(found, message=" ".join(found.message.split()), fix=" ".join(found.fix.split())))

    def add_error(self, subject: str, problem: Exception, fix: str, level: Level = Level.ERROR) -> None:
        """Adds an error with its own fix, else with the user's file that raised it and `fix`; a repeated one is ignored."""
        if isinstance(problem, ConfigErrors):
            for fault in problem.faults:
                self.add_error(subject, fault, fix, level)
            return
        own, line = (problem.fix, problem.message) if isinstance(problem, EtudeError) else ("", describe_error(problem))
        line = " ".join(line.split())
        reason = line.partition(": ")[2] or line
        place = place_in(line)
        if any(reason in each or each in line or (place and place == place_in(each)) for each in self._lines):
            return
        self._lines.append(line)
        self._add(Finding(level, subject, line, own or (f"mend {place}; {fix}" if place else fix)))

    @contextmanager
    def _warnings(self, subject: str, fix: str) -> Iterator[None]:
        """Turns warnings that the package logs inside the block into findings."""
        ours, collector = logging.getLogger("etude"), BufferingHandler(sys.maxsize)
        collector.setLevel(logging.WARNING)
        propagates, ours.propagate = ours.propagate, False
        ours.addHandler(collector)
        try:
            yield
        finally:
            ours.removeHandler(collector)
            ours.propagate = propagates
            for record in collector.buffer:
                if record.msg == WARNING and isinstance(record.args, tuple):
                    problem, own = map(str, record.args)
                    self.add_error(subject, EtudeError(problem, fix=own), fix, Level.WARNING)
                else:
                    self.add_error(subject, EtudeError(record.getMessage()), fix, Level.WARNING)
