"""Charts of the run report: takes records of `metrics.jsonl`, returns inline SVG.

Invariant: the SVG contains no link, script, font or fixed colour. Colours are CSS variables of the page, so that it is
readable in light and dark mode and in print; ids are unique within the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from etude.viewer.panel import is_number, validation_label
from etude.viewer.subjects import SUBJECTS, Records, Subject, find_lines, series, time_parts, validation_keys

MAX_POINTS = 600  # about the width of a chart in pixels
# Placeholder colours that matplotlib accepts; `_inline` replaces them with the page's CSS variables.
_INK, _GRID = "#010101", "#020202"
_SERIES = tuple(f"#0300{number:02x}" for number in range(8))
_VARIABLES = {_INK: "var(--muted)", _GRID: "var(--line)"} | {
    colour: f"var(--c{number})" for number, colour in enumerate(_SERIES)
}
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.0,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


@dataclass(frozen=True)
class Chart:
    """A rendered chart; `legend` pairs labels with colour numbers."""

    title: str
    caption: str
    svg: Markup
    legend: tuple[tuple[str, int], ...] = ()


def draw_charts(records: Records) -> list[Chart]:
    """Draws the charts that the records have data for, in page order."""
    drawn = [_subject_chart(number, subject, records) for number, subject in enumerate(SUBJECTS)]
    return [chart for chart in [*drawn, _time_chart(records)] if chart is not None]


def _subject_chart(number: int, subject: Subject, records: Records) -> Chart | None:
    lines = find_lines(subject, records)[: len(_SERIES)]
    checks = validation_keys(records) if subject.title == "Success" else []
    checks = checks[: len(_SERIES) - len(lines)]
    if not lines and not checks:
        return None

    def draw(axes: Axes) -> None:
        for colour, (_, steps, values) in zip(_SERIES, lines):
            _draw_line(axes, steps, values, colour)
        for colour, key in zip(_SERIES[len(lines) :], checks):
            _draw_validation(axes, records, key, colour)
        if subject.band is not None:
            _draw_band(axes, records, subject.band)
        if subject.percent:
            axes.set_ylim(-0.02, 1.02)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    labels = [label for label, _, _ in lines] + [f"validation: {validation_label(key)}" for key in checks]
    legend = tuple((label, colour) for colour, label in enumerate(labels)) if len(labels) > 1 else ()
    summary = _summary(lines[0][2], subject.percent) if lines else ""
    return Chart(
        subject.title, f"{subject.note} {summary}".strip(), _svg(f"chart{number}", subject.title, draw), legend
    )


def _summary(values: Sequence[float], percent: bool) -> str:
    window = min(5, len(values))
    first, last = float(np.mean(values[:window])), float(np.mean(values[-window:]))
    form = (lambda value: f"{100 * value:.0f} %") if percent else (lambda value: f"{value:.3g}")
    return f"First {window} steps: {form(first)}; last {window}: {form(last)}."


def _thin(steps: Sequence[int], *columns: Sequence[float]) -> tuple[np.ndarray, ...]:
    """Downsamples each column to at most `MAX_POINTS` means over equal windows, so that long runs give small files."""
    runs = np.array_split(np.arange(len(steps)), min(len(steps), MAX_POINTS))
    return tuple(np.array([np.mean(np.asarray(c, dtype=float)[run]) for run in runs]) for c in (steps, *columns))


def _draw_line(axes: Axes, steps: Sequence[int], values: Sequence[float], colour: str) -> None:
    """Plots the values; in a long run faintly, with a moving average (half-width: a twentieth of the run) on top."""
    x, y = _thin(steps, values)
    window = len(y) // 20
    if window < 2:
        axes.plot(x, y, color=colour, linewidth=1.8, marker="o" if len(y) < 3 else None, markersize=4)
        return
    axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.3)
    kernel = np.ones(2 * window + 1)
    smooth = np.convolve(y, kernel, mode="same") / np.convolve(np.ones_like(y), kernel, mode="same")
    axes.plot(x, smooth, color=colour, linewidth=1.8)


def _draw_validation(axes: Axes, records: Records, key: str, colour: str) -> None:
    steps, values = series(records, key)
    axes.plot(steps, values, color=colour, linewidth=1.2, linestyle=(0, (4, 2)), marker="o", markersize=4)
    for record in records:
        low, high = record.get(f"{key}/ci95_low"), record.get(f"{key}/ci95_high")
        if is_number(low) and is_number(high):
            axes.plot([record["step"]] * 2, [low, high], color=colour, linewidth=1.2, alpha=0.6)


def _draw_band(axes: Axes, records: Records, keys: tuple[str, str]) -> None:
    both = [record for record in records if all(is_number(record.get(key)) for key in keys)]
    if both:
        x, low, high = _thin([r["step"] for r in both], *([r[key] for r in both] for key in keys))
        axes.fill_between(x, low, high, color=_SERIES[0], alpha=0.12, linewidth=0)


def _time_chart(records: Records) -> Chart | None:
    steps, shown = time_parts(records)
    if not shown:
        return None
    total = sum(map(sum, shown.values()))

    def draw(axes: Axes) -> None:
        x, *stack = _thin(steps, *shown.values())
        axes.stackplot(x, *stack, colors=_SERIES[: len(stack)], alpha=0.85, linewidth=0)
        axes.set_ylim(bottom=0)

    shares = ", ".join(f"{name} {100 * sum(values) / total:.0f} %" for name, values in shown.items()) if total else ""
    legend = tuple((name, colour) for colour, name in enumerate(shown))
    caption = f"Seconds a step. Over the whole run: {shares}."
    return Chart("Where the time went", caption, _svg("chart-time", "Where the time went", draw), legend)


def _svg(name: str, title: str, draw: Callable[[Axes], None]) -> Markup:
    """Draws a chart and returns it as an inline `<svg>`; `name` makes its ids unique."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(5.4, 2.5), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        draw(axes)
        axes.set_xlabel("step")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Markup(_inline(text.getvalue(), name, title))


def _inline(svg: str, name: str, title: str) -> str:
    """Reduces matplotlib's output to a bare `<svg>` without prologue, metadata, fonts or size; substitutes the page's
    colours and makes ids unique."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{title}">', svg, count=1
    )
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match.group()], svg)
