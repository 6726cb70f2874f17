"""Writes `report.html`, a single self-contained page that summarizes a run.

Invariant: the page makes no request and runs no script (its content security policy forbids both), and all text from
models, tools and files is escaped. Its size is bounded by the limits of the modules it uses. If a file is absent, a
sentence says so; a malformed file raises an error that names it.

Reads `metrics.jsonl`, `summary.json`, `run.json`, `config.yaml` and the dumps of a run folder; writes nothing else.
`summary.json` is an object: `before` and `after` map a quantity's name to a number, or for a proportion to
`{"value", "low", "high"}` (a 95 % interval); other scalars are listed as facts. Without it, the first and the last
validation are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from etude.errors import DataError, one_line
from etude.jsonl import write_atomically
from etude.run_folder import (
    COMPLETED,
    CONFIG_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    read_metrics,
    read_run_record,
    run_totals,
)
from etude.viewer.charts import Chart, Records, draw_charts, series, validation_keys
from etude.viewer.conversations import Conversation, Samples, load_change, load_failures, load_samples, sanitize_text
from etude.viewer.panel import format_duration, is_number, validation_label
from etude.viewer.signal import Cause, count_problems, find_causes

MAX_CONFIG = 200_000  # characters
MAX_FACTS = 30
MAX_HEADLINES = 6


@dataclass(frozen=True)
class Estimate:
    """A number, with its 95 % interval if it is a proportion."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_proportion(self) -> bool:
        """Whether it has an interval and is therefore rendered as a percentage."""
        return self.low is not None and self.high is not None

    @property
    def text(self) -> str:
        """The value as rendered, such as `93.0 %` or `0.93`."""
        return f"{100 * self.value:.1f}\N{NO-BREAK SPACE}%" if self.is_proportion else f"{self.value:.4g}"

    @property
    def interval(self) -> str:
        """The interval as rendered, such as `88.1–96.0 %`; empty if there is none."""
        return (
            f"{100 * (self.low or 0.0):.1f}–{100 * (self.high or 0.0):.1f}\N{NO-BREAK SPACE}%"
            if self.is_proportion
            else ""
        )


@dataclass(frozen=True)
class Headline:
    """One quantity before and after training."""

    name: str
    before: Estimate | None
    after: Estimate | None


@dataclass(frozen=True)
class Contents:
    """The variables of the page template."""

    title: str
    subtitle: str
    headlines: list[Headline]
    facts: list[tuple[str, str]]
    charts: list[Chart]
    change: tuple[Conversation, Conversation] | None
    samples: Samples | None
    failures: tuple[Conversation, ...]
    problems: list[str]
    causes: list[Cause]
    ending: str
    config: str
    config_omitted: int


