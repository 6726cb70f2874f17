"""`Rollouts`: from rows to scored trajectories through the worker groups, and what follows: survivors, groups whose scores
differ, dumps.

Invariant: a trajectory's random numbers follow from the run's seed, the step and its index in the batch, so that a repeated
step draws the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from etude.agents import token_level_scores
from etude.agents.batch import concat_batches, rows_of
from etude.algorithms import equal_scores
from etude.chat import ChatTemplate
from etude.data import RLDataset
from etude.distributed import BatchRef, WorkerGroup
from etude.dumps import TOKEN_VALUES, rollout_record, sequence_record, write_rollouts
from etude.errors import DataError, TrainingStopped
from etude.jsonl import JsonValue, json_line
from etude.metrics import Metrics, add_metrics, finish_metrics
from etude.options import RewardOptions
from etude.protocol import DataProto, object_array
from etude.seeds import batch_seed
from etude.trainer.estimates import validation_metrics
from etude.trainer.metrics import DROPPED, Timings, reward_source_metrics, tool_metrics
from etude.trainer.setup import RunSetup
from etude.trainer.signal import judge_metrics, loss_metrics
from etude.trajectory import Rollout, StopReason, Trajectory

Batch: TypeAlias = DataProto | BatchRef
MAX_REWARD = 1e30  # larger rewards overflow when squared for a standard deviation
_TOTALS = ("reward", "seq_reward", "seq_final_reward")  # names of a rollout's total reward
MAIN_SEQUENCE = "main_sequence"  # the column of a batch that `etude.trainer.sequences` expanded


class Rollouts:
    """Rolls out rows for training and for validation, and scores them."""

    def __init__(self, setup: RunSetup, policy: WorkerGroup, reward: WorkerGroup | None) -> None:
        """`reward`: None where `policy` scores each trajectory as it ends, or where nothing is scored."""
        self._setup, self._policy, self._reward = setup, policy, reward
        self.run = setup.groups.run

    def training_prompts(self, rows: Sequence[dict[str, Any]], step: int, attempt: int, *, first: int = 0) -> DataProto:
        """Each row `rollout.n` times; `attempt` counts the batches of one step, `first` the rollouts before these."""
        n = self._setup.roles.rollout.n
        seed = batch_seed(self._setup.roles.rollout.seed, step, attempt)
        prompts = rollout_batch(rows, n=n, label=f"{step}.{attempt}", seed=seed, validate=False, first=first)
        prompts.meta_info["step"] = step
        prompts.meta_info["least_group"] = self._setup.min_group
        return prompts

    def baseline_prompts(self, rows: Sequence[dict[str, Any]], step: int, attempt: int, first: int) -> DataProto:
        """Each row once, greedily; numbered from `first`, after the trained ones."""
        seed = batch_seed(self._setup.roles.rollout.seed, step, attempt)
        prompts = rollout_batch(rows, n=1, label=f"{step}.{attempt}-greedy", seed=seed, validate=False, first=first)
        prompts.meta_info |= {"step": step, "greedy": True}
        return prompts

    def join(self, parts: Sequence[Batch]) -> Batch:
        """Batches of different widths as one."""
        filled = [part for part in parts if len(part) or isinstance(part, DataProto)] or list(parts[:1])
        return self.run(concat_batches, filled) if len(filled) > 1 else filled[0]

    def with_baselines(self, batch: Batch, greedy: Batch) -> Batch:
        """`batch` with the object column `reward_baselines`: the total score of the one `greedy` rollout per row, None where
        that was dropped."""
        found = self.run(baseline_column, greedy, self._setup.roles.rollout.n, self._setup.roles.reward)
        return batch.union(found)

    def validation(self, dataset: RLDataset) -> Batch:
        """All rows of `dataset`, `val_kwargs.n` times each, in batches of `data.val_batch_size`; seeds do not depend on the
        batches."""
        size = self._setup.data.val_batch_size or len(dataset)
        numbers = range(len(dataset))
        return self.join([self.validate_rows(dataset, numbers[start : start + size]) for start in numbers[::size]])

    def validate_rows(self, dataset: RLDataset, numbers: Sequence[int]) -> Batch:
        """The rows of these numbers, `val_kwargs.n` times each; the same whatever rows they are rolled out with."""
        rollout = self._setup.roles.rollout
        n, seed = rollout.val_kwargs.n, batch_seed(rollout.seed, step=0)
        prompts = rollout_batch([dataset[i] for i in numbers], n=n, label="val", seed=seed, validate=True)
        prompts.non_tensor_batch["uid"] = object_array([f"val-{i}" for i in numbers for _ in range(n)])
        prompts.non_tensor_batch["rollout_index"] = object_array([i * n + j for i in numbers for j in range(n)])
        return self.generate(prompts)[0]

    def validate(self, dataset: RLDataset) -> tuple[Batch, dict[str, float]]:
        """The validation rollouts and their metrics, named `val-core/*` and `val/*`."""
        timings = Timings()
        with timings("testing"):
            batch = self.validation(dataset)
        metrics = self.run(metrics_of_validation, batch, self._setup.roles.reward)
        return batch, metrics | {"timing_s/testing": timings.seconds["testing"]}

    def generate(self, prompts: DataProto) -> tuple[Batch, Metrics]:
        """Rolls out and scores; rewards are in `token_level_scores` (batch, response_len). Also returns the engine's
        metrics."""
        rolled: Batch = self._policy.generate_sequences(prompts)
        gathered = rolled.meta_info.pop("metrics", {})  # over ranks: a list per name
        engine = add_metrics(engine_metrics({name: metric}) for name, found in gathered.items() for metric in found)
        return self.score(prompts, rolled), engine

    def score(self, prompts: DataProto, rolled: Batch) -> Batch:
        """`prompts` with their rollouts, and the rewards of these in `token_level_scores` (batch, response_len)."""
        scored = None
        if self._reward is not None:  # lock-step: the whole batch first, then its scores
            scored = self._reward.compute_scores(self.run(objects_of, prompts, rolled))
        return self.run(scored_batch, prompts, rolled, scored, self._setup.roles.reward)

    def step_metrics(
        self, made: Sequence[Batch], baselines: Sequence[Batch], engine: Sequence[Metrics]
    ) -> dict[str, float]:
        """The metrics of all rollouts of a training step, and of its greedy ones.

        Raises:
            TrainingStopped: infrastructure failures dropped too large a share of the greedy ones.
        """
        fraction, reward = self._setup.trainer.min_valid_fraction, self._setup.roles.reward
        found: dict[str, float] = self.run(metrics_of_rollouts, list(made), list(baselines), reward, fraction)
        return found | finish_metrics(add_metrics(engine))


# -- what runs where the batches are -------------------------------------------------------------------------------------


def objects_of(prompts: DataProto, rolled: DataProto) -> DataProto:
    """The object columns of both."""
    return prompts.union(rolled).select(batch_keys=())


def scored_batch(prompts: DataProto, rolled: DataProto, scored: DataProto | None, options: RewardOptions) -> DataProto:
    """`prompts` with their rollouts, those of `scored` if given, and `token_level_scores`."""
    batch = prompts.union(rolled)
    if scored is not None:
        batch.non_tensor_batch["rollout"] = scored.non_tensor_batch["rollout"]
    place_scores(batch, options)
    batch.meta_info = {}  # the request's settings (seed, validate) differ between batches that are concatenated later
    return batch


def baseline_column(greedy: DataProto, n: int, reward: RewardOptions) -> DataProto:
    """`reward_baselines` for each row's `n` rollouts."""
    rewards = [None if result.trajectory is None else result.trajectory.rewards for result in rollouts_of(greedy)]
    totals = [each and each.total(reward.tool_reward_weight, reward.score_weight) for each in rewards]
    return DataProto.from_dict(non_tensors={"reward_baselines": [total for total in totals for _ in range(n)]})


