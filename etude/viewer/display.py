"""`Display` and `RolloutBar`: event sinks that show a run or an evaluation live in the terminal.

Invariant: watching a run never affects it: neither sink raises, and after an error the display shuts itself off with one
log line. On a terminal it is a live panel with log records scrolling above; otherwise it prints one line per step, and lines
about rollouts that take long. Once a run has started, nothing is displayed unless `trainer.logger` includes `console`. The
panel itself is rendered in `progress`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import suppress
from shlex import quote

from rich.console import Console, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress
from rich.text import Text

from etude.errors import EtudeError, describe_error, one_line
from etude.options import RunOptions, TrainerOptions
from etude.trainer.events import Event, Notice, RolloutProgress, RunEnded, RunStarted, StepFinished, UpdateProgress
from etude.viewer.curves import REWARD_KEYS, is_validation
from etude.viewer.progress import RunState, format_duration, format_lines, render_panel

logger = logging.getLogger(__name__)

_LINE_SECONDS = 5.0  # minimum interval between lines for steps without rewards, such as a warm-up's, and for rollouts
_FIRST_SECONDS = 1.0  # after which a rollout that still runs is mentioned
_UPDATE_SECONDS = 10.0, 30.0  # likewise an update, and the interval of its lines
_REFRESHES_A_SECOND = 2  # each costs a few milliseconds of a core that training needs


class RunConsole(Console):
    """A console that survives a broken pipe (`etude train | head`), where Rich would exit the process."""

    def on_broken_pipe(self) -> None:
        """Stops printing, and logs it once."""
        if not self.quiet:
            self.quiet = True
            logger.warning("the output is no longer read; training continues")


class RolloutLines:
    """Lines about rollouts where there is no terminal: after a second, then every few seconds, then ever more rarely; or,
    with other seconds, about the micro-batches of an update."""

    def __init__(self, first: float = _FIRST_SECONDS, interval: float = _LINE_SECONDS) -> None:
        self._tokens, self._first, self._interval = 0, first, interval
        self._restart()

    def _restart(self) -> None:
        self._began, self._tokens_before, self._done = time.monotonic(), self._tokens, 0
        self._due = self._began + self._first

    def line(self, event: RolloutProgress | UpdateProgress) -> str | None:
        """What to print; None if it is too early. Fewer finished ones than before belong to the next batch."""
        tokens, what = (0, "micro-batches") if isinstance(event, UpdateProgress) else (event.tokens, "rollouts")
        if event.done < self._done or tokens < self._tokens:
            self._restart()
        now, self._done, self._tokens = time.monotonic(), event.done, tokens
        if now < self._due:
            return None
        took = max(now - self._began, 1e-3)
        self._due = now + max(self._interval, took / 10)
        parts = [f"{event.done}/{event.total} {what}"]
        if (sampled := tokens - self._tokens_before) > 0:
            parts.append(f"{sampled / took:,.0f} tokens/s")
        if 10 * event.done >= event.total:  # too noisy before 10 %
            parts.append(f"{format_duration(took * (event.total - event.done) / max(event.done, 1))} left")
        return " · ".join(parts)


class Display:
    """Event sink that displays a run, and writes its report at the end (`trainer.report`), if the run is `kept`."""

    def __init__(self, console: RunConsole | None = None, kept: bool = True) -> None:
        self._console, self._kept = console or RunConsole(), kept
        self._state = RunState("", 0)
        self._enabled, self._broken = True, False  # a notice before the run starts, while models load, is a line
        self._live: Live | None = None
        self._replaced: list[tuple[logging.Handler, logging.Handler]] = []
        self._lock = threading.RLock()
        self._waiting: list[str] = []  # lines to print
        self._printing = False
        self._step_began = self._line_printed = 0.0
        self._lines = RolloutLines()
        self._update_lines: RolloutLines | None = None  # from the first news of a step's update on
        self._options = RunOptions()

    def __call__(self, event: Event) -> None:
        """Displays an event; an error in the view disables the view and never stops training."""
        if isinstance(event, RunStarted):
            self._options = event.options
        options = self._options if self._kept else None
        if isinstance(event, RunEnded) and isinstance(options, TrainerOptions) and options.report:
            self(Notice(write_run_report(options)))
        if not self._broken:
            try:
                self._show(event)
            except Exception as error:
                self._disable(error)

    def _show(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._open(event)
            case RolloutProgress(done, total):
                with self._lock:
                    self._state.rollouts = (done, total)
                goes_on = self._state.step < self._state.total_steps
                if self._enabled and self._live is None and goes_on and (line := self._lines.line(event)):
                    self._print(line)
            case UpdateProgress():
                lines = self._update_lines = self._update_lines or RolloutLines(*_UPDATE_SECONDS)
                if self._enabled and self._live is None and (line := lines.line(event)):
                    self._print(f"step {self._state.step + 1}: update: {line}")
            case StepFinished():
                self._step(event)
            case Notice(text):
                with self._lock:
                    self._state.notice = line = " ".join(text.split())[:300]
                if self._live is None and self._enabled:
                    self._print(line)
            case RunEnded():
                self._close()

    def _open(self, run: RunStarted) -> None:
        self._state = RunState(run.title, run.total_steps, run.step, run.step > 0, validated=run.validation)
        self._enabled, self._step_began = "console" in run.options.logger, time.monotonic()
        self._lines = RolloutLines()
        options = self._console.options
        if not self._enabled or not self._console.is_terminal or options.ascii_only or self._console.is_dumb_terminal:
            return
        self._redirect_logging()  # before the live view replaces stdout and stderr
        self._live = Live(self, console=self._console, refresh_per_second=_REFRESHES_A_SECOND)
        self._live.start(refresh=True)

    def _step(self, event: StepFinished) -> None:
        now = time.monotonic()
        with self._lock:
            self._state.total_steps = event.total_steps
            self._state.add(event.step, event.metrics, now - self._step_began, event.evidence)
        self._step_began, self._update_lines = now, None
        if self._live is not None:
            self._live.refresh()
            return
        tells = event.step >= event.total_steps or any(is_validation(n) or n in REWARD_KEYS for n in event.metrics)
        if self._enabled and (tells or now - self._line_printed >= _LINE_SECONDS):
            self._line_printed = now
            for line in format_lines(self._state):
                self._print(line)

    def __rich__(self) -> RenderableType:
        try:
            with self._lock:
                return render_panel(self._state, *self._console.size)
        except Exception as error:  # this runs in Rich's refresh thread, where nothing else would catch it
            return Text(f"(the view failed: {type(error).__name__})", style="dim")

    def _redirect_logging(self) -> None:
        """Routes the root logger's terminal output through the live view, so that log lines do not break the panel."""
        root = logging.getLogger()
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        for handler in list(root.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                shown = RichHandler(console=self._console, show_path=False, markup=False, level=handler.level)
                shown.filters = list(handler.filters)
                root.removeHandler(handler)
                root.addHandler(shown)
                self._replaced.append((handler, shown))

    def _close(self) -> None:
        root = logging.getLogger()
        for handler, shown in self._replaced:
            root.removeHandler(shown)
            root.addHandler(handler)
        self._replaced.clear()
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _disable(self, error: Exception) -> None:
        self._broken = True
        try:
            self._close()
        except Exception:
            logger.debug("the live view could not be stopped", exc_info=True)
        logger.warning("the display stopped (%s: %s); training continues", type(error).__name__, error)

    def _print(self, line: str) -> None:
        """Prints a line: after the one being written if a signal handler calls, as Rich would write that one twice."""
        with self._lock:
            self._waiting.append(line)
            while self._waiting and not self._printing:
                self._printing = True
                try:
                    lines, self._waiting = self._waiting, []
                    for each in lines:
                        self._console.print(Text(each), soft_wrap=True)
                finally:
                    self._printing = False


def write_run_report(options: TrainerOptions) -> str:
    """Writes the report of a finished run and returns a notice of success or failure. Never raises: a failing report must
    not hide the error that ended the run."""
    from etude.viewer.page import write_report

    try:
        page = write_report(
            options.default_local_dir, rollouts=options.rollout_data_dir, validation=options.validation_data_dir
        )
    except (EtudeError, OSError) as error:
        return f"no report: {one_line(error)}"
    except Exception as error:
        return f"no report: {describe_error(error)}"
    look = f"; its conversations: `etude view {quote(options.default_local_dir)}`" if options.rollout_data_dir else ""
    return f"report: {page}{look}"


class RolloutBar:
    """Event sink that shows an evaluation's progress on stderr: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, console: RunConsole | None = None) -> None:
        self._console = console or RunConsole(stderr=True)
        self._title, self._enabled = "", False
        self._lines = RolloutLines()
        self._live: Progress | None = None

    def __call__(self, event: Event) -> None:
        """Displays an event; ignores a closed output."""
        with suppress(OSError):
            match event:
                case RunStarted():
                    self._open(event)
                case RolloutProgress() if self._live is not None:
                    self._live.update(self._task, description=self._title, completed=event.done, total=event.total)
                case Notice(text) if self._live is not None:
                    self._live.update(self._task, description=escape(text))
                case Notice(text) if self._enabled:
                    self._console.print(text, soft_wrap=True, highlight=False, markup=False)
                case RolloutProgress() if self._enabled and (line := self._lines.line(event)):
                    self._console.print(f"{self._title}: {line}", soft_wrap=True, highlight=False)
                case RunEnded() if self._live is not None:
                    self._live.stop()

    def _open(self, run: RunStarted) -> None:
        self._title, self._enabled = run.title, "console" in run.options.logger
        self._lines = RolloutLines()
        if self._enabled and self._console.is_terminal:
            columns = (*Progress.get_default_columns(), MofNCompleteColumn())
            self._live = Progress(*columns, console=self._console, transient=True)
            self._task = self._live.add_task(self._title, total=None)
            self._live.start()
