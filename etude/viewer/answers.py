"""What there is to see of a run, as JSON: results, curves, diagnosis, trajectories, tokens, timelines, comparisons. The web
pages, the exported page and the terminal show the same answers.

Invariant: pure functions of a run's files; every answer is bounded in rows, points and characters, whatever the files
contain. Text is returned unsanitized, except in conversations: who shows it does so as text, without control characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from etude.checks.step_hacks import ALARM, find_hacks
from etude.checks.step_warnings import FAR, UNTRAINED, WHY, Problem, find_evidence, find_problems
from etude.dumps import sequences_of, token_values
from etude.errors import DataError, one_line
from etude.run_folder import (
    CONFIG_FILE,
    METRICS_FILE,
    VALIDATION_CHANGED,
    always_paid,
    chooses_rows,
    list_checkpoints,
    read_config,
    read_run_record,
    reward_trend,
    since_change,
    tell_trend,
)
from etude.viewer.before_after import choose_trajectories, read_headlines
from etude.viewer.causes import Cause, count_problems, find_causes
from etude.viewer.conversations import parse_conversation
from etude.viewer.curves import draw_charts, draw_time
from etude.viewer.explain import list_tokens
from etude.viewer.index import RolloutIndex, config_of, count_values, group_rows
from etude.viewer.query import Filter
from etude.viewer.rows import FLAGS, NUMBER, Row, as_dict, as_list, calls_of, is_number, numbers_of
from etude.viewer.runs import Runs, RunView, cost_facts, diff_configs, is_run, read_run

Answer = dict[str, Any]

PAGE_ROWS = 100
PAGE_GROUPS = 50
PAGE_TOKENS = 2000
MAX_TEXT = 20_000
MAX_CALLS = 200
MAX_ROWS = 256  # of a timeline, and groups of a diagnosis
MAX_DIFFERENCES = 300
MAX_PROMPTS = 50
MAX_CONFIG = 200_000  # characters
_MAX_CHOICES = 100
_MAX_SEQUENCES = 32
_EXCERPT = 300


def list_runs(runs: Runs) -> Answer:
    """Returns the name, status and progress of each run."""
    return {"runs": [{"name": run.name, "title": run.title, **_status(run)} for run in runs.all()]}


def _status(run: RunView) -> Answer:
    if not is_run(run.folder):
        return {"status": "dumps", "why": "", "step": 0, "total": None}
    state = read_run(run.folder)
    return {"status": state.status, "why": state.why, "step": state.step, "total": state.total_steps}


def overview(run: RunView) -> Answer:
    """Returns the run's status, cost, software and hardware, and the problems found in its steps."""
    _, records = run.metrics()
    record = read_run_record(run.folder)
    facts = cost_facts(records, record) | {
        name: str(record[name])[:300] for name in ("versions", "hardware") if name in record
    }
    index = run.index
    facts["trajectories"] = f"{len(index.rows):,}" + ("" if index.complete else " so far: still reading")
    if index.bad_lines:
        facts["lines that are no trajectories"] = f"{index.bad_lines:,}; {index.bad[0].place}: {index.bad[0].reason}"
    return {"title": run.title, **_status(run), "facts": facts, "problems": count_problems(records)}


def results(run: RunView) -> Answer:
    """Returns the results before and after training, the trajectories that show them (see `choose_trajectories`), and the
    configuration as text.

    Raises:
        DataError: `summary.json` is malformed.
    """
    _, records = run.metrics()
    record = read_run_record(run.folder)
    headlines, facts = read_headlines(run.folder, since_change(records, record, VALIDATION_CHANGED))
    rows = run.index.rows
    if changed := record.get(VALIDATION_CHANGED):
        facts["compared since"] = f"step {changed}, when what is validated changed"
        rows = [row for row in rows if row.step > changed] or rows
    path = run.folder / CONFIG_FILE
    try:
        config = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        config = f"cannot be read: {one_line(error)}"
    shown = {"config": config[:MAX_CONFIG], "config_omitted": max(len(config) - MAX_CONFIG, 0)}
    return {"headlines": headlines, "facts": facts, **choose_trajectories(rows), **shown}


