"""Renders the live panel of a run with Rich, and its one-line form.

Invariant: pure functions of a `RunState`. Every metric is optional: its row is left out if absent. Any finite value can be
drawn; no curve is wider than requested. `display` decides when to draw.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from etude.checks.step_warnings import Problem, count_tool_calls, find_problems
from etude.run_folder import role_rewards
from etude.viewer.curves import AFTER_STEP, REWARD_KEYS, is_validation, validation_label
from etude.viewer.rows import numbers_of

_CURVE_ROWS = 5
_TALL = 32  # lines of a terminal, from which on there is room for curves beside problems and log
_RECENT = 50  # steps averaged for the ETA; more than lie between two `target_success` evaluations of an SFT run
_MAX_PROBLEMS = 4
_GROWN = 4.0  # times
_PRINTED_FOR = 10  # steps, after which a problem that is still there is printed again
_MAX_LINE = 160  # characters of a step's line
_LEFT_OUT = ("entropy", "gradient norm")  # of a line that would be longer
_TIME_COLOURS = ("cyan", "blue", "magenta", "yellow", "green", "bright_black")
_BARS = "▁▂▃▄▅▆▇█"
_BRAILLE_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # per column, bottom dot first


@dataclass(frozen=True)
class MetricRow:
    """One table row: the first of `keys` that a step logged, formatted by `form`."""

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


ROWS = (
    MetricRow("reward", "reward", REWARD_KEYS, _number),
    MetricRow("success", "success", ("reward/success/mean",), _percent),
    MetricRow("tool use", "tools", ("rollout/tool_use_rate",), _percent),
    MetricRow("response length", "length", ("response_length/mean",), _whole),
    MetricRow("KL", "KL", ("actor/ppo_kl",), _small),
    MetricRow("KL to the reference", "KL to ref", ("actor/kl_loss", "actor/reward_kl_penalty"), _small),
    MetricRow("entropy", "entropy", ("actor/entropy",), _number),
    MetricRow("loss", "loss", ("sft/loss", "dpo/loss"), _number),
    MetricRow("gradient norm", "grad", ("actor/grad_norm", "sft/grad_norm"), _number),
    MetricRow("dropped", "dropped", ("rollout/dropped",), _whole),
)


def format_duration(seconds: float) -> str:
    """Formats a duration as `4.2 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass
class RunState:
    """Everything the panel shows; `history` maps a row's label to its finite values, oldest first."""

    title: str
    total_steps: int
    step: int = 0  # last finished one
    resumed: bool = False
    started: float = field(default_factory=time.monotonic)
    rollouts: tuple[int, int] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    evidence: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)
    notice: str = ""
    printed: dict[str, tuple[int, float]] = field(default_factory=dict)  # kind of problem → (step, size) when printed
    validated: str = "greedy"  # how validations decode; training always samples

    def add(
        self,
        step: int,
        metrics: Mapping[str, float],
        seconds: float,
        evidence: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """Records a finished step that took `seconds` of wall time."""
        self.evidence = evidence or {}
        finite = numbers_of(metrics)
        self.step, self.metrics = step, finite
        if step > 0:  # not a validation before training
            self.seconds.append(seconds)
        for row in ROWS:
            if (value := first_value(finite, row.keys)) is not None:
                self.history.setdefault(row.label, []).append(value)
        means = {name: value for name, value in finite.items() if is_validation(name)}
        self.validation = means or self.validation

    def eta(self) -> float | None:
        """Estimated seconds left, from the mean of the last 50 steps; None before the first step ends."""
        recent = self.seconds[-_RECENT:]
        return sum(recent) / len(recent) * max(self.total_steps - self.step, 0) if recent else None


def first_value(metrics: Mapping[str, float], keys: Sequence[str]) -> float | None:
    """Returns the value of the first of `keys` present, else None."""
    return next((metrics[key] for key in keys if key in metrics), None)


def split_time(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns (activity, share of the step's time), largest first; time not covered by an activity is `other`."""
    parts = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    known = {name: value for name, value in parts.items() if name != "step" and value > 0}
    after = sum(metrics.get(name, 0.0) for name in AFTER_STEP)
    total = max(parts.get("step", 0.0) + after, sum(known.values()))
    if total <= 0:
        return []
    shares = sorted(((name, value / total) for name, value in known.items()), key=lambda item: -item[1])
    rest = 1.0 - sum(share for _, share in shares)
    return [*shares, ("other", rest)] if rest > 0.005 else shares


def format_lines(state: RunState) -> list[str]:
    """Formats the latest step as a line of text that fits a terminal, and one of its validations where they do not fit in
    it; then its problems, each with what to do: a validation's always, a step's without those printed in the last ten steps
    that have not grown much."""
    validations = [(name, value) for name, value in state.metrics.items() if is_validation(name)]
    told = [f"{name} {_number(value)} ({state.validated}{_lost(state, name)})" for name, value in validations]
    times = [format_duration(state.seconds[-1])] if state.seconds else []
    if (eta := state.eta()) is not None and state.step < state.total_steps:
        times.append(f"{format_duration(eta)} left")
    lines = [" · ".join([*_values(state, ROWS), *told, *times])]
    if len(lines[0]) > _MAX_LINE:
        first = _values(state, [row for row in ROWS if row.label not in _LEFT_OUT])
        lines = [" · ".join([*first, *told, *times])]
        if len(lines[0]) > _MAX_LINE and told:
            lines = [" · ".join([*first, *times]), f"  {' · '.join(told)}"]
    for kind, problem in find_problems(state.metrics, state.evidence).items():
        (last, before), size = state.printed.get(kind, (-_PRINTED_FOR, 0.0)), _size(problem)
        if kind.startswith("val/") or state.step - last >= _PRINTED_FOR or size >= _GROWN * before > 0:
            state.printed[kind] = state.step, size
            lines += [f"  ! {problem.what}", f"    → {problem.fix}"]
    return lines


def _lost(state: RunState, validation: str) -> str:
    """How many answers a validation's mean is without, if any: mostly those that called what failed."""
    lost = state.metrics.get(f"{validation.rpartition('/')[0]}/missing")
    return f", {_whole(lost)} dropped" if lost else ""


def _size(problem: Problem) -> float:
    """How many answers, calls or percent a problem is of: the number that it begins with, or 0."""
    begins = re.match(r"[\d,]+", problem.what)
    return float(begins[0].replace(",", "")) if begins else 0.0


def _values(state: RunState, rows: Sequence[MetricRow]) -> list[str]:
    parts = [f"step {state.step}/{state.total_steps}"]
    for row in rows:
        if (value := first_value(state.metrics, row.keys)) is not None and (row.label != "dropped" or value > 0):
            parts.append(f"{row.short} {row.form(value)}")
            if row.label == "success" and not value and (first_value(state.metrics, REWARD_KEYS) or 0) > 0:
                parts[-1] += " (none has acc or a reward of 1)"
            if row.label == "reward" and (roles := role_rewards(state.metrics)):
                parts[-1] += f" ({', '.join(f'{name} {row.form(each)}' for name, each in roles.items())})"
    return parts


def render_panel(state: RunState, width: int, height: int = 100) -> RenderableType:
    """Renders the whole panel for a terminal of `width` columns; without curves if it has few lines."""
    inner = max(min(width, 110) - 6, 30)
    blocks: list[RenderableType] = [_progress(state, inner)]
    if height >= _TALL and (curves := _curves(state, inner)):
        blocks += [Text(), curves]
    if state.history:
        blocks += [Text(), _table(state, inner)]
    if split := split_time(state.metrics):
        blocks += [Text(), _time_bar(split, inner)]
    if tools := count_tool_calls(state.metrics):
        blocks.append(_tools_line(tools, state.metrics))
    if state.validation:
        blocks.append(_validation_line(state.validation, state.validated))
    blocks += [_problem_line(each) for each in [*find_problems(state.metrics, state.evidence).values()][:_MAX_PROBLEMS]]
    if state.notice:
        blocks.append(Text(f"› {state.notice}", style="dim", no_wrap=True, overflow="ellipsis"))
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


def _problem_line(problem: Problem) -> RenderableType:
    """The problem whole, on as many lines as it takes, and under it what to do."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text("!", "yellow"), Text(problem.what, "yellow"))
    grid.add_row(Text("→", "dim"), Text(problem.fix, "dim"))
    return grid


def _progress(state: RunState, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=8)
    grid.add_column(width=max(width - 48, 10))
    grid.add_column(no_wrap=True)
    elapsed = format_duration(time.monotonic() - state.started)
    eta = state.eta()
    left = "" if eta is None or state.step >= state.total_steps else f" · {format_duration(eta)} left"
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
    for header in ("", "now", "at resume" if state.resumed else "first"):
        table.add_column(header, justify="left" if not header else "right", no_wrap=True)
    table.add_column("trend", no_wrap=True)
    for row in ROWS:
        values = state.history.get(row.label, [])
        if values and (row.label != "dropped" or any(values)):
            now, first = row.form(values[-1]), row.form(values[0])
            trend = Text(sparkline(values, max(width - 42, 8)), style="blue")
            table.add_row(row.label, Text(now, style="bold"), Text(first, style="dim"), trend)
    return table


def _time_bar(split: Sequence[tuple[str, float]], width: int) -> Text:
    """A stacked bar of a step's time by activity, and its legend."""
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
        text.append(f"{validation_label(name)} ", style="default").append(_number(value), style="bold").append("   ")
    return text


def resample(values: Sequence[float], count: int) -> list[float]:
    """Downsamples `values` to at most `count` means over equal windows."""
    if len(values) <= count:
        return list(values)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws `values` as one row of at most `width` bars, scaled between their minimum and maximum; flat for a constant."""
    shown = resample(values, width)
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    return "".join(_BARS[round(_share(value, low, high) * 7) if high > low else 3] for value in shown)


def braille_curve(values: Sequence[float], width: int, rows: int, low: float, high: float) -> list[str]:
    """Draws `values` between `low` and `high` as `rows` lines of `width` Braille cells, each 2 x 4 dots."""
    dots_high, dots_wide = rows * 4, width * 2
    cells = [[0] * width for _ in range(rows)]
    previous: int | None = None
    for x, value in enumerate(_interpolate(resample(values, dots_wide), dots_wide)):
        y = round(_share(value, low, high) * (dots_high - 1)) if high > low else round(0.5 * (dots_high - 1))
        start = y if previous is None else previous + (y > previous) - (y < previous)
        for dot in range(min(start, y), max(start, y) + 1):  # fills the gap of a steep segment
            cells[rows - 1 - dot // 4][x // 2] |= _BRAILLE_DOTS[x % 2][dot % 4]
        previous = y
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _share(value: float, low: float, high: float) -> float:
    """Position of `value` between `low` and `high`, clamped to 0–1, so that float overflow cannot break the view."""
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _interpolate(values: Sequence[float], count: int) -> Iterator[float]:
    """Interpolates `values` linearly to `count` points; yields nothing if there are none."""
    for i in range(count if values else 0):
        position = i * (len(values) - 1) / max(count - 1, 1)
        left = int(position)
        right = min(left + 1, len(values) - 1)
        yield values[left] + (position - left) * (values[right] - values[left])
