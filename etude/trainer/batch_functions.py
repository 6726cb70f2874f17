"""What a training step computes on its batch between rollouts and updates, without a model: module-level functions of
batches and plain options, run in the process that holds the batch (`WorkerGroups.run`): this one, or with Ray a worker.

Invariant: the driver only needs what these return: uids, numbers, metrics. Columns stay with the batch, so the data sent to
the driver per step grows with rows, not with tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from etude.algorithms import ADVANTAGE_ESTIMATORS, adapt_kl_coef, apply_kl_penalty, distill
from etude.distributed import BatchRef, reads
from etude.options import TrainOptions
from etude.protocol import DataProto
from etude.trainer.columns import DERIVED
from etude.trainer.group_filter import equal_group_metrics
from etude.trainer.metrics import DATA_COLUMNS, Metrics, data_metrics
from etude.trainer.rollouts import (
    MAIN_SEQUENCE,
    ROLE,
    Batch,
    main_rows,
    part_totals,
    parts_of,
    rollouts_of,
)
from etude.trainer.sequences import sequence_advantages, sequence_scores
from etude.trajectory import role_name


def advantage_columns(options: TrainOptions) -> frozenset[str]:
    """The columns that `compute_advantages` reads; rollouts only if the estimator needs something derived from them."""
    needs = frozenset(ADVANTAGE_ESTIMATORS.get(options.algorithm.adv_estimator).needs)
    read = {"token_level_scores", "response_mask", "uid", MAIN_SEQUENCE, ROLE, *needs}
    if "role_baselines" in needs:
        read.add("data_source")
    if needs & DERIVED:
        read.add("rollout")
    if options.algorithm.use_kl_in_reward:
        read |= {"old_log_probs", "ref_log_prob"}
    if options.value_head:
        read.add("values")
    if options.distillation.teachers:
        read |= {"teacher_log_probs", "old_log_probs"}
    return frozenset(read)


def compute_advantages(
    batch: DataProto, options: TrainOptions, kl_coef: float, role_means: Mapping[str, float]
) -> tuple[DataProto, float, dict[str, float], Metrics]:
    """Computes advantages from rewards: the KL penalty in the reward, the estimator, and the distillation term. Group
    baselines are over all rollouts that can be trained on. meta_info needs `episodes`.

    Args:
        kl_coef: the current coefficient of the KL penalty in the reward.
        role_means: the running means of roles' rewards.

    Returns:
        The columns `token_level_rewards`, `advantages` and `returns` (rows, response_len), the first two float64, with a
        critic on the actor's trunk also `old_values` and `value_targets`; coefficient and running means of the next step;
        and the metrics of roles, the KL penalty and distillation, if any.
    """
    columns, algorithm, distillation = batch.batch, options.algorithm, options.distillation
    rewards, metrics, next_coef = sequence_scores(batch, episodes=batch.meta_info["episodes"]), Metrics(), kl_coef
    if algorithm.use_kl_in_reward:
        old, ref = columns["old_log_probs"], columns["ref_log_prob"]
        rewards, distance = apply_kl_penalty(
            rewards, old, ref, columns["response_mask"], kind=algorithm.kl_penalty, kl_coef=kl_coef
        )
        metrics = {"actor/reward_kl_penalty": distance, "actor/reward_kl_penalty_coeff": kl_coef}
        control = algorithm.kl_ctrl
        if control.type == "adaptive":
            rollouts = int(main_rows(batch).sum())
            next_coef = adapt_kl_coef(kl_coef, distance, rollouts, target_kl=control.target_kl, horizon=control.horizon)
    means = dict(role_means)
    advantages, returns = sequence_advantages(
        algorithm.adv_estimator, batch, rewards, means=means, **algorithm.estimator_options()
    )
    metrics |= role_metrics(batch, advantages, means)
    found = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
    if options.value_head:  # the actor's update also trains the values
        found |= {"old_values": columns["values"], "value_targets": returns}
    if distillation.teachers:
        found["advantages"], of_teachers = distill(
            advantages,
            teacher_log_probs=columns["teacher_log_probs"],
            old_log_probs=columns["old_log_probs"],
            response_mask=columns["response_mask"],
            coef=0.0 if distillation.topk else distillation.coef,
            task_coef=distillation.task_coef,
        )
        metrics |= of_teachers
    return DataProto.from_single_dict(found), next_coef, means, metrics


def role_metrics(batch: DataProto, advantages: torch.Tensor, means: Mapping[str, float]) -> Metrics:
    """Of each role's name: `role/NAME/score/mean`, over its parts, before any penalty; `role/NAME/advantages/mean`, over
    its sampled tokens; and the `baseline` after the step, over data sources, where there are running means."""
    if ROLE not in batch.non_tensor_batch:
        return {}
    parts, mask, metrics = parts_of(batch), batch.batch["response_mask"] > 0, Metrics()
    names = [role_name(role) for role in parts.roles]
    totals = part_totals(batch, parts)
    for name in dict.fromkeys(names):
        own = torch.tensor([each == name for each in names])
        called = f"role/{name or 'none'}"
        metrics[f"{called}/score/mean"] = float(totals[own].mean())
        metrics[f"{called}/advantages/mean"] = float(advantages[mask & own[parts.number][:, None]].double().mean())
        if known := [mean for key, mean in means.items() if key.rpartition("/")[2] == name]:
            metrics[f"{called}/baseline"] = sum(known) / len(known)
    return metrics


@reads("rollout_log_probs")
def engine_log_probs(batch: DataProto) -> DataProto:
    """Returns the engine's log-probs as `old_log_probs`."""
    return DataProto.from_single_dict({"old_log_probs": batch.batch["rollout_log_probs"]})