def metrics_of_rollouts(
    made: Sequence[DataProto], baselines: Sequence[DataProto], reward: RewardOptions, min_fraction: float
) -> dict[str, float]:
    """Of all rollouts of a step; see `Rollouts.step_metrics`."""
    greedy = [rollout for batch in baselines for rollout in rollouts_of(batch)]
    check_survivors(greedy, min_fraction)
    metrics = rollout_metrics([rollout for batch in made for rollout in rollouts_of(batch)], reward)
    return metrics | (rollout_metrics(greedy, reward, "baseline") if greedy else {})


def metrics_of_validation(batch: DataProto, reward: RewardOptions) -> dict[str, float]:
    """Named `val-core/*` and `val/*`."""
    results = rollouts_of(batch)
    totals = batch.batch["token_level_scores"].sum(dim=1).tolist()
    kept = [result.trajectory for result in results if result.trajectory is not None]
    answers = [None if result.trajectory is None else read_answer(result.trajectory) for result in results]
    metrics = validation_metrics(
        batch.non_tensor_batch["data_source"].tolist(),
        batch.non_tensor_batch["uid"].tolist(),
        [None if result.trajectory is None else total for result, total in zip(results, totals)],
        answers if kept and all(map(has_answer, kept)) else None,
    )
    return metrics | rollout_metrics(results, reward, "val")


