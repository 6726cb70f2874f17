"""Chart definitions: which metrics each chart plots, and how to extract its lines from the records of `metrics.jsonl`.

Invariant: pure functions of the records; non-finite values are ignored. The report (`charts`) and the web pages draw the
same subjects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.viewer.panel import is_number, is_validation

Records = Sequence[Mapping[str, Any]]

MAX_TIME_PARTS = 7
MAX_LINES = 8  # per key pattern


@dataclass(frozen=True)
class Line:
    """One line of a chart: the first of `keys` that the run logged. A key with `*` gives one line per match, with `{}` in
    the label replaced by the matched part."""

    label: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """Definition of one chart. `band` is a pair of keys drawn as a shaded range, `note` the caption. A line whose values
    all equal `usual` is not drawn."""

    title: str
    lines: tuple[Line, ...]
    note: str = ""
    percent: bool = False
    band: tuple[str, str] | None = None
    usual: float | None = None


SUBJECTS = (
    Subject(
        "Reward",
        (
            Line("total", ("reward/total/mean", "critic/score/mean")),
            Line("manager's score", ("reward/score/mean",)),
            Line("{}", ("reward/score/*/mean",)),
            Line("tools, each step", ("reward/step/mean",)),
            Line("tools, at the end", ("reward/final/mean",)),
        ),
        "Mean of a step's trajectories, by source.",
    ),
    Subject(
        "Success",
        (Line("training", ("reward/success/mean",)),),
        "Share of trajectories that solved their task; bars are 95 % intervals of the validation.",
        percent=True,
    ),
    Subject(
        "Tool use",
        (Line("trajectories", ("rollout/tool_use_rate",)),),
        "Share of trajectories with at least one successful tool call.",
        percent=True,
    ),
    Subject("Tool calls", (Line("{}", ("tool/*/calls",)),), "Calls in a step."),
    Subject("Tool errors", (Line("{}", ("tool/*/errors",)),), "Calls in a step that failed.", usual=0.0),
    Subject("Tool latency", (Line("{}", ("tool/*/latency_p95",)),), "Seconds that 95 % of calls stay below."),
    Subject(
        "Turns",
        (Line("mean", ("num_turns/mean",)),),
        "User and assistant messages of a trajectory; the shaded range is fewest to most.",
        band=("num_turns/min", "num_turns/max"),
    ),
    Subject(
        "Response length",
        (Line("mean", ("response_length/mean",)),),
        "Tokens after the prompt, those of tools included; the shaded range is shortest to longest.",
        band=("response_length/min", "response_length/max"),
    ),
    Subject(
        "Nothing to learn from",
        (
            Line("groups with equal rewards", ("rollout/equal_groups_share",)),
            Line("cut for length", ("rollout/truncated_share",)),
            Line("answer not found", ("rollout/unparsed_share",)),
            Line("infrastructure failed", ("rollout/infrastructure_failure_share",)),
        ),
        "Shares of groups and of rollouts.",
        percent=True,
        usual=0.0,
    ),
    Subject(
        "KL divergence",
        (
            Line("to the policy before the update", ("actor/ppo_kl",)),
            Line("to the reference", ("actor/kl_loss", "actor/reward_kl_penalty")),
        ),
        "Nats a token.",
    ),
    Subject("Entropy", (Line("policy", ("actor/entropy",)),), "Nats per token of the policy's distribution."),
    Subject("Gradient norm", (Line("{}", ("*/grad_norm",)),), "Before clipping."),
    Subject("Weight change", (Line("{}", ("*/weight_change",)),), "‖Δw‖ / ‖w‖ of an optimizer step."),
    Subject(
        "Clip fraction",
        (Line("ratio", ("actor/pg_clipfrac",)), Line("lower bound", ("actor/pg_clipfrac_lower",))),
        "Share of tokens whose ratio the loss clipped.",
        usual=0.0,
    ),
    Subject(
        "Sampler–trainer mismatch",
        (Line("k3 KL", ("rollout_corr/k3_kl",)), Line("p99 of |Δ log p|", ("rollout_corr/log_prob_diff_p99",))),
        "Nats a token between the log-probs of the engine that sampled and of the model that trains.",
    ),
    Subject(
        "Staleness",
        (Line("mean", ("staleness/mean",)), Line("largest", ("staleness/max",))),
        "Steps between the weights that drew a token and those that learn from it.",
        usual=0.0,
    ),
    Subject(
        "Sequences",
        (Line("mean", ("rollout/sequences/mean",)),),
        "Sequences per rollout: more than one where an agent rewrote its history.",
        usual=1.0,
    ),
)


def find_lines(subject: Subject, records: Records) -> list[tuple[str, list[int], list[float]]]:
    """Returns (label, steps, values) for each line of `subject` found in the records. Skips lines that duplicate another,
    that are 0 throughout next to others, or that never leave `usual`."""
    drawn: list[tuple[str, list[int], list[float]]] = []
    for line in subject.lines:
        for label, keys in _expand(line, records):
            steps, values = next(((s, v) for s, v in (series(records, key) for key in keys) if s), ([], []))
            repeats = any(values == known for _, _, known in drawn)  # e.g. the only source, which equals the total
            unusual = any(value != subject.usual for value in values)
            if unusual and not repeats and (any(values) or not drawn):
                drawn.append((label, steps, values))
    return drawn


def _expand(line: Line, records: Records) -> Sequence[tuple[str, tuple[str, ...]]]:
    if not any("*" in key for key in line.keys):
        return [(line.label, line.keys)]
    pattern = re.compile("|".join(re.escape(key).replace(r"\*", "([^/]+)") for key in line.keys))
    matches = (pattern.fullmatch(name) for name in sorted({name for record in records for name in record}))
    return [(line.label.format(match[1]), (match[0],)) for match in matches if match][:MAX_LINES]


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Returns (steps, values) of one metric, finite values only."""
    points = [(record["step"], record[key]) for record in records if is_number(record.get(key))]
    return [step for step, _ in points], [float(value) for _, value in points]


def validation_keys(records: Records) -> list[str]:
    """Returns the sorted names of the `val-core/{source}/reward/mean@N` metrics in the records."""
    return sorted({name for record in records for name in record if is_validation(name)})


def time_parts(records: Records) -> tuple[list[int], dict[str, list[float]]]:
    """Returns (steps, activity → seconds per step), largest activity first; the remainder of the step is `other`."""
    timed = [record for record in records if is_number(record.get("timing_s/step"))]
    names = {name for record in timed for name in record if name.startswith("timing_s/") and name != "timing_s/step"}
    if not timed or not names:
        return [], {}
    parts = {name: [_seconds(record, name) for record in timed] for name in names}
    largest = sorted(parts, key=lambda name: -sum(parts[name]))[:MAX_TIME_PARTS]
    shown = {name.removeprefix("timing_s/"): parts[name] for name in largest}
    rest = [max(_seconds(r, "timing_s/step") - sum(_seconds(r, n) for n in largest), 0.0) for r in timed]
    total = sum(map(sum, shown.values())) + sum(rest)  # a validation may not be included in `timing_s/step`
    if sum(rest) > 0.005 * total:
        shown["other"] = rest
    return [record["step"] for record in timed], shown


def _seconds(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return max(float(value), 0.0) if is_number(value) else 0.0
