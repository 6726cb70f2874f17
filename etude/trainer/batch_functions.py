"""What a training step computes on its batch between rollouts and updates, besides models: functions of a module, of batches
and plain options, which run where the batch is (`Groups.run`): in this process, or on Ray in one that has them.

Invariant: the driver needs of a batch what these return: uids, numbers, metrics. Columns stay with the batch, so that what
crosses to the driver in a step grows with rows, not with tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from etude.agents.batch import OF_SEQUENCES
from etude.distributed import BatchRef
from etude.dumps import TOKEN_VALUES
from etude.options import ActorOptions, CriticOptions
from etude.protocol import DataProto
from etude.trainer.advantages import add_advantages
from etude.trainer.metrics import Metrics, data_metrics, staleness_metrics
from etude.trainer.minibatches import update_batches
from etude.trainer.rollouts import Batch, main_rows, rollouts_of, spread_groups
from etude.trainer.sequences import expand_sequences
from etude.trainer.setup import PlainSetup


def added_sequences(rollouts: DataProto, pad_token_id: int) -> DataProto | None:
    """The expanded batch; None where every rollout is one sequence, so that there is nothing to expand."""
    batch = expand_sequences(rollouts, pad_token_id) if len(rollouts) else rollouts
    return None if batch is rollouts else batch


def engine_log_probs(batch: DataProto) -> DataProto:
    """The engine's log-probs as `old_log_probs`."""
    return DataProto.from_dict({"old_log_probs": batch.batch["rollout_log_probs"]})


def without_log_probs(computed: DataProto) -> DataProto:
    """What a forward pass found beside log-probs, where the engine's stand in for these."""
    return computed.select([name for name in computed.batch.keys() if name != "old_log_probs"])  # noqa: SIM118


def judge_batch(
    batch: DataProto, setup: PlainSetup, kl_coef: float
) -> tuple[DataProto, float, Metrics, tuple[int, int]]:
    """The columns that `add_advantages` adds, the next coefficient of the KL in the reward, the batch's metrics, and its
    numbers of tokens: of prompts and responses, and of responses alone."""
    next_coef, metrics = add_advantages(batch, setup, kl_coef)
    metrics |= data_metrics(batch, setup.data.max_response_length, setup.longest_sequence)
    if setup.trainer.max_staleness:
        main = [rollout for rollout, is_main in zip(rollouts_of(batch), main_rows(batch).tolist()) if is_main]
        metrics |= staleness_metrics(main, batch.meta_info["version"])
    added = ["token_level_rewards", "advantages", "returns"]
    if setup.trainer.rollout_data_dir and setup.trainer.rollout_token_values:
        batch.batch["row"] = torch.arange(len(batch))  # by which updates name what they had of a row's tokens
        added.append("row")
    if setup.roles.value_head:
        added += ["old_values", "value_targets"]
    mask, width = batch.batch["attention_mask"], batch.batch["responses"].shape[-1]
    tokens = int(mask.sum()), int(mask[:, mask.shape[-1] - width :].sum())
    return batch.select(added, [], ["episodes"]), next_coef, metrics, tokens


def choose_groups(batch: DataProto, setup: PlainSetup) -> tuple[list[int], Metrics]:
    """The rows of at most `train_batch_size` groups whose scores differ; and how many prompts were left out for equal scores
    or as surplus, and how many are missing."""
    groups = len(set(batch.non_tensor_batch["uid"].tolist())) if len(batch) else 0
    spread = spread_groups(batch, setup.algorithm.filter_groups.metric) if groups else []
    name, wanted = "training/filter_groups", setup.data.train_batch_size
    return [row for rows in spread[:wanted] for row in rows], {
        f"{name}/evicted_samples": float(groups - len(spread)),
        f"{name}/discarded_surplus_samples": float(max(len(spread) - wanted, 0)),
        f"{name}/missing_samples": float(max(wanted - len(spread), 0)),
    }


def count_rollouts(batch: DataProto) -> int:
    """Of which a batch has rows."""
    return int(main_rows(batch).sum())


def uids_of(batch: Batch) -> set[str]:
    """Of the prompts that a batch has rows of; a reference knows them."""
    if isinstance(batch, BatchRef):
        return set(batch.ids.tolist())
    return set(batch.non_tensor_batch["uid"].tolist()) if len(batch) else set()


def token_columns(batch: Batch) -> Batch:
    """What a dump takes of a judged batch."""
    wanted = {*TOKEN_VALUES, "row", "uid"}
    if isinstance(batch, BatchRef):
        return batch.select(batch.columns & wanted)
    return batch.select(sorted(wanted & set(batch.batch.keys())), [])


def without_objects(batch: Batch) -> Batch:
    """What updates read: a reference without the objects of rows and rollouts, which cost most to read."""
    if not isinstance(batch, BatchRef):
        return batch
    return batch.select(batch.columns - batch.objects | ({"uid", *OF_SEQUENCES} & batch.columns))


def cut_updates(
    batch: DataProto, options: ActorOptions | CriticOptions, shuffle: bool, seed: int, ranks: int
) -> Iterator[list[DataProto]]:
    """As `update_batches`."""
    return update_batches(batch, options, shuffle=shuffle, seed=seed, ranks=ranks)