def curves(run: RunView, version: str = "") -> Answer:
    """Returns the charts of the metrics; only the version if `version`, that of an earlier response, is still current."""
    now, records = run.metrics()
    if now == version:
        return {"version": now}
    step = records[-1]["step"] if records else 0
    logged = (run.folder / METRICS_FILE).exists()  # from the start of a run on
    return {"version": now, "step": step, "logged": logged, "charts": draw_charts(records), "time": draw_time(records)}


_READ = 256
_ACTOR = "actor_rollout_ref.actor"
_NOISE = 3.0  # factor of a policy's entropy
_NO_CURVE = "the curriculum chooses rows by their success so far, so rewards of steps are no curve: compare validations"
_LARGE = 0.1  # share of a step's rollouts
_RARE = 0.05  # likewise: listed last, and without what to do
_FOLLOWS = "mend the above first: these mostly come of it"
_WHY_CHARTS = ("Reward", "Nothing to learn from", "Sampler–trainer mismatch", "Gradient norm")


def why(run: RunView, step: int | None = None) -> Answer:
    """Returns what removed the learning signal from a step (default: the last one with a dump), as of then: causes with
    examples and what to do, reward components, sampler–trainer mismatch, problems."""
    _, records = run.metrics()
    chosen, steps, rows = _training_rows(run, step)
    if step is None and not steps:
        chosen = max((each["step"] for each in records), default=0)
    so_far = since_change([each for each in records if each["step"] <= chosen], read_run_record(run.folder))
    metrics = next((record for record in so_far if record["step"] == chosen), {})
    read = [(row, run.index.read(row)) for row in rows[:_READ]]
    config = config_of(run.folder)
    talks = as_dict(as_dict(as_dict(config.get("actor_rollout_ref")).get("rollout")).get("multi_turn"))
    evidence, scorer = find_evidence(_essence(record) for _, record in read), _scorer(config)
    copied = {row.place for row, record in read if _says_what_the_tool_said(row, record)}
    paid = always_paid(so_far)
    causes_found = find_causes(rows, metrics, evidence, scorer, bool(talks.get("tool_config_path")), copied, paid)
    found = [cause for cause in causes_found if cause.share > 0]
    found.sort(key=lambda cause: cause.share < _RARE)
    behind = [cause for cause in found if not cause.follows and cause.share >= _LARGE]
    problems = find_problems(numbers_of(metrics), evidence)
    fallen = _collapse(run.folder, [record for record in so_far if record["step"] > 0])

    def follows(cause: Cause) -> bool:
        if cause.count is not None and (
            UNTRAINED in problems or fallen or (paid is not None and cause is not found[0])
        ):
            return True  # without a count it is of the infrastructure, which fails whatever is said or paid
        return cause.follows and bool(behind)

    causes = [
        {
            "what": cause.what,
            "share": cause.share,
            "text": cause.text,
            "fix": "" if cause.share < _RARE else _FOLLOWS if follows(cause) else cause.fix,
            "examples": [_example(name, row) for name, row in cause.named_examples],
        }
        for cause in found
    ]
    verdict = _verdict(read, so_far, found, behind, problems, scorer, fallen)
    chosen_rows = chooses_rows(config)
    trend = None if chosen_rows else reward_trend(so_far)  # None for a few steps
    told = tell_trend(*trend) if trend else _NO_CURVE if chosen_rows and so_far else ""
    return {
        "verdict": verdict | {"rose": bool(trend and trend[0]), "trend": told and f"{told[0].upper()}{told[1:]}."},
        "step": chosen,
        "steps": steps[-_MAX_CHOICES:],
        "causes": causes,
        "components": _components(metrics, scorer),
        "mismatch": {name: metrics[name] for name in sorted(metrics) if name.startswith("rollout_corr/")},
        # the page that is being read is no remedy
        "problems": [str(each).removesuffix(WHY).rstrip("; \N{RIGHTWARDS ARROW}") for each in problems.values()],
        "spread": _group_spread(rows),
        "charts": draw_charts(records, _WHY_CHARTS),
    }


