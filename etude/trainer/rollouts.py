"""`Rollouts`: turns rows into scored trajectories through the worker groups. Also finds the rows that can be trained on, and
writes the dumps.

Invariant: a trajectory's random numbers are derived from the run's seed, the step and its index in the batch, so a repeated
step draws the same samples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from etude.agents.batch import concat_batches, rows_of
from etude.agents.roles import carriers, have_own_rewards
from etude.chat import ChatTemplate
from etude.checks.findings import place_in
from etude.checks.step_hacks import find_hacks, hack_metrics
from etude.data import RLDataset
from etude.distributed import BatchRef, reads
from etude.dumps import TOKEN_VALUES, rollout_record, sequence_record, write_rollouts
from etude.errors import TrainingStopped
from etude.jsonl import JsonValue, json_line
from etude.metrics import Metrics, add_metrics
from etude.options import RewardOptions, TrainOptions
from etude.protocol import DataProto, object_array
from etude.seeds import batch_seed, group_seed
from etude.trainer.learning_signal import judge_metrics, loss_metrics
from etude.trainer.metrics import (
    DROPPED,
    Timings,
    environment_metrics,
    is_success,
    reward_source_metrics,
    tool_metrics,
    used_tool,
)
from etude.trainer.validation_metrics import Sample, validation_metrics
from etude.trainer.worker_groups import WorkerGroups
from etude.trajectory import Rollout, StopReason, Trajectory, role_name

Batch: TypeAlias = DataProto | BatchRef
MAIN_SEQUENCE = "main_sequence"  # column added when `etude.trainer.sequences` expands a batch
ROLE = "role"  # likewise: the role of each row's sequence, if any has one
_LOOK = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,;:! ]|(?<!\\)\$")
_SPACES = re.compile(r"\s+(?!\d)|(?<!\d)\s+")  # not that of 1 1/2
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,20})(?:\.\d{0,20})?", re.ASCII)


class Rollouts:
    """Rolls out and scores rows, for training and validation."""

    def __init__(self, options: TrainOptions, groups: WorkerGroups) -> None:
        self._options, self.policy, self._reward = options, groups.rollout, groups.reward
        self.run = groups.run

    def training_prompts(self, rows: Sequence[dict[str, Any]], step: int, attempt: int, *, first: int = 0) -> DataProto:
        """Repeats each row `rollout.n` times.

        Args:
            attempt: which batch of the step this is, from 0.
            first: index of the first rollout within that batch.
        """
        n = self._options.rollout.n
        seed = batch_seed(self._options.rollout.seed, step, attempt)
        prompts = rollout_batch(rows, n=n, label=f"{step}.{attempt}", seed=seed, validate=False, first=first)
        prompts.meta_info["step"] = step
        prompts.meta_info["least_group"] = self._options.min_group
        return prompts

    def baseline_prompts(
        self, rows: Sequence[dict[str, Any]], step: int, attempt: int, first: int, group: int = 0
    ) -> DataProto:
        """Prompts for one greedy rollout per row; rollout indices start at `first`, after those trained on. `group`: the
        first row's place in the batch; its environment is that of its other rollouts."""
        seed, label = batch_seed(self._options.rollout.seed, step, attempt), f"{step}.{attempt}-greedy"
        prompts = rollout_batch(rows, n=1, label=label, seed=seed, validate=False, first=first, group=group)
        prompts.meta_info |= {"step": step, "greedy": True}
        return prompts

    def join(self, parts: Sequence[Batch]) -> Batch:
        """Concatenates batches of different widths."""
        filled: list[Any] = [part for part in parts if len(part) or isinstance(part, DataProto)] or list(parts[:1])
        if len(filled) == 1:
            return filled[0]
        whole = BatchRef.concat(filled, concat_batches) if isinstance(filled[0], BatchRef) else concat_batches(filled)
        return self._even(whole)

    def _even(self, batch: Batch) -> Batch:
        """Pads the tensors that several ranks wrote to one width; objects, the trajectories and images, stay where they
        are."""
        tensors = batch.restrict(batch.columns - batch.objects)
        if not isinstance(tensors, BatchRef) or all(len(layout.blocks) == 1 for layout in tensors.layouts):
            return batch
        return batch.restrict(batch.objects).union(self.run(concat_batches, [tensors]))

    def with_baselines(self, batch: Batch, greedy: Batch) -> Batch:
        """Adds the object column `reward_baselines`: the total reward of the prompt's `greedy` rollout, None if that was
        dropped."""
        found = self.run(baseline_column, greedy, self._options.rollout.n, self._options.reward_model)
        return batch.union(found)

    def validation(self, dataset: RLDataset) -> Batch:
        """Rolls out all rows of `dataset`, `val_kwargs.n` times each, in batches of `data.val_batch_size`; seeds do not
        depend on the batch size."""
        size = self._options.data.val_batch_size or len(dataset)
        numbers = range(len(dataset))
        return self.join([self.validate_rows(dataset, numbers[start : start + size]) for start in numbers[::size]])

    def validate_rows(self, dataset: RLDataset, numbers: Sequence[int]) -> Batch:
        """Rolls out the rows with these indices, `val_kwargs.n` times each; results do not depend on the other rows."""
        rollout = self._options.rollout
        n, seed = rollout.val_kwargs.n, batch_seed(rollout.seed, step=0)
        prompts = rollout_batch([dataset[i] for i in numbers], n=n, label="val", seed=seed, validate=True)
        prompts.non_tensor_batch["uid"] = object_array([f"val-{i}" for i in numbers for _ in range(n)])
        prompts.non_tensor_batch["rollout_index"] = object_array([i * n + j for i in numbers for j in range(n)])
        prompts.non_tensor_batch["group_seed"] = object_array([group_seed(seed, i) for i in numbers for _ in range(n)])
        return self.generate(prompts)[0]

    def validate(self, dataset: RLDataset) -> tuple[Batch, dict[str, float]]:
        """Returns the validation rollouts and their metrics, named `val-core/*` and `val/*`."""
        timings = Timings()
        with timings("testing"):
            batch = self.validation(dataset)
        metrics = self.run(metrics_of_validation, batch, self._options.reward_model)
        return batch, metrics | {"timing_s/testing": timings.seconds["testing"]}

    def generate(self, prompts: DataProto) -> tuple[Batch, Metrics]:
        """Rolls out and scores `prompts`; rewards are in `token_level_scores` (batch, response_len). Also returns the
        engine's metrics."""
        rolled: Batch = self.policy.generate_sequences(prompts)
        gathered = rolled.meta_info.pop("metrics", {})  # over ranks: a list per name
        engine = add_metrics(engine_metrics({name: metric}) for name, found in gathered.items() for metric in found)
        return self.score(prompts, rolled), engine

    def score(self, prompts: DataProto, rolled: Batch) -> Batch:
        """Returns `prompts` with their rollouts and rewards, in `token_level_scores` (batch, response_len)."""
        rolled = self._even(rolled)
        asked: Any = self.policy.keep(prompts) if isinstance(rolled, BatchRef) else prompts[:]
        batch: Batch = asked.union(rolled)
        if self._reward is not None:  # lock-step: scores the whole batch after it was rolled out
            scored = self._reward.compute_scores(batch.restrict(batch.objects | {"response_mask"}))
            batch = batch.restrict(batch.columns - {"rollout"}).union(scored)
        batch.meta_info.clear()  # request settings (seed, validate) would differ between batches that are concatenated later
        return batch


