"""Renders results as Markdown tables and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from svg import save_svg

from side_by_side.results import Measured

_NAMES = {
    "rollout_cpu": "rollout, CPU s",
    "update_cpu": "update, CPU s",
    "step_cpu": "step, CPU s",
    "rollout_wall": "rollout, wall s",
    "update_wall": "update, wall s",
    "step_wall": "step, wall s",
    "memory": "peak memory, MiB",
    "sampled_tokens": "sampled tokens",
    "tool_calls": "tool calls",
    "over_bound": "wall over its bound",
    "cpu_a_call": "CPU ms a call of the model",
    "cpu_a_token": "CPU µs a sampled token",
    "wall": "wall s",
    "ideal_wall": "longest trajectory's waits, s",
    "log_probs_cpu": "log-probs, CPU s",
    "log_probs_wall": "log-probs, wall s",
    "process_cpu": "CPU s",
    "process_wall": "wall s",
}
_SCALE = {"cpu_a_call": 1e3, "cpu_a_token": 1e6}


def tables(rows: Sequence[Measured]) -> str:
    """Renders a table per row: a line per figure, with medians (and quartiles), and Étude's ratio to each peer."""
    return "\n\n".join(_table(row) for row in rows) + "\n"


def _table(row: Measured) -> str:
    ours, *peers = row.contenders
    ratios = [f"{ours} / {peer}" for peer in peers]
    targets = ["target"] if row.targets else []
    head = ["", *row.contenders, *ratios, *targets]
    lines = [f"**{row.title}** ({_circumstances(row)})", "", _line(head), _line(["---"] * len(head))]
    for figure in row.figures:
        if row.median(ours, figure) is None:
            continue
        cells = [_NAMES.get(figure, figure.removesuffix("_cpu").replace("_", " "))]
        cells += [_cell(row, contender, figure) for contender in row.contenders]
        cells += [_ratio(row.ratio(peer, figure)) for peer in peers]
        if row.targets:
            cells.append(f"≤ {row.targets[figure]:.2f}" if figure in row.targets else "")
        lines.append(_line(cells))
    return "\n".join(lines)


def _circumstances(row: Measured) -> str:
    """Formats the repetitions, the date, and the load average at the start."""
    count, known = len(row.readings[row.contenders[0]]), row.conditions
    parts = [f"{count} repetition" if count == 1 else f"{count} repetitions"]
    if "date" in known:
        parts.append(known["date"])
    if "load" in known:
        parts.append(f"load {known['load']:.1f}")
    return ", ".join(parts)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(row: Measured, contender: str, figure: str) -> str:
    middle, scale = row.median(contender, figure), _SCALE.get(figure, 1.0)
    if middle is None:
        return "–"
    quartiles = row.quartiles(contender, figure)
    spread = f" ({_number(scale * quartiles[0])}–{_number(scale * quartiles[1])})" if quartiles else ""
    return _number(scale * middle) + spread


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


_PLOTTED = (
    "rollout_cpu",
    "update_cpu",
    "step_cpu",
    "rollout_wall",
    "cpu_a_call",
    "process_cpu",
    "pickle_round_trip_cpu",
)


def plot(rows: Sequence[Measured], path: Path) -> None:
    """Plots Étude's ratio to each peer, a bar per figure, on a logarithmic axis; the line spans all repetitions."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    bars = [bar for row in rows if row.kind != "scaling" for bar in _bars(row)]
    figure, axes = plt.subplots(figsize=(9, 0.30 * len(bars) + 1.2))
    for place, (_, _, ratios) in enumerate(bars):
        middle = ratios[len(ratios) // 2]
        axes.barh(place, 1 - middle, left=middle, color="#4878a8" if middle <= 1 else "#b85450", height=0.7)
        axes.plot([ratios[0], ratios[-1]], [place, place], color="black", linewidth=1)
        axes.annotate(f" {_ratio(middle)}", (min(middle, 1.0), place), va="center", ha="right", fontsize=8)
    axes.set_yticks(range(len(bars)), [f"{title}: {name}" for title, name, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("Étude's figure over the peer's (1 = equal, left = less); the line spans all repetitions")
    axes.set_xlim(min([0.02, *(ratios[0] / 2 for _, _, ratios in bars)]), 2.5)
    save_svg(figure, path)


def _bars(row: Measured) -> list[tuple[str, str, list[float]]]:
    ours, *peers = row.contenders
    found = []
    for peer in peers:
        for figure in row.figures:
            pairs = zip(row.values(ours, figure), row.values(peer, figure))
            ratios = sorted(a / b for a, b in pairs if b)
            if figure in _PLOTTED and ratios:
                name = _NAMES.get(figure, figure.removesuffix("_cpu").replace("_", " "))
                found.append((f"{row.name.replace('_', ' ')} vs {peer}", name, ratios))
    return found