def _says_what_the_tool_said(row: Row, record: Mapping[str, Any]) -> bool:
    """Whether an answer ends in the last number that its last call was answered with; without a number, holds its text."""
    calls = calls_of(record)
    told = str(calls[-1].get("response") or "").strip() if calls else ""
    numbers, said = NUMBER.findall(told), NUMBER.findall(row.answer)
    return said[-1:] == numbers[-1:] if numbers else bool(told) and told in row.answer


def _example(name: str, row: Row) -> Answer:
    return {"name": name, "place": row.place, "question": row.question}


def _essence(record: Mapping[str, Any]) -> Answer:
    """What `find_evidence` reads of any record."""
    return {
        "tool_calls": calls_of(record),
        "stop_reason": record.get("stop_reason"),
        "response_ids": as_list(record.get("response_ids")),
        "metrics": as_dict(record.get("metrics")),
    }


def _scorer(config: Mapping[str, Any]) -> str:
    """Names the run's reward function, as `reward.py: compute_score`."""
    custom = as_dict(config.get("custom_reward_function"))
    path, name = custom.get("path"), custom.get("name", "compute_score")
    return f"{Path(path).name}: {name}"[:_EXCERPT] if isinstance(path, str) else "the reward function"


def _verdict(
    read: Sequence[tuple[Row, Mapping[str, Any]]],
    records: Sequence[Mapping[str, Any]],
    causes: Sequence[Cause],
    behind: Sequence[Cause],
    problems: Mapping[str, Problem],
    scorer: str,
    fallen: Problem | None,
) -> Answer:
    """What to look at first, what to do about it, and up to three rollouts that show it: weights that stand still, or an
    update that the reward did not come back from, else an untrained model, else groups that are mostly alike word for word,
    else what nothing can be learned with, else a hack of the sentinel's, else what takes the signal from most, else a
    problem of the metrics. `read`: rollouts of the step with their records; `behind`: of the causes those that others may
    come of."""
    problem, steps = problems.get("actor/weight_change"), [record for record in records if record["step"] > 0]
    still = sum("actor/weight_change" in find_problems(numbers_of(record)) for record in steps) if problem else 0
    if problem and 2 * still > len(steps):
        return {"text": problem.what, "fix": f"raise {_ACTOR}.optim.lr", "examples": []}
    if fallen:
        return {"text": fallen.what, "fix": fallen.fix, "examples": []}
    if noise := problems.get(UNTRAINED):
        return {
            "text": noise.what,
            "fix": noise.fix,
            "examples": [_example(row.request_id, row) for row, _ in read[:3]],
        }
    broken = next((cause for cause in causes if cause.is_broken), None)
    hacks = [hack for hack in find_hacks(record for _, record in read) if hack.share >= ALARM]
    if hacks and (broken is None or (hacks[0].kind == "equal" and 2 * hacks[0].share > 1)):
        places = {row.request_id or row.uid: row.place for row, _ in read}
        examples = [{"name": name, "place": places.get(name, "")} for name in hacks[0].examples]
        return {"text": hacks[0].sentence, "fix": hacks[0].fix(scorer), "examples": examples}
    worst = broken or max(behind or causes, key=lambda cause: cause.share, default=None)
    if worst is not None and worst.share >= (0.0 if broken else ALARM):
        examples = [_example(name, row) for name, row in worst.named_examples]
        return {"text": f"{worst.text} of {worst.what}", "fix": worst.fix, "examples": examples}
    text, fix = next(iter(problems.values()), ("nothing stands out in this step", ""))
    samples = not any(name in record for record in records for name in ("sft/loss", "dpo/loss"))
    fix = fix if read or not samples else "set trainer.rollout_data_dir, so that a run keeps what was sampled"
    return {"text": text, "fix": fix, "examples": []}