def write_report(
    run_dir: Path | str,
    *,
    title: str | None = None,
    rollouts: Path | str | None = None,
    validation: Path | str | None = None,
) -> Path:
    """Writes `{run_dir}/report.html` and returns its path.

    Args:
        run_dir: a run folder.
        title: defaults to the folder's name.
        rollouts, validation: the dump folders; default to those names inside `run_dir`. Sample trajectories come from
            validation dumps if there are any, since their prompts recur.

    Raises:
        DataError: the folder does not exist or is not a run folder, or one of its files is malformed.
        EtudeError: the page cannot be written.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"run folder not found: {run_dir}; give the folder a run wrote (trainer.default_local_dir)")
    folders = (Path(validation or run_dir / "validation"), Path(rollouts or run_dir / "rollouts"))
    contents = _contents(run_dir, title or run_dir.resolve().name, folders)
    if not (contents.headlines or contents.charts or contents.samples or contents.config):
        raise DataError(
            f"{run_dir} holds no {METRICS_FILE}, dumps, {SUMMARY_FILE} or {CONFIG_FILE}; is it a run's folder?"
        )
    path = run_dir / REPORT_FILE
    with write_atomically(path) as file:
        file.write(render_page(contents).encode(errors="replace"))
    return path


def render_page(contents: Contents) -> str:
    """Renders the page; everything in `contents` except the charts' SVG is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_sanitize_value, trim_blocks=True, lstrip_blocks=True
    )
    template = Path(__file__).with_name("report_template.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(vars(contents))


def _sanitize_value(value: object) -> object:
    return sanitize_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _contents(run_dir: Path, title: str, folders: tuple[Path, Path]) -> Contents:
    metrics_path = run_dir / METRICS_FILE
    records = read_metrics(metrics_path) if metrics_path.is_file() else []
    summary = _read_summary(run_dir / SUMMARY_FILE)
    config, omitted = _read_config(run_dir / CONFIG_FILE)
    samples = next((found for folder in folders if (found := load_samples(folder)) is not None), None)
    record = read_run_record(run_dir)
    ran_on: list[tuple[str, str]] = [
        (name, str(record[name])[:300]) for name in ("versions", "hardware") if name in record
    ]
    spent = [(f"total {name.replace('_', ' ')}", f"{value:,.4g}") for name, value in run_totals(records).items()]
    return Contents(
        title=title,
        subtitle=_subtitle(records),
        headlines=(_summary_headlines(summary, run_dir / SUMMARY_FILE) or _validation_headlines(records))[
            :MAX_HEADLINES
        ],
        facts=_facts(summary) + spent + ran_on,
        charts=draw_charts(records),
        change=next(filter(None, map(load_change, folders)), None),
        samples=samples,
        failures=next(filter(None, map(load_failures, folders)), ()),
        problems=count_problems(records),
        causes=_causes(folders[1], records),
        ending=_ending(record),
        config=config,
        config_omitted=omitted,
    )


def _ending(record: Mapping[str, Any]) -> str:
    """Why the run is incomplete; empty if it is complete, or if unknown."""
    if not record or record.get("ended") == COMPLETED:
        return ""
    return str(record.get("ended") or "it is still running, or was killed")[:300]


def _causes(rollouts: Path, records: Records) -> list[Cause]:
    steps = [record for record in records if isinstance(record.get("step"), int) and record["step"] > 0]
    return find_causes(rollouts, steps[-1] if steps else {})


def list_causes(run_dir: Path, rollouts: Path | None = None) -> list[Cause]:
    """Lists why the loss of a run's last step may be zero; see `find_causes`.

    Raises:
        DataError: a file is malformed.
    """
    metrics = run_dir / METRICS_FILE
    return _causes(rollouts or run_dir / "rollouts", read_metrics(metrics) if metrics.is_file() else [])


def _subtitle(records: Records) -> str:
    steps, seconds = series(records, "perf/time_per_step")
    if not steps:
        return ""
    _, tokens = series(records, "perf/total_num_tokens")
    spent = f"{len(steps)} training steps in {format_duration(sum(seconds))}"
    return f"{spent}, {sum(tokens):,.0f} tokens" if tokens else spent


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({one_line(error, 120)})") from error
    if not isinstance(summary, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(summary).__name__}")
    return summary


def _summary_headlines(summary: Mapping[str, Any], path: Path) -> list[Headline]:
    sides = {side: summary.get(side, {}) for side in ("before", "after")}
    for side, values in sides.items():
        if not isinstance(values, dict):
            raise DataError(f"{path}: '{side}' must map names to numbers")
    estimates = {side: {k: _estimate(v, f"{path}: {side}.{k}") for k, v in v_.items()} for side, v_ in sides.items()}
    names = dict.fromkeys([*sides["before"], *sides["after"]])
    return [Headline(name, estimates["before"].get(name), estimates["after"].get(name)) for name in names]


def _estimate(value: object, where: str) -> Estimate:
    try:
        if isinstance(value, Mapping):
            low, high = (None if value.get(key) is None else float(value[key]) for key in ("low", "high"))
            return Estimate(float(value["value"]), low, high)
        return Estimate(float(value))  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where} must be a number or an object with 'value' (and 'low', 'high')") from error


def _validation_headlines(records: Records) -> list[Headline]:
    headlines = []
    for key in validation_keys(records):
        having = [record for record in records if is_number(record.get(key))]
        if len(having) > 1:
            name = f"validation: {validation_label(key)}"
            headlines.append(
                Headline(name, _validation_estimate(having[0], key), _validation_estimate(having[-1], key))
            )
    return headlines


def _validation_estimate(record: Mapping[str, Any], key: str) -> Estimate:
    low, high = record.get(f"{key}/ci95_low"), record.get(f"{key}/ci95_high")
    if is_number(low) and is_number(high):
        return Estimate(float(record[key]), low, high)
    return Estimate(float(record[key]))


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Formats the summary's scalars, except those ending in _before or _after, which are already headlines."""
    plain = [
        (name, value)
        for name, value in summary.items()
        if isinstance(value, (str, int, float)) and not name.endswith(("_before", "_after"))
    ]
    formatted = [(name, f"{value:,.4g}" if isinstance(value, float) else str(value)) for name, value in plain]
    return [(name.replace("_", " ")[:80], value[:300]) for name, value in formatted[:MAX_FACTS]]


def _read_config(path: Path) -> tuple[str, int]:
    """Reads the configuration; returns (its text, the number of characters truncated)."""
    if not path.is_file():
        return "", 0
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    return text[:MAX_CONFIG], max(len(text) - MAX_CONFIG, 0)
