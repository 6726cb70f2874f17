"""`evaluate`: rolls out and scores validation rows, as a run's validation does; a killed evaluation can be resumed.

Invariant: every trajectory is written to disk before it counts, and the result covers exactly those on disk. While an
evaluation runs, its trajectories are in `{step}.jsonl.part`, appended batch by batch; when complete, the file is renamed to
`{step}.jsonl`. Rows that have all their samples there are not rolled out again; results of another evaluation are never
reused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from etude.chat import ChatTemplate
from etude.checks.setup import warn_of_tools
from etude.data import RLDataset
from etude.dumps import sequences_of, trajectory_from_record
from etude.errors import ConfigError, DataError, EtudeError, one_line
from etude.jsonl import json_line, json_safe, write_atomically, write_json
from etude.options import Options, RewardOptions, TrainOptions
from etude.options.validate import flatten
from etude.protocol import DataProto
from etude.run_folder import METRICS_FILE, cost_of, read_metrics, read_run_record, read_steps, run_lock, run_record
from etude.trainer.events import Event, EventSink, Notice, RolloutProgress, RunEnded, RunStarted, ignore_event
from etude.trainer.learning_signal import JudgeBudget, judge_metrics
from etude.trainer.metrics import CostMeter
from etude.trainer.resume import plain_values, write_config
from etude.trainer.rollouts import (
    Rollouts,
    check_dropped,
    count_lost,
    dump_records,
    first_cause,
    rollouts_of,
    sample_of,
)
from etude.trainer.run_facts import describe_run
from etude.trainer.setup import prepare
from etude.trainer.validation_metrics import Sample, summarize_samples, validation_metrics
from etude.trainer.worker_groups import WorkerGroups
from etude.trajectory import Rollout

logger = logging.getLogger(__name__)

Samples: TypeAlias = dict[str, list[Sample]]
"""By `uid` of the prompt, without dropped samples."""
_NOT_EVALUATED = (
    *("trainer.", "critic.", "algorithm.", "distillation.", "ray."),
    *("actor_rollout_ref.actor.", "actor_rollout_ref.ref."),
    *("data.train", "data.shuffle", "data.sampler.", "data.val_batch_size", "reward_model.budget"),
)


def evaluate(
    options: Options,
    emit: EventSink = ignore_event,
    *,
    output: Path | None = None,
    dump_folder: Path | None = None,
    step: int = 0,
    fresh: bool = False,
) -> dict[str, Any]:
    """Rolls out `data.val_files` with `rollout.val_kwargs` and scores them.

    Args:
        output: a JSON file for the result.
        dump_folder: for the trajectories (`{step}.jsonl`), `run.json` and `config.yaml`. None: a separate folder in
            `trainer.default_local_dir`, named by a digest of model, data and sampling.
        fresh: rolls out everything again, even rows already in `dump_folder`.

    Returns:
        The summary, `sources` (the summary per data source), `metrics` named as in a run's validation (`val-core/*`), and
        `folder`.

    Raises:
        ConfigError, DataError: one line that names the key, file or row, before any model is loaded; for instance if
            `dump_folder` belongs to a training run, or holds trajectories of another evaluation.
        TrainingStopped: infrastructure failures dropped more than `trainer.min_valid_fraction` allows, or judges cost more
            than `reward_model.budget`; the other trajectories are kept on disk.
        EtudeError: no trajectory was left to score.
    """
    setup, groups = prepare(options, trains=False)
    options = setup.options
    with closing(groups):
        dataset = setup.validation_set()
        if dataset is None:
            raise ConfigError("data.val_files is empty: give the rows to evaluate on")
        warn_of_tools(dataset)
        facts = describe_run("eval", plain_values(options))
        identity = _identity(plain_values(options), facts["files"])
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
        folder = dump_folder or Path(options.trainer.default_local_dir) / f"eval-{digest}"
        if (before := read_run_record(folder)) and before.get("kind") != "eval":
            raise ConfigError(
                f"{folder} holds another run, which this would overwrite: give --dump a folder of its own"
            )
        with run_lock(folder):
            journal, n = _Journal(folder, step), options.rollout.val_kwargs.n
            samples = {} if fresh else journal.read(identity, options.reward_model, n)
            missing = [i for i in range(len(dataset)) if f"val-{i}" not in samples]
            if samples:
                told = (len(samples), len(dataset), journal.whole)
                logger.warning("%d of %d prompts have answers of an earlier start (%s); --fresh rolls out all", *told)
            write_config(folder, plain_values(options))
            with run_record(folder, facts), _measured(folder, step, groups, bool(samples)) as (measured, write):
                if missing:
                    journal.begin(samples, identity)
                emit(RunStarted("evaluating", 0, options.trainer))
                try:
                    if missing:
                        emit(Notice(f"loading {options.actor_rollout_ref.model.path}"))
                        groups.rollout.init_model()
                        if groups.reward is not None:
                            groups.reward.init_model()
                        groups.rollout.update_weights(0)
                    overall = _Overall(emit, len(missing) * n)
                    with groups.report_progress(overall):
                        place = (measured, write, journal.part, step, overall)
                        lost, cause = _roll_out(options, groups, dataset, missing, samples, *place)
                finally:
                    emit(RunEnded())
                check_dropped(lost, len(dataset) * n, options.trainer.min_valid_fraction, cause)
                if not any(samples.values()):
                    raise EtudeError(f"all {len(dataset) * n} trajectories were dropped; the first cause: {cause}")
                journal.end()
                sources = {f"val-{i}": str(dataset[i]["data_source"]) for i in range(len(dataset))}
                result = summarize(sources, samples, n) | {"folder": str(folder)}
                measured |= result["metrics"]
    if output is not None:
        write_json(output, json_safe(result))
    return result


@dataclass
class _Overall:
    """Event sink that counts rollouts over all batches, `total` of them."""

    emit: EventSink
    total: int
    _ended: int = 0  # in batches that have
    _shown: int = 0
    _tokens: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RolloutProgress):
            running = event.done if event.done < event.total else 0  # else `end_batch` counts them, or has
            self._shown, self._tokens = max(self._shown, self._ended + running), event.tokens
            event = replace(event, done=self._shown, total=self.total)
        self.emit(event)

    def end_batch(self, rollouts: int) -> None:
        self._ended += rollouts
        self(RolloutProgress(0, rollouts, self._tokens))


def _roll_out(
    options: TrainOptions,
    groups: WorkerGroups,
    dataset: RLDataset,
    rows: Sequence[int],
    samples: Samples,
    measured: dict[str, float],
    write: Callable[[], None],
    file: Path,
    step: int,
    overall: _Overall,
) -> tuple[int, str]:
    """Rolls out the `rows`, a batch at a time, and appends each batch to the `file` before it joins the `samples`; what
    judges used is added to `measured`, which `write` writes with what the batch cost. Returns how many trajectories
    infrastructure failures dropped, and the first cause."""
    lost, cause = 0, "none"
    talks = options.rollout
    size = options.data.val_batch_size or max(talks.max_concurrent_trajectories // talks.val_kwargs.n, 1)
    rollouts, budget = Rollouts(options, groups), JudgeBudget(options.reward_model.budget)
    budget.note(measured)  # by an earlier start
    for start in range(0, len(rows), size):
        budget.check()
        batch = rollouts.validate_rows(dataset, rows[start : start + size])
        place = (str(file), step, batch, options.reward_model)
        batch_samples, dropped, why, judged = groups.run(append_dump, *place, with_chat=True)
        budget.note(judged)
        for name, value in judged.items():
            measured[name] = measured.get(name, 0.0) + value
        write()
        lost, cause = lost + dropped, cause if lost else why
        for uid, sample in batch_samples:
            samples.setdefault(uid, []).append(sample)
        overall.end_batch(len(batch))
    return lost, cause


@contextmanager
def _measured(
    folder: Path, step: int, groups: WorkerGroups, resumed: bool
) -> Iterator[tuple[dict[str, float], Callable[[], None]]]:
    """Yields metrics, and a function that writes them, beside other steps' ones, with what the block cost so far; calls it
    when the block ends, however it does. A `resumed` evaluation begins with the costs of its earlier starts."""
    path, before = folder / METRICS_FILE, dict[str, float]()
    for record in read_metrics(path) if resumed and path.is_file() else ():
        if record["step"] == step:
            before = {name: value for name, value in record.items() if cost_of(name) is not None}
    measured, meter, began = dict(before), CostMeter(groups.usage), time.perf_counter()

    def write() -> None:
        nonlocal began
        last, began = began, time.perf_counter()
        for name, value in (meter.measure() | {"timing_s/testing": began - last}).items():
            measured[name] = measured.get(name, 0.0) + value
        others = [each for each in (read_metrics(path) if path.is_file() else ()) if each["step"] != step]
        with write_atomically(path) as file:
            for record in [*others, {"step": step, **measured}]:
                file.write(json_line(record))

    try:
        yield measured, write
    finally:
        write()


def summarize(sources: Mapping[str, str], samples: Mapping[str, Sequence[Sample]], n: int) -> dict[str, Any]:
    """Returns the overall summary, that of each data source (`sources`), and the `metrics` of a validation.

    Args:
        sources: the data source of each prompt, by uid.
        samples: the samples of each prompt that were not dropped, by uid.
        n: the number of samples requested per prompt.
    """
    asked: dict[str, list[Sample | None]] = {
        uid: [*own, *([None] * (n - len(own)))] for uid in sources for own in [samples.get(uid, ())]
    }
    by_source: dict[str, list[Sequence[Sample | None]]] = defaultdict(list)
    for uid, source in sources.items():
        by_source[source].append(asked[uid])
    each = {source: summarize_samples(own) for source, own in sorted(by_source.items())}
    summary = summarize_samples(list(asked.values()))
    return summary | {"sources": each, "metrics": validation_metrics(by_source)}


def append_dump(
    chat: ChatTemplate, path: str, step: int, batch: DataProto, options: RewardOptions
) -> tuple[list[tuple[str, Sample]], int, str, dict[str, float]]:
    """Appends the batch's trajectories to the file.

    Returns:
        The samples, each with its prompt's `uid`; the number of rollouts that infrastructure failures dropped; the first
        cause; and what judges used.

    Raises:
        EtudeError: the file cannot be written.
    """
    try:
        with open(path, "ab") as file:
            for record in dump_records(chat, step, batch, options):
                file.write(json_line(record))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise EtudeError(f"cannot write {path}: {one_line(error)}; check folder and disk space") from error
    results = rollouts_of(batch)
    pairs = zip(batch.non_tensor_batch["uid"].tolist(), results)
    found = [(str(uid), sample) for uid, each in pairs if (sample := sample_of(each, options)) is not None]
    judged = {f"val/{name}": value for name, value in judge_metrics(results).items()}
    return found, count_lost(results), first_cause(results), judged


class _Journal:
    """The file of an evaluation's trajectories, and next to it the evaluation's identity (configuration and file digests).
    A folder may hold one evaluation per step, each of a different checkpoint."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self.whole = folder / f"{step}.jsonl"
        self.part = folder / f"{step}.jsonl.part"
        self._origin = folder / f"{step}.identity.json"

    def read(self, identity: Mapping[str, Any], options: RewardOptions, n: int) -> Samples:
        """Reads the samples of an earlier, interrupted start, for prompts that have all `n`.

        Raises:
            ConfigError: they belong to another evaluation.
        """
        source = self._source()
        if source is None or not source.stat().st_size:
            return {}
        self._check(identity)
        samples: Samples = defaultdict(list)
        for record in _records(source):
            rollout = Rollout([trajectory_from_record(each) for each in sequences_of(record)])
            if (sample := sample_of(rollout, options)) is not None:
                samples[str(record.get("uid"))].append(sample)
        return {uid: own for uid, own in samples.items() if len(own) == n}

    def begin(self, samples: Samples, identity: Mapping[str, Any]) -> None:
        """Starts the partial file with the records kept from an earlier start."""
        source = self._source()
        with write_atomically(self.part) as file:
            for record in _records(source) if source is not None and samples else ():
                if record.get("uid") in samples:
                    file.write(json_line(record))
        write_json(self._origin, json_safe(identity))

    def end(self) -> None:
        """Renames the partial file, if any: it is complete."""
        if self.part.exists():
            os.replace(self.part, self.whole)

    def _source(self) -> Path | None:
        return next((path for path in (self.part, self.whole) if path.is_file()), None)

    def _check(self, identity: Mapping[str, Any]) -> None:
        advice = "give another --dump, or --fresh to roll out everything again"
        try:
            then = json.loads(self._origin.read_bytes())
            if not all(isinstance(then[part], dict) for part in identity):
                raise DataError(f"{self._origin} is malformed")
        except (DataError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self._folder} holds trajectories of unknown origin ({error}): {advice}") from error
        plain = json.loads(json.dumps(json_safe(identity)))
        changed = [
            key
            for part in plain
            for key in {**then[part], **plain[part]}
            if then[part].get(key) != plain[part].get(key)
        ]
        if changed:
            raise ConfigError(
                f"{self._folder} holds another evaluation, which differs in {', '.join(changed[:5])}: {advice}"
            )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the records of a dump, skipping a truncated last line."""
    return (record for _, record in read_steps(path) if record is not None)


def _identity(config: Mapping[str, Any], files: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns what determines an evaluation's result: configuration keys and file digests."""
    values = {key: value for key, value in flatten(config) if not key.startswith(_NOT_EVALUATED)}
    known = {name: each["sha256"] for name, each in files.items() if each["key"] in values}
    return {"config": values, "files": known}