@reads("response_mask")
def number_rows(batch: DataProto) -> DataProto:
    """Returns the column `row`; updates record their per-token values under this number."""
    return DataProto.from_single_dict({"row": torch.arange(len(batch))})


@reads(*DATA_COLUMNS)
def measure_batch(batch: DataProto, max_response: int, longest: int | None) -> tuple[Metrics, tuple[int, int]]:
    """Returns `data_metrics` and `equal_group_metrics`, and the batch's numbers of tokens: prompts plus responses, and
    responses alone."""
    mask, width = batch.batch["attention_mask"], batch.batch["response_mask"].shape[-1]
    tokens = int(mask.sum()), int(mask[:, mask.shape[-1] - width :].sum())
    return equal_group_metrics(batch) | data_metrics(batch, max_response, longest), tokens


@reads("rollout")
def measure_staleness(batch: DataProto, version: int) -> Metrics:
    """Staleness of the sampled tokens: by how many steps the weights that sampled them were older than `version`, the
    engine's newest. `staleness/{mean,max}`, and `staleness/share/N`, the share of tokens that are N steps old. Tokens
    without a reported weight version are left out."""
    segments = [segment for rollout in rollouts_of(batch) for each in rollout.sequences for segment in each.segments]
    ages = Counter(version - drawn for segment in segments for drawn in segment.weight_versions or ())
    if not (tokens := ages.total()):
        return {}
    metrics: Metrics = {f"staleness/share/{age}": count / tokens for age, count in sorted(ages.items())}
    mean = sum(age * count for age, count in ages.items()) / tokens
    return metrics | {"staleness/mean": mean, "staleness/max": float(max(ages))}


@reads("response_mask", MAIN_SEQUENCE)
def count_rollouts(batch: DataProto) -> int:
    """Returns the number of rollouts in a batch of sequences."""
    return int(main_rows(batch).sum()) if len(batch) else 0


def uids_of(batch: Batch) -> set[str]:
    """Returns the uids of the prompts that have rows in the batch; for a reference, without fetching it."""
    if isinstance(batch, BatchRef):
        return set(batch.ids.tolist())
    return set(batch.non_tensor_batch["uid"].tolist()) if len(batch) else set()
