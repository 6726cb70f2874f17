"""JSON responses for the web pages: curves, diagnosis, trajectories, tokens, timelines, comparisons.

Invariant: pure functions of a run's files; every response is bounded in rows, points and characters, whatever the files
contain. Text is returned unsanitized: the pages render it as text nodes and replace control characters themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import fmean, pstdev
from typing import Any

from etude.checks.steps import find_problems
from etude.dumps import sequences_of
from etude.errors import DataError, one_line
from etude.run_folder import read_config, read_run_record
from etude.viewer.conversations import parse_conversation
from etude.viewer.explain import list_tokens
from etude.viewer.index import Filter, RolloutIndex, count_values, group_rows
from etude.viewer.panel import is_number, validation_label
from etude.viewer.rows import FLAGS, Row, as_list
from etude.viewer.runs import diff_configs, is_run, read_run
from etude.viewer.signal import count_problems, find_causes
from etude.viewer.subjects import SUBJECTS, Records, find_lines, series, time_parts, validation_keys
from etude.viewer.web.runs import Runs, RunView

Answer = dict[str, Any]

MAX_POINTS = 400  # per line of a chart
PAGE_ROWS = 100
PAGE_GROUPS = 50
PAGE_TOKENS = 2000
MAX_TEXT = 20_000
MAX_CALLS = 200
MAX_LANES = 256  # trajectories of a timeline
MAX_DIFFERENCES = 300
MAX_PROMPTS = 50
_MAX_CHOICES = 100
_MAX_SEQUENCES = 32
_EXCERPT = 300


def list_runs(runs: Runs) -> Answer:
    """Returns the name, status and progress of each run."""
    return {"runs": [{"name": run.name, "title": _title(run), **_status(run)} for run in runs.all()]}


def _title(run: RunView) -> str:
    return run.name if run.name != "." else run.folder.resolve().name


def _status(run: RunView) -> Answer:
    if not is_run(run.folder):
        return {"status": "dumps", "why": "", "step": 0, "total": None}
    state = read_run(run.folder)
    return {"status": state.status, "why": state.why, "step": state.step, "total": state.total_steps}


def overview(run: RunView) -> Answer:
    """Returns the run's status, software and hardware, and the problems found in its steps."""
    _, records = run.metrics()
    record = read_run_record(run.folder)
    facts: dict[str, str] = {name: str(record[name])[:300] for name in ("versions", "hardware") if name in record}
    index = run.index
    facts["trajectories"] = f"{len(index.rows):,}" + ("" if index.complete else " so far: still reading")
    if index.bad_lines:
        facts["lines that are no trajectories"] = f"{index.bad_lines:,}; {index.bad[0].place}: {index.bad[0].reason}"
    return {"title": _title(run), **_status(run), "facts": facts, "problems": count_problems(records)}


def curves(run: RunView, version: str = "") -> Answer:
    """Returns the charts of `SUBJECTS`, downsampled to `MAX_POINTS`, and the time per activity; only the version if
    `version`, that of an earlier response, is still current."""
    now, records = run.metrics()
    if now == version:
        return {"version": now}
    charts = [chart for subject in SUBJECTS if (chart := _chart(subject.title, records)) is not None]
    steps, parts = time_parts([record for record in records if record["step"] > 0])
    thin_steps, *columns = _thin(steps, *parts.values())
    time: Answer = {"title": "Where the time went", "note": "Seconds of a step, by activity.", "steps": thin_steps}
    last = records[-1] if records else {}
    return {
        "version": now,
        "step": last.get("step", 0),
        "charts": charts,
        "time": time | {"parts": dict(zip(parts, columns))} if steps else None,
    }


def _chart(title: str, records: Records) -> Answer | None:
    subject = next(each for each in SUBJECTS if each.title == title)
    lines = []
    for label, steps, values in find_lines(subject, records):
        at, means = _thin(steps, values)
        lines.append({"label": label, "steps": at, "values": means})
    if lines and subject.band is not None:
        both = [record for record in records if all(is_number(record.get(key)) for key in subject.band)]
        steps = [record["step"] for record in both]
        if steps == series(records, subject.lines[0].keys[0])[0]:
            _, low, high = _thin(steps, *([float(record[key]) for record in both] for key in subject.band))
            lines[0] |= {"low": low, "high": high}
    for key in validation_keys(records) if title == "Success" else ():
        lines.append(_validation_line(key, records))
    if not lines:
        return None
    return {"title": title, "note": subject.note, "percent": subject.percent, "lines": lines}


def _validation_line(key: str, records: Records) -> Answer:
    steps, values = series(records, key)
    line: Answer = {"label": f"validation: {validation_label(key)}", "steps": steps, "values": values, "marks": True}
    bounds = [series(records, f"{key}/ci95_{end}") for end in ("low", "high")]
    if all(found == steps for found, _ in bounds):
        line |= {"low": bounds[0][1], "high": bounds[1][1]}
    return line