def _collapse(folder: Path, steps: Sequence[Mapping[str, Any]]) -> Problem | None:
    """What a run that lost half of its reward and more, and has not got it back, lost it by, and what to do; None if it did
    not: the first step that changed the policy far, or answers that became noise."""

    def values(name: str) -> list[float]:
        return [float(each.get(name) or 0.0) for each in steps]

    rewards, entropies = values("reward/total/mean"), values("actor/entropy")
    for at, moved in enumerate(values("actor/ppo_kl")[:-1]):
        best, now = max(rewards[: at + 1]), max(rewards[at + 1 :])
        if moved >= FAR and 0 < best >= 2 * now:
            line = f"step {steps[at]['step']} changed the policy by KL {moved:.3g}; the reward fell from {best:.3g}"
            lower = f"lower {_ACTOR}.optim.lr, and {_start_before(folder, steps[at]['step'])}"
            return Problem(f"{line} to {now:.3g} at most", lower)
    best = max(range(len(steps)), key=rewards.__getitem__, default=0)

    def is_noise(at: int) -> bool:
        """The entropy has risen far; or, where it was next to none, by less and for longer."""
        usual, since = _NOISE * entropies[best], len(steps) - at
        enough = FAR if since < 3 else _NOISE * usual if since < 10 else 0.0
        return entropies[at] >= max(usual, min(enough, FAR)) > 0

    lost = [at for at in range(best + 1, len(steps)) if is_noise(at) and rewards[best] >= 2 * max(rewards[at:])]
    if lost and rewards[best] > 0:
        at = max(lost, key=entropies.__getitem__)  # the answers may have become alike since, and no better
        line = f"the reward fell from {rewards[best]:.3g} in step {steps[best]['step']} to {rewards[-1]:.3g}, and the"
        line += f" entropy rose from {entropies[best]:.3g} to {entropies[at]:.3g} nats: answers became noise"
        lower = f"lower {_ACTOR}.entropy_coeff or {_ACTOR}.optim.lr"
        return Problem(line, f"{lower}, and {_start_before(folder, steps[best]['step'] + 1)}")
    return None


def _start_before(folder: Path, step: int) -> str:
    """How to train again from before `step`: the same command would go on from the newest checkpoint, which is spoilt."""
    if kept := [each for each in list_checkpoints(folder) if each < step]:
        return f"go on from before it: `etude reproduce {folder} --from-step {kept[-1]} {_ACTOR}.optim.lr=LOWER`"
    return "start anew: trainer.resume_mode=disable, or another trainer.default_local_dir"


def _training_rows(run: RunView, step: int | None) -> tuple[int, list[int], list[Row]]:
    """Returns (`step` or the last one, all steps, the step's rows) of the training rollouts."""
    rows = [row for row in run.index.rows if row.split in ("train", "")]
    steps = sorted({row.step for row in rows})
    chosen = step if step is not None else steps[-1] if steps else 0
    return chosen, steps, [row for row in rows if row.step == chosen]


def _components(metrics: Mapping[str, Any], scorer: str) -> list[Answer]:
    """Mean of each reward source that is not 0 throughout, and its share of the variance of the total."""
    sources = {
        name.removeprefix("reward/").removesuffix("/mean"): value
        for name, value in metrics.items()
        if name.startswith("reward/") and name.endswith("/mean") and is_number(value)
    }
    spread = {name.removeprefix("reward/spread/"): value for name, value in metrics.items() if "reward/spread/" in name}
    names = {"score": scorer, "step": "tools, each step", "final": "tools, at the end"}
    shown = [name for name in sorted({*sources, *spread}) if sources.get(name) or name in spread]
    return [{"name": names.get(n, n), "mean": sources.get(n), "spread": spread.get(n)} for n in shown[:50]]


def _group_spread(rows: Sequence[Row]) -> list[Answer]:
    """The groups of a step with the mean and standard deviation of their scores, sorted by the latter."""
    groups: list[Answer] = []
    for members in group_rows(rows).values():
        scores = [row.score for row in members if row.score is not None]
        if len(scores) > 1:
            groups.append(
                {"uid": members[0].uid, "place": members[0].place, "mean": fmean(scores), "std": pstdev(scores)}
            )
    return sorted(groups, key=lambda group: group["std"])[:MAX_ROWS]


_NUMBERS = ("rewards", "calls", "call_errors", "turns", "response_tokens", "sampled_tokens", "seconds", "flags")


def _row(row: Row) -> Answer:
    names = ("place", "split", "step", "uid", "request_id", "question", "answer", "score")
    kept = {name: getattr(row, name) for name in (*names, *_NUMBERS)}
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