# -- functions that run in the process that holds the batches --------------------------------------------------------------


@reads("rollout")
def baseline_column(greedy: DataProto, n: int, reward: RewardOptions) -> DataProto:
    """Returns the column `reward_baselines`: each greedy total, repeated for the row's `n` rollouts."""
    rewards = [None if result.trajectory is None else result.trajectory.rewards for result in rollouts_of(greedy)]
    totals = [each and each.total(reward.tool_reward_weight, reward.score_weight) for each in rewards]
    return DataProto.from_dict(non_tensors={"reward_baselines": [total for total in totals for _ in range(n)]})


@reads("rollout", "data_source", "uid")
def metrics_of_validation(batch: DataProto, reward: RewardOptions) -> dict[str, float]:
    """Validation metrics, named `val-core/*` and `val/*`."""
    columns, results = batch.non_tensor_batch, rollouts_of(batch)
    prompts: dict[str, dict[str, list[Sample | None]]] = defaultdict(lambda: defaultdict(list))
    for source, uid, result in zip(columns["data_source"].tolist(), columns["uid"].tolist(), results):
        prompts[str(source)][str(uid)].append(sample_of(result, reward))
    metrics = validation_metrics({source: list(asked.values()) for source, asked in prompts.items()})
    return metrics | rollout_metrics(results, reward, "val")