def _thin(steps: Sequence[int], *columns: Sequence[float]) -> list[list[float]]:
    """Downsamples the columns to at most `MAX_POINTS` means over equal windows, placed at each window's last step."""
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    starts = range(0, len(steps), size)
    ends: list[float] = [steps[min(start + size, len(steps)) - 1] for start in starts]
    return [ends, *([_round(fmean(column[start : start + size])) for start in starts] for column in columns)]


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def why(run: RunView, step: int | None = None) -> Answer:
    """Returns what removed the learning signal from a step (default: the last one with a dump): causes with examples,
    reward components, sampler–trainer mismatch, problems."""
    _, records = run.metrics()
    rows = [row for row in run.index.rows if row.split in ("train", "")]
    steps = sorted({row.step for row in rows})
    chosen = step if step is not None else steps[-1] if steps else max((each["step"] for each in records), default=0)
    metrics = next((record for record in records if record["step"] == chosen), {})
    step_rows = [row for row in rows if row.step == chosen]
    dumps = {(run.folder / row.name).parent for row in step_rows}
    problems = list(find_problems({n: float(v) for n, v in metrics.items() if is_number(v)}).values())
    try:
        causes = find_causes(dumps.pop(), metrics, chosen) if len(dumps) == 1 else []
    except DataError as error:  # such as a dump still being written
        causes = []
        problems.append(one_line(error))
    places = {name: row.place for row in reversed(step_rows) for name in (row.uid, row.request_id) if name}
    return {
        "step": chosen,
        "steps": steps[-_MAX_CHOICES:],
        "causes": [
            {
                "what": cause.what,
                "share": cause.share,
                "text": cause.text,
                "examples": _examples(cause.examples, places),
            }
            for cause in causes
        ],
        "components": _components(metrics),
        "mismatch": {name: metrics[name] for name in sorted(metrics) if name.startswith("rollout_corr/")},
        "problems": problems,
        "spread": _group_spread(step_rows),
        "charts": [chart for title in _WHY_CHARTS if (chart := _chart(title, records)) is not None],
    }


_WHY_CHARTS = ("Reward", "Nothing to learn from", "Sampler–trainer mismatch", "Gradient norm")


def _examples(names: Iterable[str], places: Mapping[str, str]) -> list[Answer]:
    return [{"name": name, "place": places.get(name)} for name in names]


def _components(metrics: Mapping[str, Any]) -> list[Answer]:
    """Mean of each reward source, and its share of the variance of the total."""
    sources = {
        name.removeprefix("reward/").removesuffix("/mean"): value
        for name, value in metrics.items()
        if name.startswith("reward/") and name.endswith("/mean") and is_number(value)
    }
    spread = {name.removeprefix("reward/spread/"): value for name, value in metrics.items() if "reward/spread/" in name}
    return [{"name": n, "mean": sources.get(n), "spread": spread.get(n)} for n in sorted({*sources, *spread})][:50]


def _group_spread(rows: Sequence[Row]) -> list[Answer]:
    """The groups of a step with the mean and standard deviation of their scores, sorted by the latter."""
    groups: list[Answer] = []
    for members in group_rows(rows).values():
        scores = [row.score for row in members if row.score is not None]
        if len(scores) > 1:
            groups.append(
                {"uid": members[0].uid, "place": members[0].place, "mean": fmean(scores), "std": pstdev(scores)}
            )
    return sorted(groups, key=lambda group: group["std"])[:MAX_LANES]


def _row(row: Row) -> Answer:
    names = ("place", "split", "step", "uid", "request_id", "score", "rewards", "calls", "call_errors", "turns")
    kept = {name: getattr(row, name) for name in (*names, "response_tokens", "sampled_tokens", "seconds", "flags")}
    return kept | {"stop": row.stop_reason, "source": row.data_source, "tools": row.tools}


def trajectories(run: RunView, wanted: Filter, sort: str, desc: bool, group: bool, offset: int) -> Answer:
    """Returns one page of rows, or with `group` of groups (the rollouts of one prompt in one step), and the filter choices.

    Raises:
        ConfigError: the sort is unknown, or the pattern is invalid.
    """
    index = run.index
    chosen = index.select(wanted, sort, desc)
    answer: Answer = {
        "version": index.version,
        "all": len(index.rows),
        "complete": index.complete and chosen.complete,
        "searched": chosen.searched,
        "choices": _choices(index.rows),
        "offset": offset,
    }
    if not group:
        page = chosen.rows[offset : offset + PAGE_ROWS]
        return answer | {"total": len(chosen.rows), "page": PAGE_ROWS, "rows": [_row(row) for row in page]}
    groups = list(group_rows(chosen.rows).values())
    shown = [_group(members) for members in groups[offset : offset + PAGE_GROUPS]]
    return answer | {"total": len(groups), "page": PAGE_GROUPS, "groups": shown}


