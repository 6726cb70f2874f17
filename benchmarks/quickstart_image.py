"""Draws finished quickstarts for the README: success by step of each seed, and a question before and after.

    python benchmarks/quickstart_image.py --output-dir docs/images runs/seeds/seed-1 runs/seeds/seed-2 runs/seeds/seed-3

Writes `quickstart-light.svg` and `quickstart-dark.svg`. The question is the first one of the last run's greedy evaluation
that was answered wrong before and right after.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svg import save_svg

from etude.dumps import list_dump_steps, read_rollouts
from etude.run_folder import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "model": "#1a7f37", "tool": "#0550ae", "paper": "#ffffff"},
    "dark": {"text": "#e6edf3", "muted": "#9198a1", "model": "#3fb950", "tool": "#58a6ff", "paper": "#0d1117"},
}
_WIDTH = 46  # characters of a line of the conversation


def main() -> None:
    """Parses arguments, reads the runs, writes the images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output-dir", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    curves = {run.name: read_curve(run) for run in arguments.runs}
    pair = read_change(arguments.runs[-1])
    for name, theme in THEMES.items():
        draw(curves, pair, theme, arguments.output_dir / f"quickstart-{name}.svg")


def read_curve(run: Path) -> list[float]:
    """Returns the sampled success of each step's answers."""
    return [record["reward/success/mean"] for record in read_metrics(run / "metrics.jsonl")]


def read_change(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the records of the question, before and after."""
    folder = run / "evaluation" / "greedy"
    first, last = (folder / f"{step}.jsonl" for step in list_dump_steps(folder))
    after = {record["index"]: record for record in read_rollouts(last)}
    for record in sorted(read_rollouts(first), key=lambda record: record["index"]):
        if record["data_source"] == "story" and record["score"] < after[record["index"]]["score"]:
            return record, after[record["index"]]
    raise SystemExit(f"{folder}: no story was answered wrong before and right after")


def lines_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (author, line) of what followed the question, wrapped, without the chat template's tokens."""
    lines = []
    for segment in record["segments"]:
        if segment["provenance"] in ("sampled", "tool"):
            text = re.sub(r"<\|[^|]*\|>", "", segment["text"]).strip()
            author = "model" if segment["provenance"] == "sampled" else "tool"
            lines += [(author, line) for part in text.splitlines() for line in textwrap.wrap(part, _WIDTH)]
    return lines


def draw(
    curves: dict[str, list[float]], pair: tuple[dict[str, Any], dict[str, Any]], theme: dict[str, str], path: Path
) -> None:
    """Draws the curves on the left, the conversation on the right."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    style = {
        "text.color": theme["text"],
        "text.parse_math": False,
        "axes.edgecolor": theme["muted"],
        "axes.labelcolor": theme["text"],
        "xtick.color": theme["muted"],
        "ytick.color": theme["muted"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": theme["paper"],
        "axes.facecolor": theme["paper"],
        "savefig.facecolor": theme["paper"],
    }
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(2, 3))
        for (name, values), alpha in zip(curves.items(), (1.0, 0.7, 0.45, *[0.3] * len(curves))):
            left.plot(range(1, len(values) + 1), values, color=theme["model"], alpha=alpha, marker="o", label=name)
        left.set_ylim(-0.02, 1.02)
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.set_xlabel("step")
        left.set_title("right answers while training", loc="left", fontsize=10)
        left.legend(frameon=False, labelcolor=theme["text"], loc="lower right")
        _write(right, pair, theme)
        save_svg(figure, path)


def _write(axes: Axes, pair: Sequence[dict[str, Any]], theme: dict[str, str]) -> None:
    axes.axis("off")
    question = [message["content"] for message in pair[0]["messages"] if message["role"] == "user"][-1]
    lines = [("muted", "a question that it was not trained on")]
    lines += [("text", part) for part in textwrap.wrap(question, _WIDTH)]
    for title, record in zip(("before", "after"), pair):
        verdict = "right" if record["score"] > 0 else f"wrong: it is {record['gts']}"
        lines += [("muted", ""), ("muted", f"{title} ({verdict})"), *lines_of(record)]
    for number, (kind, text) in enumerate(lines):
        said = f"{'← ' if kind == 'tool' else ''}{text}"
        monospace = "monospace" if kind in ("model", "tool") else "sans-serif"
        place = (0.04, 1.0 - 0.085 * number)
        axes.text(*place, said, color=theme[kind], family=monospace, va="top", fontsize=10, transform=axes.transAxes)


if __name__ == "__main__":
    main()