def _vote(answer: str | None) -> str | None:
    """The answer as it votes: without spaces and LaTeX that change its look only, so that (1,2) and (1, 2) vote together; a
    number by its value, as 1800, 1,800 and 1800.00 do."""
    if answer is None:
        return None
    bare = _SPACES.sub("", _LOOK.sub("", answer)).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    if not _NUMBER.fullmatch(bare):
        return bare or answer
    value = Decimal(bare.replace(",", ""))
    return "0" if not value else f"{value.normalize():f}"


def sample_of(rollout: Rollout, options: RewardOptions) -> Sample | None:
    """Reads from a rollout what a validation counts; None if it was dropped."""
    if (trajectory := rollout.whole()) is None:
        return None
    weights, info = (options.tool_reward_weight, options.score_weight), trajectory.rewards.score_info
    answer = info.get("pred")
    return Sample(
        score=trajectory.rewards.total(*weights),
        success=float(is_success(trajectory.rewards, *weights)),
        tool_use=float(used_tool(trajectory)),
        answer=_vote(answer if answer is None or isinstance(answer, str) else json_line(answer).decode()),
        answers="pred" in info,
    )


def rollout_metrics(results: Sequence[Rollout], reward: RewardOptions, prefix: str = "") -> dict[str, float]:
    """Counts and means over rollouts of one or several batches. A `prefix` is put before each name, and drops tool
    metrics."""
    trajectories = [whole for result in results if (whole := result.whole()) is not None]
    broken = [call for result in results for call in result.broken_calls]
    metrics = failure_metrics(results)
    if counts := [len(result.sequences) for result in results if result.trajectory is not None]:
        metrics["rollout/sequences/mean"] = float(np.mean(counts))  # 1 if no agent rewrote its history
    metrics |= tool_metrics(trajectories, broken)
    metrics |= reward_source_metrics(trajectories, reward.tool_reward_weight, reward.score_weight)
    metrics |= environment_metrics(trajectories, reward.tool_reward_weight, reward.score_weight)
    metrics |= loss_metrics(results) | judge_metrics(results)
    if not prefix:
        return metrics
    return {f"{prefix}/{name}": value for name, value in metrics.items() if not name.startswith("tool/")}


def rollout_batch(
    rows: Sequence[dict[str, Any]],
    *,
    n: int,
    label: str,
    seed: int,
    validate: bool,
    first: int = 0,
    group: int | None = None,
) -> DataProto:
    """Builds a batch of rows to roll out, each repeated `n` times in a row.

    Adds `uid`, one per prompt; `rollout_index`, counted from `first`: together with `seed` it determines a trajectory's
    random numbers; and `group_seed`, the same for all rollouts of a prompt. `group`: the first prompt's place in the whole
    batch (default: `first // n`). Each key of the rows becomes an object column, None for rows without it.
    """
    group = first // n if group is None else group
    names = dict.fromkeys(name for row in rows for name in row)
    batch = DataProto.from_single_dict({name: [row.get(name) for row in rows] for name in names})
    batch.non_tensor_batch["uid"] = object_array([f"{label}-{first // n + i}" for i in range(len(rows))])
    batch.non_tensor_batch["group_seed"] = object_array([group_seed(seed, group + i) for i in range(len(rows))])
    batch = batch.repeat(n, interleave=True)
    batch.non_tensor_batch["rollout_index"] = object_array(range(first, first + len(batch)))
    batch.meta_info = {"seed": seed, "validate": validate}
    return batch


def engine_metrics(metrics: Metrics) -> Metrics:
    """Prefixes the engine's metrics with `engine/`."""
    return {f"engine/{name}": metric for name, metric in metrics.items()}


def rollouts_of(batch: DataProto) -> list[Rollout]:
    """Returns the rollouts, one per row."""
    return batch.non_tensor_batch["rollout"].tolist()