def rollout_metrics(results: Sequence[Rollout], reward: RewardOptions, prefix: str = "") -> dict[str, float]:
    """The metrics of rollouts, of one batch or several: counts and means over all. With a `prefix`, tool metrics are left
    out."""
    trajectories = [result.trajectory for result in results if result.trajectory is not None]
    broken = [call for result in results for call in result.broken_calls]
    metrics = failure_metrics(results) | sequence_metrics(results) | tool_metrics(trajectories, broken)
    metrics |= reward_source_metrics(trajectories, reward.tool_reward_weight, reward.score_weight)
    metrics |= loss_metrics(results) | judge_metrics(results)
    if not prefix:
        return metrics
    return {f"{prefix}/{name}": value for name, value in metrics.items() if not name.startswith("tool/")}


def rollout_batch(
    rows: Sequence[dict[str, Any]], *, n: int, label: str, seed: int, validate: bool, first: int = 0
) -> DataProto:
    """Rows to roll out: each repeated `n` times side by side, with `uid` (one per prompt) and `rollout_index`, from `first`:
    what a trajectory's random numbers follow from, beside `seed`. A key of the rows is a column of objects, None in a row
    without it."""
    names = dict.fromkeys(name for row in rows for name in row)
    batch = DataProto.from_single_dict({name: [row.get(name) for row in rows] for name in names})
    batch.non_tensor_batch["uid"] = object_array([f"{label}-{first // n + i}" for i in range(len(rows))])
    batch = batch.repeat(n, interleave=True)
    batch.non_tensor_batch["rollout_index"] = object_array(range(first, first + len(batch)))
    batch.meta_info = {"seed": seed, "validate": validate}
    return batch


def engine_metrics(metrics: Metrics) -> Metrics:
    """An engine's own metrics, under the names that a step's have."""
    return {f"engine/{name}": metric for name, metric in metrics.items()}


def rollouts_of(batch: DataProto) -> list[Rollout]:
    """The rollouts, one per row."""
    return batch.non_tensor_batch["rollout"].tolist()


def trajectories_of(batch: DataProto) -> list[Trajectory]:
    """The trajectories of rows that have one."""
    return [result.trajectory for result in rollouts_of(batch) if result.trajectory is not None]


def sampled_earlier(rollout: Rollout) -> list[Trajectory]:
    """The sequences before the main one in which something was sampled."""
    return [sequence for sequence in rollout.earlier if any(sequence.response_mask)]


def failure_metrics(results: Sequence[Rollout]) -> dict[str, float]:
    """Counts of failures: infrastructure failures, those of them that were stalls, rows dropped for them (including those
    cancelled because too few of their group were left), for a long prompt, or for what the chat template does not write;
    of the others, those without a sampled token, which cannot be learned from, and tools that were not released."""
    kept = [result.trajectory for result in results if result.trajectory is not None]
    return {
        "rollout/infrastructure_failures": float(sum(r.failures for r in results)),
        "rollout/stalled": float(sum(r.stalls for r in results)),
        "rollout/dropped": float(sum(r.dropped in DROPPED for r in results)),
        "rollout/given_up": float(sum(r.dropped is StopReason.CANCELLED for r in results)),
        "rollout/prompt_too_long": float(sum(r.dropped is StopReason.PROMPT_TOO_LONG for r in results)),
        "rollout/nothing_sampled": float(sum(not any(t.response_mask) for t in kept)),
        "rollout/release_failures": float(sum(t.metrics.get("release_failures", 0.0) for t in kept)),
        "rollout/unwritable_answers": float(sum(t.metrics.get("unwritable_answers", 0.0) for t in kept)),
        "rollout/context_refused": float(sum(r.dropped is StopReason.CONTEXT_REFUSED for r in results)),
    }