def list_rows(index: RolloutIndex, rows: Sequence[Row]) -> Answer:
    """Returns all of `rows` as one list, for an export."""
    page = {"version": 0, "complete": True, "searched": 0, "offset": 0, "page": PAGE_ROWS, "total": len(rows)}
    return page | {"all": len(index.rows), "choices": _choices(rows), "rows": [_row(row) for row in rows]}


def _choices(rows: Sequence[Row]) -> Answer:
    """The values that each filter offers."""
    offered = {name: sorted(filter(None, found))[:_MAX_CHOICES] for name, found in count_values(rows).items()}
    return offered | {"step": sorted({row.step for row in rows})[-1000:], "flags": FLAGS}


def _group(members: Sequence[Row]) -> Answer:
    scores = [row.score for row in members if row.score is not None]
    spread = {"mean": fmean(scores), "std": pstdev(scores)} if scores else {"mean": None, "std": None}
    rows = [_row(row) for row in members[:PAGE_ROWS]]
    return spread | {"uid": members[0].uid, "step": members[0].step, "size": len(members), "rows": rows}


def _find(run: RunView, place: str) -> tuple[RolloutIndex, Row]:
    index = run.index
    if (row := index.find(place)) is None:
        raise DataError(f"no trajectory at {place[:200]!r}; was its dump replaced?")
    return index, row


def trajectory(run: RunView, place: str) -> Answer:
    """Returns a trajectory: its conversation by provenance, tool calls, rewards, facts, and the rollouts of its prompt.

    Raises:
        DataError: there is no trajectory at `place`.
    """
    index, row = _find(run, place)
    record = index.read(row)
    sequences = sequences_of(record)
    calls = [call for call in as_list(record.get("tool_calls")) if isinstance(call, Mapping)]
    siblings = index.siblings(row)
    rows = index.rows
    at = next((number for number, each in enumerate(rows) if each.place == place), 0)
    return {
        "row": _row(row),
        "sequences": [_conversation(each) for each in sequences[-_MAX_SEQUENCES:]],
        "calls": [_call(call) for call in calls[:MAX_CALLS]],
        "calls_omitted": max(len(calls) - MAX_CALLS, 0),
        "siblings": [_row(each) for each in siblings[:PAGE_ROWS]],
        "before": rows[at - 1].place if at else None,
        "after": rows[at + 1].place if at + 1 < len(rows) else None,
    }


def _conversation(record: Mapping[str, Any]) -> Answer:
    conversation = parse_conversation(record, MAX_TEXT)
    assert conversation is not None
    return {"blocks": [vars(block) for block in conversation.blocks], "facts": conversation.facts}


def _call(call: Mapping[str, Any]) -> Answer:
    numbers = ("turn", "reward", "seconds", "retries", "timeouts")
    texts = {name: _truncate(call.get(name)) for name in ("name", "arguments", "response", "error", "source")}
    return texts | {name: call.get(name) if is_number(call.get(name)) else None for name in numbers}


def _truncate(text: object) -> str | None:
    return None if text is None else str(text)[:MAX_TEXT] + (" …" if len(str(text)) > MAX_TEXT else "")


def tokens(run: RunView, place: str, sequence: int, offset: int) -> Answer:
    """Returns one page of a sequence's response tokens as columns, including the trainer's per-token values if dumped.

    Raises:
        DataError: there is no such trajectory or sequence, or its dump has no tokens.
    """
    index, row = _find(run, place)
    sequences = sequences_of(index.read(row))[-_MAX_SEQUENCES:]
    if sequence >= len(sequences):
        raise DataError(f"{place} has {len(sequences)} sequences")
    record = sequences[sequence]
    if not record.get("segments"):
        raise DataError("this dump holds no tokens: it is another program's, or nothing was sampled")
    tokenizer = run.tokenizer
    try:
        page = list(islice(list_tokens(record, tokenizer), offset, offset + PAGE_TOKENS))
    except OverflowError as error:  # a token id out of any tokenizer's range
        raise DataError(f"{place}: {one_line(error)}") from error
    total = sum(len(segment.get("token_ids") or ()) for segment in record["segments"])
    columns: Answer = {
        "id": [token.id for token in page],
        "text": [token.text[:_EXCERPT] for token in page],
        "from": [token.provenance.value for token in page],
        "turn": [token.turn for token in page],
        "version": [token.version for token in page],
        "reward": [token.reward for token in page],
        "log_prob": [token.log_prob for token in page],
    }
    names = dict.fromkeys(name for token in page for name in token.values)
    values = {name: [token.values.get(name) for token in page] for name in names}
    return {
        "total": total,
        "offset": offset,
        "page": PAGE_TOKENS,
        "tokenizer": tokenizer is not None,
        "columns": columns | values,
    }