def sampled_earlier(rollout: Rollout) -> list[Trajectory]:
    """Returns the sequences before the main one that contain sampled tokens."""
    return [sequence for sequence in rollout.earlier if any(sequence.response_mask)]


def failure_metrics(results: Sequence[Rollout]) -> dict[str, float]:
    """Counts of infrastructure failures and, among them, stalls; of rows dropped for these (including those cancelled
    because too few of their group were left) or for an agent's own error; of agents' errors, of rows dropped for a prompt
    that is too long, or for a conversation that the chat template cannot render; and, over the kept rows, of those without
    a sampled token, failed releases of tools, unread calls and unwritable answers."""
    kept = [result.trajectory for result in results if result.trajectory is not None]
    return {
        "rollout/infrastructure_failures": float(sum(r.failures for r in results)),
        "rollout/stalled": float(sum(r.stalls for r in results)),
        "rollout/dropped": float(count_lost(results)),
        "rollout/agent_errors": float(
            sum(StopReason.AGENT_ERROR in (r.dropped, r.trajectory and r.trajectory.stop_reason) for r in results)
        ),
        "rollout/given_up": float(sum(r.dropped is StopReason.CANCELLED for r in results)),
        "rollout/prompt_too_long": float(sum(r.dropped is StopReason.PROMPT_TOO_LONG for r in results)),
        "rollout/nothing_sampled": float(sum(not any(t.response_mask) for t in kept)),
        "rollout/release_failures": float(sum(t.metrics.get("release_failures", 0.0) for t in kept)),
        "rollout/unread_calls": float(sum(t.metrics.get("unread_calls", 0.0) for t in kept)),
        "rollout/unwritable_answers": float(sum(t.metrics.get("unwritable_answers", 0.0) for t in kept)),
        "rollout/context_refused": float(sum(r.dropped is StopReason.CONTEXT_REFUSED for r in results)),
    }