def sequence_metrics(results: Sequence[Rollout]) -> dict[str, float]:
    """Mean number of sequences per rollout that was not dropped: 1 where no agent rewrote its history."""
    counts = [1 + len(result.earlier) for result in results if result.trajectory is not None]
    return {"rollout/sequences/mean": float(np.mean(counts))} if counts else {}


def survivors(batch: DataProto, min_fraction: float) -> DataProto:
    """The part of `batch` that can be trained on; see `survivor_rows`."""
    return batch.select_idxs(survivor_rows(batch, min_fraction))


def survivor_rows(batch: DataProto, min_fraction: float) -> list[int]:
    """The rows that can be trained on: not dropped, with at least one sampled token in the main sequence, and with a
    baseline where the others have one.

    Raises:
        TrainingStopped: infrastructure failures dropped too large a share.
    """
    results = rollouts_of(batch)
    check_survivors(results, min_fraction)
    usable = batch.batch["response_mask"].any(dim=1)
    usable &= torch.tensor([result.trajectory is not None for result in results])
    if (baselines := batch.non_tensor_batch.get("reward_baselines")) is not None:
        usable &= torch.tensor([baseline is not None for baseline in baselines.tolist()])
    return [row for row, kept in enumerate(usable.tolist()) if kept]


def check_survivors(results: Sequence[Rollout], min_fraction: float) -> None:
    """Raises TrainingStopped if infrastructure failures dropped more than `min_fraction` allows."""
    check_dropped(
        sum(result.dropped in DROPPED for result in results), len(results), min_fraction, first_cause(results)
    )


def check_dropped(dropped: int, total: int, min_fraction: float, cause: str) -> None:
    """The same of a number of trajectories."""
    if total and 1 - dropped / total < min_fraction:
        raise TrainingStopped(
            f"{dropped} of {total} trajectories were dropped after infrastructure failures, more than "
            f"trainer.min_valid_fraction={min_fraction} allows; the first cause: {cause}"
        )


def first_cause(results: Sequence[Rollout]) -> str:
    """The cause of the first infrastructure failure."""
    return next((result.cause for result in results if result.cause), "none")


def place_scores(batch: DataProto, options: RewardOptions) -> None:
    """Adds the column `token_level_scores` (batch, response_len), float64.

    Raises:
        DataError: a reward is not finite, or too large to compute with; names its row.
    """
    width, results = batch.batch["response_mask"].shape[1], rollouts_of(batch)
    scores = token_level_scores(results, width, options.tool_reward_weight, options.score_weight)
    for row, result in enumerate(results):
        if result.trajectory is not None and not bool((scores[row].abs() <= MAX_REWARD).all()):
            columns, rewards = batch.non_tensor_batch, result.trajectory.rewards
            names = {name: columns[name][row] for name in ("data_source", "index", "uid") if name in columns}
            raise DataError(
                f"row {names}: rewards must be finite and at most {MAX_REWARD:g} in size: steps {rewards.steps}, "
                f"final {rewards.final}, score {rewards.score}"
            )
    batch.batch["token_level_scores"] = scores


def main_rows(batch: DataProto) -> torch.Tensor:
    """(rows,) true for the rows of main sequences: one per rollout, and all of a batch that is not expanded."""
    column = batch.batch.get(MAIN_SEQUENCE, None)
    return torch.ones(len(batch), dtype=torch.bool) if column is None else column.bool()