def timeline(run: RunView, step: int | None = None) -> Answer:
    """Returns the timeline of a step: for each trajectory, spans of waiting, sampling, tool calls and scoring in seconds
    from the first start (older dumps have durations only); and the trainer's activities."""
    index, (_, records) = run.index, run.metrics()
    rows = [row for row in index.rows if row.split in ("train", "")]
    steps = sorted({row.step for row in rows})
    chosen = step if step is not None else steps[-1] if steps else 0
    shown = [row for row in rows if row.step == chosen]
    lanes: list[Answer] = []
    for row in shown[:MAX_LANES]:
        spans, known = _spans(index.read(row))
        lanes.append({"place": row.place, "uid": row.uid, "score": row.score, "spans": spans, "known": known})
    start = min((span[1] for lane in lanes if lane["known"] for span in lane["spans"]), default=0.0)
    for lane in lanes:
        shift = start if lane["known"] else 0.0
        lane["spans"] = [[name, _round(begin - shift), _round(length)] for name, begin, length in lane["spans"]]
    metrics = next((record for record in records if record["step"] == chosen), {})
    training = {
        name.removeprefix("timing_s/"): value
        for name, value in metrics.items()
        if name.startswith("timing_s/") and is_number(value)
    }
    return {
        "step": chosen,
        "steps": steps[-1000:],
        "lanes": lanes,
        "omitted": len(shown[MAX_LANES:]),
        "training": training,
    }


_MAX_SPANS = 256


def _spans(record: Mapping[str, Any]) -> tuple[list[list[Any]], bool]:
    """Returns [activity, start, seconds] per span, and whether starts are known; if not, total durations are laid out one
    after another."""
    spans = record.get("timeline")
    if isinstance(spans, list) and spans:
        kept = [s for s in spans[:_MAX_SPANS] if isinstance(s, list) and len(s) == 3 and all(map(is_number, s[1:]))]
        return [[str(name)[:60], float(start), float(length)] for name, start, length in kept], True
    at, spans_from_sums = 0.0, []
    timings = record.get("timings")
    for name, length in islice(timings.items(), 20) if isinstance(timings, Mapping) else ():
        if is_number(length):
            spans_from_sums.append([str(name)[:60], at, float(length)])
            at += float(length)
    return spans_from_sums, False


def compare(run: RunView, other: RunView) -> Answer:
    """Returns the keys in which two configurations differ, and the prompts that both runs rolled out, largest difference in
    mean score first."""
    try:
        differences = diff_configs(read_config(run.folder), read_config(other.folder))
        reason = ""
    except DataError as error:
        differences, reason = [], one_line(error)
    shown = [{"key": d.key, "left": str(d.left)[:_EXCERPT], "right": str(d.right)[:_EXCERPT]} for d in differences]
    left, right = _last_rows(run.index), _last_rows(other.index)
    prompts = [_pair(left[prompt], right[prompt]) for prompt in left.keys() & right.keys()]
    prompts.sort(key=lambda pair: (-abs(pair["right"]["mean"] - pair["left"]["mean"]), pair["left"]["place"]))
    index = run.index
    for pair in prompts[:MAX_PROMPTS]:
        if (row := index.find(pair["left"]["place"])) is not None:
            pair["prompt"] = index.texts(row)[0][-_EXCERPT:]
    return {
        "titles": [_title(run), _title(other)],
        "differences": shown[:MAX_DIFFERENCES],
        "omitted": len(shown[MAX_DIFFERENCES:]),
        "reason": reason,
        "shared": len(prompts),
        "prompts": prompts[:MAX_PROMPTS],
    }


def _last_rows(index: RolloutIndex) -> dict[str, list[Row]]:
    """Prompt → its rollouts in the last step that has it; validation takes precedence over training."""
    last: dict[str, list[Row]] = {}
    for row in sorted(index.rows, key=lambda row: (row.split not in ("train", ""), row.step)):
        if row.prompt in last and last[row.prompt][0].group[:2] == row.group[:2]:
            last[row.prompt].append(row)
        else:
            last[row.prompt] = [row]
    return last


def _pair(left: Sequence[Row], right: Sequence[Row]) -> Answer:
    def side(rows: Sequence[Row]) -> Answer:
        scores = [row.score for row in rows if row.score is not None]
        return {
            "place": rows[0].place,
            "step": rows[0].step,
            "size": len(rows),
            "mean": fmean(scores) if scores else 0.0,
        }

    return {"left": side(left), "right": side(right), "prompt": ""}
