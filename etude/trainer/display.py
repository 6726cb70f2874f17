"""`Display`: the live view of a run.

Invariant: showing a run never changes it: no method raises for anything that is shown, and after a fault the view goes
quiet with one log line. On a terminal it is a live panel with log records scrolling above; elsewhere it is one plain
line a step.

Which numbers exist is `metrics`' part: every figure here is optional and left out where its metric is absent.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Concatenate, ParamSpec

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from etude.trainer.curves import braille_curve, sparkline
from etude.trainer.problems import problems, tools_called

P = ParamSpec("P")
logger = logging.getLogger(__name__)

_CURVE_ROWS = 5
_LINE_SECONDS = 5.0  # between two plain lines of steps that have little to tell, such as those of a warm-up
_REFRESHES_A_SECOND = 2  # each costs a few milliseconds of one core that the training wants
_RECENT = 50  # steps that the time left is estimated from: more than lie between two trials of a supervised run
_PROBLEMS_SHOWN = 4
_REWARD_KEYS = ("reward/total/mean", "critic/score/mean")
_SUCCESS_KEYS = ("reward/success/mean",)
_TIME_COLOURS = ("cyan", "blue", "magenta", "yellow", "green", "bright_black")


@dataclass(frozen=True)
class Figure:
    """One row of the table: the first of `keys` that a step has, shown with `form`."""

    label: str
    short: str
    keys: tuple[str, ...]
    form: Callable[[float], str]


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _small(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


FIGURES = (
    Figure("reward", "reward", _REWARD_KEYS, _number),
    Figure("success", "success", _SUCCESS_KEYS, _percent),
    Figure("tool use", "tools", ("rollout/tool_use_rate",), _percent),
    Figure("response length", "length", ("response_length/mean",), _whole),
    Figure("KL", "KL", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), _small),
    Figure("entropy", "entropy", ("actor/entropy",), _number),
    Figure("loss", "loss", ("sft/loss",), _number),
    Figure("gradient norm", "grad", ("actor/grad_norm", "sft/grad_norm"), _number),
    Figure("dropped", "dropped", ("rollout/dropped",), _whole),
)


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass
class RunState:
    """What the view knows of the run; `history` maps a figure's label to its finite values, oldest first."""

    title: str
    total_steps: int
    step: int = 0
    started: float = field(default_factory=time.monotonic)
    rollouts: tuple[int, int] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)
    event: str = ""
    validated: str = "greedy"  # how validations sample; training always draws

    def add(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Takes in one finished step that took `seconds` of wall time."""
        finite = {name: float(value) for name, value in metrics.items() if _is_finite(value)}
        self.step, self.metrics = step, finite
        if step > 0:  # not a validation before training
            self.seconds.append(seconds)
        for figure in FIGURES:
            if (value := first_of(finite, figure.keys)) is not None:
                self.history.setdefault(figure.label, []).append(value)
        found = {name: value for name, value in finite.items() if _is_validation(name)}
        self.validation = found or self.validation

    def eta(self) -> float | None:
        """Seconds until the last step, from the mean of the last 50; None before the first."""
        recent = self.seconds[-_RECENT:]
        return sum(recent) / len(recent) * max(self.total_steps - self.step, 0) if recent else None


def _is_finite(value: object) -> bool:
    try:
        return math.isfinite(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def _is_validation(name: str) -> bool:
    return name.startswith("val-core/") and name.rpartition("/")[2].startswith("mean@")


def first_of(metrics: Mapping[str, float], keys: Sequence[str]) -> float | None:
    """The value of the first key that is there."""
    return next((metrics[key] for key in keys if key in metrics), None)


def time_split(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(activity, share of the step's time), largest first; what `timing_s/step` has beyond its parts is `other`."""
    parts = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    known = {name: value for name, value in parts.items() if name != "step" and value > 0}
    total = max(parts.get("step", 0.0), sum(known.values()))
    if total <= 0:
        return []
    shares = sorted(((name, value / total) for name, value in known.items()), key=lambda item: -item[1])
    rest = 1.0 - sum(share for _, share in shares)
    return [*shares, ("other", rest)] if rest > 0.005 else shares


def plain_line(state: RunState) -> str:
    """The newest step as one line of text."""
    parts = [f"step {state.step}/{state.total_steps}"]
    for figure in FIGURES:
        if (value := first_of(state.metrics, figure.keys)) is not None and (figure.label != "dropped" or value > 0):
            parts.append(f"{figure.short} {figure.form(value)}")
    validations = [(name, value) for name, value in state.metrics.items() if _is_validation(name)]
    parts += [f"{name} {_number(value)} ({state.validated})" for name, value in validations]
    if state.seconds:
        parts.append(duration(state.seconds[-1]))
    if (eta := state.eta()) is not None and state.step < state.total_steps:
        parts.append(f"{duration(eta)} left")
    parts += [f"! {sentence}" for sentence in problems(state.metrics).values()]
    return " · ".join(parts)


def render(state: RunState, width: int) -> RenderableType:
    """The whole panel for a terminal of `width` columns."""
    inner = max(min(width, 110) - 6, 30)
    blocks: list[RenderableType] = [_progress(state, inner)]
    if curves := _curves(state, inner):
        blocks += [Text(), curves]
    if state.history:
        blocks += [Text(), _table(state, inner)]
    if split := time_split(state.metrics):
        blocks += [Text(), _time_bar(split, inner)]
    if tools := tools_called(state.metrics):
        blocks.append(_tools_line(tools, state.metrics))
    if state.validation:
        blocks.append(_validation_line(state.validation, state.validated))
    found = list(problems(state.metrics).values())
    blocks += [Text(f"! {each}", "yellow", no_wrap=True, overflow="ellipsis") for each in found[:_PROBLEMS_SHOWN]]
    if state.event:
        blocks.append(Text(f"› {state.event}", style="dim", no_wrap=True, overflow="ellipsis"))
    title = Text.assemble((" Étude", "bold"), (f" · {state.title} ", "default"))
    return Panel(
        Group(*blocks),
        title=title,
        title_align="left",
        box=box.ROUNDED,
        border_style="dim",
        padding=(0, 2),
        width=inner + 6,
    )


def _progress(state: RunState, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=8)
    grid.add_column(width=max(width - 48, 10))
    grid.add_column(no_wrap=True)
    elapsed = duration(time.monotonic() - state.started)
    eta = state.eta()
    left = "" if eta is None or state.step >= state.total_steps else f" · {duration(eta)} left"
    bar = _bar(state.step, state.total_steps)
    grid.add_row(
        "step", bar, Text.assemble((f"{state.step}/{state.total_steps}", "bold"), (f" · {elapsed}{left}", "dim"))
    )
    if state.rollouts is not None:
        done, total = state.rollouts
        grid.add_row("rollouts", _bar(done, total), Text(f"{done}/{total}", style="bold"))
    return grid


def _bar(done: int, total: int) -> ProgressBar:
    length = max(total, 1)
    return ProgressBar(length, min(done, length), complete_style="cyan", finished_style="green", style="grey23")


def _curves(state: RunState, width: int) -> RenderableType | None:
    labels = [label for label in ("reward", "success") if len(state.history.get(label, [])) > 1]
    if not labels:
        return None
    each = (width - 4 * (len(labels) - 1)) // len(labels)
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(*(_curve(label, state.history[label], each) for label in labels))
    return grid


def _curve(label: str, values: Sequence[float], width: int) -> Text:
    percent = label == "success"
    low, high = (0.0, 1.0) if percent else (min(values), max(values))
    form = _percent if percent else (lambda value: f"{value:.2f}")
    tick = max(len(form(low)), len(form(high)))
    rows = braille_curve(values, max(width - tick - 3, 8), _CURVE_ROWS, low, high)
    text = Text(no_wrap=True)
    text.append(f"{'':>{tick}}  {label} ", style="bold").append(form(values[-1]), style="bold cyan")
    for number, row in enumerate(rows):
        mark = form(high) if number == 0 else form(low) if number == len(rows) - 1 else ""
        text.append(f"\n{mark:>{tick}} ", style="dim").append("┤" if mark else "│", style="dim")
        text.append(f"{row}", style="green" if percent else "cyan")
    return text


def _table(state: RunState, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for header in ("", "now", "first"):
        table.add_column(header, justify="left" if not header else "right", no_wrap=True)
    table.add_column("trend", no_wrap=True)
    for figure in FIGURES:
        values = state.history.get(figure.label, [])
        if values and (figure.label != "dropped" or any(values)):
            now, first = figure.form(values[-1]), figure.form(values[0])
            trend = Text(sparkline(values, max(width - 42, 8)), style="blue")
            table.add_row(figure.label, Text(now, style="bold"), Text(first, style="dim"), trend)
    return table


def _time_bar(split: Sequence[tuple[str, float]], width: int) -> Text:
    """One bar a step's time wide, and its legend."""
    shown = list(split[: len(_TIME_COLOURS) - 1])
    if rest := sum(share for _, share in split[len(shown) :]):
        shown.append(("other", rest))
    bar, legend = Text("time  ", style="dim"), Text("      ")
    for (name, share), colour in zip(shown, _TIME_COLOURS):
        bar.append("━" * max(round(share * (width - 6)), 1), style=colour)
        legend.append("■ ", style=colour).append(f"{name} {_percent(share)}  ", style="dim")
    bar.truncate(width)
    return bar.append("\n").append_text(legend)


def _tools_line(tools: Mapping[str, float], metrics: Mapping[str, float]) -> Text:
    text = Text("tools  ", style="dim", no_wrap=True, overflow="ellipsis")
    for tool, calls in tools.items():
        text.append(f"{tool} ", style="default").append(_whole(calls), style="bold").append(" calls")
        text.append(f", {_whole(metrics.get(f'tool/{tool}/errors', 0.0))} failed")
        if (latency := metrics.get(f"tool/{tool}/latency_p95")) is not None:
            text.append(f", 95 % within {_number(latency)} s")
        text.append("   ")
    return text


def _validation_line(validation: Mapping[str, float], how: str) -> Text:
    text = Text(f"validation, {how}  ", style="dim", no_wrap=True, overflow="ellipsis")
    for name, value in validation.items():
        source = name.removeprefix("val-core/").partition("/reward/")[0]
        text.append(f"{source} ", style="default").append(_number(value), style="bold").append("   ")
    return text


def _harmless(method: Callable[Concatenate[Display, P], None]) -> Callable[Concatenate[Display, P], None]:
    """Makes a fault of the view silence the view instead of ending the training."""

    @functools.wraps(method)
    def guarded(self: Display, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._broken:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._give_up(error)

    return guarded


class RunConsole(Console):
    """A console whose reader may go away (`etude train | head`): it falls silent, where Rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Goes quiet, with one log line."""
        if not self.quiet:
            self.quiet = True
            logger.warning("nobody reads the output any more; training goes on")


class Display:
    """Shows a run while it happens; use as a context manager.

    Args:
        total_steps: the number of the last step.
        title: the run's name.
        enabled: False shows nothing at all (`console` is not among `trainer.logger`).
        console: where to; default standard output.
        validated: how validations sample, "greedy" or "sampled".
        rollouts: tells, at any time, how many trajectories of the step under way have ended, and how many there are.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        enabled: bool = True,
        console: RunConsole | None = None,
        validated: str = "greedy",
        rollouts: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._rollouts = rollouts
        self._state = RunState(title, total_steps, validated=validated)
        self._console = console or RunConsole()
        self._enabled = enabled
        self._live: Live | None = None
        self._replaced: list[tuple[logging.Handler, logging.Handler]] = []
        self._broken = False
        self._lock = threading.RLock()
        self._line_printed = 0.0
        self._step_began = time.monotonic()

    def __enter__(self) -> Display:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._close()

    @_harmless
    def rollout_progress(self, done: int, total: int) -> None:
        """Shows how many trajectories of the step under way have ended."""
        with self._lock:
            self._state.rollouts = (done, total)

    @_harmless
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step; metrics that are not finite numbers are left out."""
        now = time.monotonic()
        with self._lock:
            self._state.add(step, metrics, now - self._step_began)
        self._step_began = now
        if self._live is not None:
            self._live.refresh()
        elif self._enabled and (self._is_telling(metrics) or now - self._line_printed >= _LINE_SECONDS):
            self._line_printed = now
            self._print(plain_line(self._state))

    def _is_telling(self, metrics: Mapping[str, float]) -> bool:
        """Whether a step deserves a plain line whenever it comes: rewards, a validation, or the end of the run."""
        last = self._state.step >= self._state.total_steps
        return last or any(key in metrics for key in _REWARD_KEYS) or any(map(_is_validation, metrics))

    @_harmless
    def note(self, text: str) -> None:
        """Shows what has just happened (a checkpoint, a validation) as the last event."""
        line = " ".join(text.split())[:300]
        with self._lock:
            self._state.event = line
        if self._live is None and self._enabled:
            self._print(line)

    def __rich__(self) -> RenderableType:
        try:
            if self._rollouts is not None:
                self.rollout_progress(*self._rollouts())
            with self._lock:
                return render(self._state, self._console.width)
        except Exception as error:  # in the refresh thread nobody else would catch it
            return Text(f"(the view failed: {type(error).__name__})", style="dim")

    @_harmless
    def _open(self) -> None:
        options = self._console.options
        if not self._enabled or not self._console.is_terminal or options.ascii_only or self._console.is_dumb_terminal:
            return
        self._redirect_logging()  # before the view takes the place of standard output and error
        self._live = Live(self, console=self._console, refresh_per_second=_REFRESHES_A_SECOND)
        self._live.start(refresh=True)

    def _redirect_logging(self) -> None:
        """Sends what the root logger prints on the terminal through the live view, which keeps the panel whole."""
        root = logging.getLogger()
        for handler in list(root.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in _terminal_streams():
                shown = RichHandler(console=self._console, show_path=False, markup=False, level=handler.level)
                shown.filters = list(handler.filters)
                root.removeHandler(handler)
                root.addHandler(shown)
                self._replaced.append((handler, shown))

    def _restore_logging(self) -> None:
        root = logging.getLogger()
        for handler, shown in self._replaced:
            root.removeHandler(shown)
            root.addHandler(handler)
        self._replaced.clear()

    @_harmless
    def _close(self) -> None:
        live, self._live = self._live, None
        self._restore_logging()
        if live is not None:
            live.stop()

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        live, self._live = self._live, None
        self._restore_logging()
        try:
            if live is not None:
                live.stop()
        except Exception:
            logger.debug("the live view could not be stopped", exc_info=True)
        logger.warning("the display stopped (%s: %s); training goes on", type(error).__name__, error)

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def _terminal_streams() -> tuple[object, ...]:
    return (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
