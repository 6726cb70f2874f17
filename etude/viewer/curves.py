"""The charts of a run: which metrics each plots, and its lines from the records of `metrics.jsonl`, ready to draw.

Invariant: pure functions of the records; non-finite values are ignored; a line has at most `MAX_POINTS` points, a chart
pattern at most `MAX_LINES` lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from etude.viewer.rows import is_number

Records = Sequence[Mapping[str, Any]]
Drawn = dict[str, Any]

REWARD_KEYS = ("reward/total/mean", "critic/score/mean")
_VALIDATED = "val/reward/success/mean"
MAX_POINTS = 400  # per line; a point is the mean of a window
MAX_TIME_PARTS = 7
AFTER_STEP = ("timing_s/testing", "timing_s/verify")  # what `timing_s/step` does not include
MAX_LINES = 8  # per key pattern


@dataclass(frozen=True)
class Chart:
    """Definition of one chart. `lines`: label → keys, of which the first that the run logged is drawn; a key with `*` gives
    one line per match, with `{}` in the label replaced by the matched part. `band` is a pair of keys drawn as a shaded
    range, `note` the caption. A line whose values all equal `usual` is not drawn."""

    title: str
    lines: Mapping[str, tuple[str, ...]]
    note: str = ""
    percent: bool = False
    band: tuple[str, str] | None = None
    usual: float | None = None


CHARTS = (
    Chart(
        "Reward",
        {
            "total": ("reward/total/mean", "critic/score/mean"),
            "reward function": ("reward/score/mean",),
            "{}": ("reward/score/*/mean",),
            "tools, each step": ("reward/step/mean",),
            "tools, at the end": ("reward/final/mean",),
        },
        "Mean of a step's trajectories, by source.",
    ),
    Chart(
        "Success",
        {"training": ("reward/success/mean",)},
        "Share of trajectories that solved their task.",
        percent=True,
    ),
    Chart(
        "Tool use",
        {"trajectories": ("rollout/tool_use_rate",)},
        "Share of trajectories with at least one successful tool call.",
        percent=True,
    ),
    Chart("Tool calls", {"{}": ("tool/*/calls",)}, "Calls in a step."),
    Chart("Tool errors", {"{}": ("tool/*/errors",)}, "Calls in a step that failed.", usual=0.0),
    Chart("Tool latency", {"{}": ("tool/*/latency_p95",)}, "Seconds that 95 % of calls stay below."),
    Chart(
        "Messages",
        {"mean": ("num_turns/mean",)},
        "The question, the model's turns, and those of tools or a user; the shaded range is fewest to most.",
        band=("num_turns/min", "num_turns/max"),
    ),
    Chart(
        "Response length",
        {"mean": ("response_length/mean",)},
        "Tokens after the prompt, those of tools included; the shaded range is shortest to longest.",
        band=("response_length/min", "response_length/max"),
    ),
    Chart(
        "Nothing to learn from",
        {
            "groups with equal rewards": ("rollout/equal_groups_share",),
            "cut for length": ("rollout/truncated_share",),
            "answer not found": ("rollout/unparsed_share",),
            "infrastructure failed": ("rollout/infrastructure_failure_share",),
        },
        "Shares of groups and of rollouts.",
        percent=True,
        usual=0.0,
    ),
    Chart(
        "KL divergence",
        {
            "to the policy before the update": ("actor/ppo_kl",),
            "to the reference": ("actor/kl_loss", "actor/reward_kl_penalty"),
        },
        "Nats a token.",
    ),
    Chart("Entropy", {"policy": ("actor/entropy",)}, "Nats per token of the policy's distribution."),
    Chart("Gradient norm", {"{}": ("*/grad_norm",)}, "Before clipping."),
    Chart("Weight change", {"{}": ("*/weight_change",)}, "‖Δw‖ / ‖w‖ of an optimizer step."),
    Chart(
        "Clip fraction",
        {"ratio": ("actor/pg_clipfrac",), "lower bound": ("actor/pg_clipfrac_lower",)},
        "Share of tokens whose ratio the loss clipped.",
        usual=0.0,
    ),
    Chart(
        "Sampler–trainer mismatch",
        {"k3 KL": ("rollout_corr/k3_kl",), "p99 of |Δ log p|": ("rollout_corr/log_prob_diff_p99",)},
        "Nats a token between the log-probs of the engine that sampled and of the model that trains.",
    ),
    Chart(
        "Staleness",
        {"mean": ("staleness/mean",), "largest": ("staleness/max",)},
        "Steps between the weights that drew a token and those that learn from it.",
        usual=0.0,
    ),
    Chart(
        "Sequences",
        {"mean": ("rollout/sequences/mean",)},
        "Sequences per rollout: more than one where an agent rewrote its history.",
        usual=1.0,
    ),
)


def draw_charts(records: Records, titles: Sequence[str] = ()) -> list[Drawn]:
    """Returns the charts that the records have data for: `{title, note, summary, percent, lines: [{label, steps, values,
    low?, high?, marks?}]}`; those called `titles`, in their order, or all."""
    charts = {chart.title: chart for chart in CHARTS}
    drawn = (_draw(charts[title], records) for title in titles or charts)
    return [chart for chart in drawn if chart["lines"]]


def _draw(chart: Chart, records: Records) -> Drawn:
    lines: list[Drawn] = []
    found = _find_lines(chart, records)
    for label, steps, values in found:
        at, means = _thin(steps, values)
        lines.append({"label": label, "steps": at, "values": means})
    if lines and chart.band is not None:
        both = [record for record in records if all(is_number(record.get(key)) for key in chart.band)]
        steps = [record["step"] for record in both]
        if steps == found[0][1]:
            _, low, high = _thin(steps, *([float(record[key]) for record in both] for key in chart.band))
            lines[0] |= {"low": low, "high": high}
    if chart.title == "Reward":
        labels = {key: f"validation: {validation_label(key)}" for key in validation_keys(records)}
        lines += [_validation_line(key, label, records) for key, label in labels.items()]
    if chart.title == "Success" and any(is_number(record.get(_VALIDATED)) for record in records):
        lines.append(_validation_line(_VALIDATED, "validation", records))
    summary = _ends(found[0][2], chart.percent) if found else ""
    if found and max(len(chart.lines), len(lines)) > 1:  # a single line has no legend
        summary = f"{found[0][0]}: {summary}"
    bars = " Bars are 95 % intervals." if any("low" in line and "marks" in line for line in lines) else ""
    return {
        "title": chart.title,
        "note": chart.note + bars,
        "summary": summary,
        "percent": chart.percent,
        "lines": lines,
    }


def _ends(values: Sequence[float], percent: bool) -> str:
    """The first steps beside the last ones: at most five of each, and none counted twice."""
    window = max(1, min(5, len(values) // 2))
    form = (lambda value: f"{100 * value:.0f} %") if percent else (lambda value: f"{value:.3g}")
    first, last = form(fmean(values[:window])), form(fmean(values[-window:]))
    if len(values) == 1:
        return f"One step: {first}."
    return (
        f"First {window} steps: {first}; last {window}: {last}."
        if window > 1
        else f"First step: {first}; last: {last}."
    )


def _validation_line(key: str, label: str, records: Records) -> Drawn:
    steps, values = series(records, key)
    # A reward of 0 or 1 from a single source is the success, and its interval that of the success.
    alike = next((each for each in validation_keys(records) if series(records, each) == (steps, values)), key)
    bounds = [series(records, f"{alike}/ci95_{end}") for end in ("low", "high")]
    columns = [values, *(found for at, found in bounds if at == steps)]
    line = dict(zip(("steps", "values", "low", "high"), _thin(steps, *columns if len(columns) == 3 else [values])))
    return {"label": label, "marks": True, **line}


def draw_time(records: Records) -> Drawn | None:
    """Returns the seconds per step, `{title, note, summary, steps, parts: {activity: seconds}}`, largest first, the rest
    as `other`; None if no step was timed."""
    timed = [record for record in records if record["step"] > 0 and is_number(record.get("timing_s/step"))]
    before = [record for record in records if record["step"] == 0]  # the first validation
    names = {name for record in timed for name in record if name.startswith("timing_s/") and name != "timing_s/step"}
    if not names:
        return None
    parts = {name: [_seconds(record, name) for record in timed] for name in names}
    largest = sorted(parts, key=lambda name: (-sum(parts[name]), name))[:MAX_TIME_PARTS]
    shown = {name.removeprefix("timing_s/"): parts[name] for name in largest}
    inside = [name for name in largest if name not in AFTER_STEP]
    rest = [max(_seconds(r, "timing_s/step") - sum(_seconds(r, n) for n in inside), 0.0) for r in timed]
    spent = {name.removeprefix("timing_s/"): sum(_seconds(r, name) for r in [*before, *timed]) for name in largest}
    total = sum(spent.values()) + sum(rest)
    if sum(rest) > 0.005 * total:
        shown["other"], spent["other"] = rest, sum(rest)
    shares = ", ".join(f"{name} {100 * seconds / (total or 1):.0f} %" for name, seconds in spent.items())
    steps, *columns = _thin([record["step"] for record in timed], *shown.values())
    summary = f"Over the whole run: {shares}."
    head = {"title": "Where the time went", "note": "Seconds of a step, by activity.", "summary": summary}
    return head | {"steps": steps, "parts": dict(zip(shown, columns))}


def _seconds(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return max(float(value), 0.0) if is_number(value) else 0.0


def _find_lines(chart: Chart, records: Records) -> list[tuple[str, list[int], list[float]]]:
    """Returns (label, steps, values) for each line of `chart` found in the records. Skips lines that duplicate another,
    that are 0 throughout next to others, or that never leave `usual`."""
    drawn: list[tuple[str, list[int], list[float]]] = []
    for title, patterns in chart.lines.items():
        for label, keys in _expand(title, patterns, records):
            steps, values = next(((s, v) for s, v in (series(records, key) for key in keys) if s), ([], []))
            repeats = any(values == known for _, _, known in drawn)  # e.g. the only source, which equals the total
            unusual = any(value != chart.usual for value in values)
            if unusual and not repeats and (any(values) or not drawn):
                drawn.append((label, steps, values))
    return drawn


def _expand(label: str, keys: tuple[str, ...], records: Records) -> Sequence[tuple[str, tuple[str, ...]]]:
    if not any("*" in key for key in keys):
        return [(label, keys)]
    pattern = re.compile("|".join(re.escape(key).replace(r"\*", "([^/]+)") for key in keys))
    matches = (pattern.fullmatch(name) for name in sorted({name for record in records for name in record}))
    return [(label.format(match[1]), (match[0],)) for match in matches if match][:MAX_LINES]


def _thin(steps: Sequence[int], *columns: Sequence[float]) -> list[list[float]]:
    """Downsamples the columns to at most `MAX_POINTS` means over equal windows, placed at each window's last step."""
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    starts = range(0, len(steps), size)
    ends: list[float] = [steps[min(start + size, len(steps)) - 1] for start in starts]
    return [ends, *([float(f"{fmean(column[start : start + size]):.6g}") for start in starts] for column in columns)]


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[key]) for record in records if is_number(record.get(key))]
    return [step for step, _ in points], [float(value) for _, value in points]


def is_validation(name: str) -> bool:
    """Whether a metric is a validation mean, `val-core/{source}/reward/mean@N`."""
    return name.startswith("val-core/") and name.rpartition("/")[2].startswith("mean@")


def validation_label(key: str) -> str:
    """Shortens `val-core/gsm8k/reward/mean@1` to `gsm8k`."""
    return key.removeprefix("val-core/").rpartition("/reward/")[0]


def validation_keys(records: Records) -> list[str]:
    """Returns the sorted names of the `val-core/{source}/reward/mean@N` metrics in the records."""
    return sorted({name for record in records for name in record if is_validation(name)})