def list_rows(rows: Sequence[Row]) -> Answer:
    """Returns all of `rows` as one list, for an export, which does not know how many more the run has."""
    page = {"version": 0, "complete": True, "searched": 0, "offset": 0, "page": PAGE_ROWS, "total": len(rows)}
    return page | {"all": len(rows), "part": True, "choices": _choices(rows), "rows": [_row(row) for row in rows]}


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
    """Returns a trajectory: what `describe_record` says, its row, and the rollouts of its prompt.

    Raises:
        DataError: there is no trajectory at `place`.
    """
    index, row = _find(run, place)
    rows = index.rows
    at = next((number for number, each in enumerate(rows) if each.place == place), 0)
    return {
        "row": _row(row),
        **describe_record(index.read(row)),
        "siblings": [_row(each) for each in index.siblings(row)[:PAGE_ROWS]],
        "before": rows[at - 1].place if at else None,
        "after": rows[at + 1].place if at + 1 < len(rows) else None,
    }


def describe_record(record: Mapping[str, Any], max_text: int = MAX_TEXT) -> Answer:
    """Returns a record's sequences (the main one last) as conversations by provenance with facts, and its tool calls; texts
    have at most `max_text` characters."""
    calls = calls_of(record)
    advantages = [value for value in token_values(record).get("advantages", ()) if is_number(value)]
    conversations = [parse_conversation(each, max_text) for each in sequences_of(record)[-_MAX_SEQUENCES:]]
    return {
        "sequences": [asdict(each) for each in conversations],
        "advantage": fmean(advantages) if advantages else None,
        "calls": [_call(call, max_text) for call in calls[:MAX_CALLS]],
        "calls_omitted": max(len(calls) - MAX_CALLS, 0),
    }


def _call(call: Mapping[str, Any], max_text: int) -> Answer:
    def shorten(value: object) -> str | None:
        return None if value is None else (text := str(value))[:max_text] + (" …" if len(text) > max_text else "")

    texts = {name: shorten(call.get(name)) for name in ("name", "arguments", "response", "error", "source")}
    numbers = ("turn", "reward", "seconds", "retries", "timeouts")
    return texts | {name: value if is_number(value := call.get(name)) else None for name in numbers}


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
    try:
        page = list(islice(list_tokens(record, run.decode, sequences), offset, offset + PAGE_TOKENS))
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
        "tokenizer": run.decode is not None,
        "columns": columns | values,
    }


def timeline(run: RunView, step: int | None = None) -> Answer:
    """Returns the timeline of a step: for each trajectory, spans of waiting, sampling, tool calls and scoring in seconds
    from the first start (older dumps have durations only); and the trainer's activities."""
    _, records = run.metrics()
    chosen, steps, rows = _training_rows(run, step)
    index, lanes = run.index, list[Answer]()
    for row in rows[:MAX_ROWS]:
        spans, known = _spans(index.read(row))
        lanes.append(
            {
                "place": row.place,
                "uid": row.uid,
                "question": row.question,
                "score": row.score,
                "spans": spans,
                "known": known,
            }
        )
    start = min((span[1] for lane in lanes if lane["known"] for span in lane["spans"]), default=0.0)
    for lane in lanes:
        shift = start if lane["known"] else 0.0
        lane["spans"] = [[name, round(begin - shift, 6), round(length, 6)] for name, begin, length in lane["spans"]]
    metrics = next((record for record in records if record["step"] == chosen), {})
    timings = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    return {
        "step": chosen,
        "steps": steps[-1000:],
        "lanes": lanes,
        "omitted": len(rows[MAX_ROWS:]),
        "training": {name: value for name, value in timings.items() if is_number(value)},
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
    branches = [(each.title, read_run(each.folder).branch) for each in (run, other) if is_run(each.folder)]
    left, right = _last_rows(run.index), _last_rows(other.index)
    prompts = [_pair(left[prompt], right[prompt]) for prompt in left.keys() & right.keys()]
    prompts.sort(
        key=lambda pair: (-abs((pair["right"]["mean"] or 0.0) - (pair["left"]["mean"] or 0.0)), pair["left"]["place"])
    )
    return {
        "titles": [run.title, other.title],
        "branches": [f"{title} is a branch of {branch}" for title, branch in branches if branch],
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
            "mean": fmean(scores) if scores else None,
        }

    return {"left": side(left), "right": side(right), "prompt": left[0].question}