def spread_groups(batch: DataProto, metric: str | None = None) -> list[list[int]]:
    """The rows of groups whose rollouts differ in `metric` (see `filter_groups.metric`), by default in total reward: only
    these teach a group-relative estimator anything.

    Raises:
        DataError: the scorer does not report `metric`; names the row.
    """
    main = main_rows(batch).tolist()
    if metric is None or metric in _TOTALS:
        totals = batch.batch["token_level_scores"].sum(dim=1).tolist()
    else:
        totals = [_reported(result, metric) if is_main else 0.0 for result, is_main in zip(rollouts_of(batch), main)]
    groups: dict[Any, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"].tolist()):
        groups.setdefault(uid, []).append(row)
    scored = [(rows, [totals[row] for row in rows if main[row]]) for rows in groups.values()]
    return [rows for rows, scores in scored if not equal_scores(torch.tensor(scores, dtype=torch.float64))]


def _reported(rollout: Rollout, metric: str) -> float:
    """The scorer's own number of that name."""
    assert rollout.trajectory is not None
    rewards = rollout.trajectory.rewards
    value = rewards.score if metric == "score" else rewards.score_info.get(metric)
    if isinstance(value, bool | int | float):
        return float(value)
    known = ", ".join(["reward", "score"][: 1 + (rewards.score is not None)] + sorted(rewards.score_info))
    raise DataError(
        f"algorithm.filter_groups.metric={metric}: the scorer reports no such number for {rollout.trajectory.request_id} "
        f"(known: {known})"
    )


def has_answer(trajectory: Trajectory) -> bool:
    """Whether the scorer reads answers (`pred`)."""
    return "pred" in trajectory.rewards.score_info


def read_answer(trajectory: Trajectory) -> str | None:
    """The answer that the scorer read, as text; None where it read none."""
    answer = trajectory.rewards.score_info.get("pred")
    return answer if answer is None or isinstance(answer, str) else json_line(answer).decode()


def dump(
    chat: ChatTemplate,
    folder: str | Path,
    step: int,
    batch: DataProto,
    options: RewardOptions,
    values: Sequence[DataProto] = (),
) -> None:
    """Writes every trajectory of the batch to `{folder}/{step}.jsonl`; see `dump_records`."""
    write_rollouts(folder, step, dump_records(chat, step, batch, options, values))


def dump_records(
    chat: ChatTemplate, step: int, batch: DataProto, options: RewardOptions, values: Sequence[DataProto] = ()
) -> list[dict[str, JsonValue]]:
    """The records of the batch's trajectories; those that were dropped have none. With what the trainer had of their tokens:
    `values` are the judged batch, then what updates recorded of its rows."""
    records = []
    decode = chat.tokenizer.decode
    of_rows = iter(list_token_values(values))
    for row, result in zip(rows_of(batch), rollouts_of(batch) if len(batch) else ()):
        trajectory = result.trajectory
        if trajectory is None:
            continue
        row.pop("rollout")
        found = {id(each): next(of_rows, {}) for each in (trajectory, *sampled_earlier(result))}
        earlier = [
            sequence_record(sequence, found.get(id(sequence), {}), **decode_texts(sequence, decode))
            for sequence in result.earlier
        ]
        records.append(
            rollout_record(
                trajectory,
                row | {"attempt": result.attempts - 1},
                step=step,
                score=trajectory.rewards.total(options.tool_reward_weight, options.score_weight),
                reward_weights={"tool": options.tool_reward_weight, "score": options.score_weight},
                earlier=earlier,
                token_values=found[id(trajectory)],
                **decode_texts(trajectory, decode),
            )
        )
    return records


def list_token_values(values: Sequence[DataProto]) -> list[dict[str, list[float]]]:
    """For each row of the judged batch, the columns of `TOKEN_VALUES` that it or the updates have, (response_len,) each."""
    if not values:
        return []
    judged, *updates = values
    columns = {name: judged.batch[name].tolist() for name in TOKEN_VALUES if name in judged.batch}
    found = [{name: column[row] for name, column in columns.items()} for row in range(len(judged))]
    for part in updates:
        for name in ("log_probs", "entropys"):
            for row, numbers in zip(part.batch["row"].tolist(), part.batch[name].tolist()):
                found[row].setdefault(name, numbers)
    return found


def decode_texts(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """The texts of a trajectory, as its record takes them."""
    return {
        "input": decode(trajectory.prompt_ids),
        "output": decode(trajectory.response_ids),
        "texts": [decode(segment.token_ids) for segment in trajectory.segments],
    }