def survivor_rows(batch: DataProto, min_fraction: float) -> list[int]:
    """Indices of rows that can be trained on: not dropped, at least one sampled token in the main sequence, and a baseline
    if the batch has baselines.

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
    """Raises TrainingStopped if failures, of infrastructure or of agents, left less than `min_fraction` of the rollouts."""
    check_dropped(count_lost(results), len(results), min_fraction, first_cause(results))


def count_lost(results: Sequence[Rollout]) -> int:
    """Number of rollouts dropped because infrastructure or an agent failed, not because of the row."""
    return sum(result.dropped in (*DROPPED, StopReason.AGENT_ERROR) for result in results)


def check_dropped(dropped: int, total: int, min_fraction: float, cause: str) -> None:
    """Raises TrainingStopped if `dropped` of `total` trajectories are more than `min_fraction` allows."""
    if total and 1 - dropped / total < min_fraction:
        raise TrainingStopped(
            f"{dropped} of {total} trajectories were dropped after failures of infrastructure or of the agent, more than "
            f"trainer.min_valid_fraction={min_fraction} allows; the first cause: {cause}",
            fix=f"mend {place}; `etude check` tries it before a run" if (place := place_in(cause)) else "",
        )


def first_cause(results: Sequence[Rollout]) -> str:
    """Returns the cause of the first failure; without one why the first was dropped, as "prompt too long", or "none"."""
    dropped = (result.dropped.value.replace("_", " ") for result in results if result.dropped)
    return next((result.cause for result in results if result.cause), next(dropped, "none"))


def main_rows(batch: DataProto) -> torch.Tensor:
    """(rows,) mask of main sequences: one per rollout; all rows of a batch that is not expanded."""
    column = batch.batch.get(MAIN_SEQUENCE, None)
    return torch.ones(len(batch), dtype=torch.bool) if column is None else column.bool()


def rollout_numbers(batch: DataProto) -> torch.Tensor:
    """(rows,) index of the rollout that each row belongs to: a main row starts a new one."""
    return main_rows(batch).long().cumsum(dim=0) - 1


class Parts(NamedTuple):
    """The parts of a batch's rollouts: (rows,) the number of each row's part; for each part its first row, its role, and
    what it is compared by: the prompt's uid and the role's name."""

    number: torch.Tensor
    first: torch.Tensor
    roles: list[str]
    groups: list[Any]


def parts_of(batch: DataProto, *, siblings: bool = False) -> Parts:
    """Finds the parts: one per rollout and role. With `siblings`, NAME/NUMBER is compared within its rollout only."""
    rollouts, uids = rollout_numbers(batch).tolist(), batch.non_tensor_batch["uid"].tolist()
    column = batch.non_tensor_batch.get(ROLE)
    roles = [""] * len(uids) if column is None else column.tolist()
    firsts: dict[tuple[int, str], int] = {}
    for row, key in enumerate(zip(rollouts, roles)):
        firsts.setdefault(key, row)
    numbers = {key: number for number, key in enumerate(firsts)}
    first = list(firsts.values())
    return Parts(
        torch.tensor([numbers[key] for key in zip(rollouts, roles)], dtype=torch.long),
        torch.tensor(first, dtype=torch.long),
        [roles[row] for row in first],
        [
            (uids[row], role_name(roles[row]), *([rollouts[row]] if siblings and "/" in roles[row] else []))
            if roles[row]
            else uids[row]
            for row in first
        ],
    )


def part_totals(batch: DataProto, parts: Parts) -> torch.Tensor:
    """(parts,) float64 sums of the scores over the rows of each part."""
    totals = batch.batch["token_level_scores"].double().sum(dim=1)
    return torch.zeros(len(parts.first), dtype=torch.float64).index_add(0, parts.number, totals)


def role_scores(rollout: Rollout, reward: RewardOptions) -> list[list[float]]:
    """Rewards per response token of each sequence (`Rollout.token_level_scores`); if only the main sequence's role has any,
    its total is also on the last sampled token of each other role."""
    scores = rollout.token_level_scores(reward.tool_reward_weight, reward.score_weight)
    if not have_own_rewards(rollout.earlier):
        main = rollout.sequences[-1]
        last = carriers(rollout.sequences)
        for each, own in zip(rollout.earlier, scores):
            if last.get(each.role) is each:
                own[max(each.turn_ends().values())] += main.rewards.total(
                    reward.tool_reward_weight, reward.score_weight
                )
    return scores


def dump(
    chat: ChatTemplate,
    folder: str | Path,
    step: int,
    batch: DataProto,
    options: RewardOptions,
    values: Sequence[DataProto] = (),
) -> dict[str, float]:
    """Writes every trajectory of the batch to `{folder}/{step}.jsonl`; see `dump_records`. Returns what the sentinel finds
    in them, as metrics."""
    records = dump_records(chat, step, batch, options, values)
    write_rollouts(folder, step, records)
    return hack_metrics(find_hacks(records))


def dump_records(
    chat: ChatTemplate, step: int, batch: DataProto, options: RewardOptions, values: Sequence[DataProto] = ()
) -> list[dict[str, JsonValue]]:
    """Builds the dump records of the batch's trajectories, leaving out dropped ones. `values` adds the trainer's per-token
    values: the judged batch, then what the updates recorded for its rows."""
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


def list_token_values(values: Sequence[DataProto]) -> list[dict[str, list[float | None]]]:
    """For each row of the judged batch, the `TOKEN_VALUES` that the batch or the row's last update have, (response_len,)
    each; None where the batch's `response_mask` is 0."""
    if not values:
        return []
    judged, *updates = values
    masks = judged.batch["response_mask"].tolist()

    def masked(row: int, numbers: list[float]) -> list[float | None]:
        return [number if flag else None for number, flag in zip(numbers, masks[row])]

    columns = {name: judged.batch[name].tolist() for name in TOKEN_VALUES if name in judged.batch}
    found = [{name: masked(row, column[row]) for name, column in columns.items()} for row in range(len(judged))]
    names = ("log_probs", "entropys")
    recorded = [
        each for part in updates for each in zip(*(part.batch[name].tolist() for name in ("update", "row", *names)))
    ]
    for _, row, *numbers in sorted(recorded, key=lambda each: each[0], reverse=True):
        for name, column in zip(names, numbers):
            found[row].setdefault(name, masked(row, column))
    return found


def decode_texts(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Decodes a trajectory's prompt, response and segments, keyed as `rollout_record` expects."""
    return {
        "input": decode(trajectory.prompt_ids),
        "output": decode(trajectory.response_ids),
        "texts": [decode(segment.token_ids) for segment in trajectory.segments],
    }
