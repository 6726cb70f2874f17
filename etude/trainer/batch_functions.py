"""What a training step computes on its batch between rollouts and updates, without a model: module-level functions of
batches and plain options, which run in the process that holds the batch (`Groups.run`): this one, or with Ray a worker.

Invariant: the driver only needs what these return: uids, numbers, metrics. Columns stay with the batch, so the data sent to
the driver per step grows with rows, not with tokens.
"""

from __future__ import annotations

import torch

from etude.algorithms import adapt_kl_coef, apply_kl_penalty, distill
from etude.distributed import BatchRef
from etude.dumps import TOKEN_VALUES
from etude.protocol import DataProto
from etude.trainer.correction import correct_mismatch
from etude.trainer.metrics import Metrics, data_metrics, staleness_metrics
from etude.trainer.rollouts import Batch, main_rows, rollouts_of, spread_groups
from etude.trainer.sequences import sequence_advantages, sequence_scores
from etude.trainer.setup import PlainSetup


def judge_batch(
    batch: DataProto, setup: PlainSetup, kl_coef: float
) -> tuple[DataProto, DataProto | None, float, Metrics, tuple[int, int]]:
    """Turns a step's batch into what the updates train on.

    Returns:
        The rows to train on, with advantages, corrected for the mismatch between engine and trainer; the per-token values
        for a dump, or None; the KL coefficient of the next step; metrics; and the batch's numbers of tokens: prompts plus
        responses, and responses alone.
    """
    metrics, tokens, learned, values = Metrics(), (0, 0), batch, None
    correction, rollouts = setup.algorithm.rollout_correction, 0
    if len(batch):
        if correction.bypass_mode:  # the engine's log-probs stand in for the actor's
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        kl_coef, metrics = add_advantages(batch, setup, kl_coef)
        metrics |= data_metrics(batch, setup.data.max_response_length, setup.longest_sequence)
        main = main_rows(batch)
        rollouts = int(main.sum())
        if setup.trainer.max_staleness:
            kept = [rollout for rollout, is_main in zip(rollouts_of(batch), main.tolist()) if is_main]
            metrics |= staleness_metrics(kept, batch.meta_info["version"])
        mask, width = batch.batch["attention_mask"], batch.batch["responses"].shape[-1]
        tokens = int(mask.sum()), int(mask[:, mask.shape[-1] - width :].sum())
        if setup.trainer.rollout_data_dir and setup.trainer.rollout_token_values:
            batch.batch["row"] = torch.arange(len(batch))  # updates record their per-token values under this number
            values = batch.select(sorted(set(TOKEN_VALUES) & set(batch.batch.keys())), [], [])
    if setup.algorithm.drops_equal_groups:
        rows, chosen = choose_groups(batch, setup)
        metrics |= chosen
        learned = batch.select_idxs(rows) if len(batch) else batch
    learned, corrections = correct_mismatch(learned, correction, bool(setup.estimator.episodes))
    learned = learned.restrict(learned.columns - {"rollout"})  # no update reads the trajectories
    metrics |= corrections
    left = int(main_rows(learned).sum()) if len(learned) else 0
    metrics["training/filter_groups/kept"] = left / max(rollouts, 1)
    return learned, values, kl_coef, metrics, tokens


def add_advantages(batch: DataProto, setup: PlainSetup, kl_coef: float) -> tuple[float, Metrics]:
    """Computes advantages from rewards: the KL penalty in the reward, the estimator, and the distillation term. Adds
    `token_level_rewards`, `advantages` and `returns` (rows, response_len), the first two float64; group baselines are over
    all rollouts that can be trained on. With a critic on the actor's trunk, also adds `old_values` and `value_targets`.

    Args:
        kl_coef: the current coefficient of the KL penalty in the reward.

    Returns:
        The coefficient of the next step, and the metrics of the KL penalty and of distillation, if any.
    """
    columns, algorithm, distillation = batch.batch, setup.algorithm, setup.roles.distillation
    batch.meta_info["episodes"] = bool(setup.estimator.episodes)
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
    columns["token_level_rewards"] = rewards
    columns["advantages"], columns["returns"] = sequence_advantages(
        algorithm.adv_estimator, batch, rewards, **algorithm.estimator_options()
    )
    if setup.roles.value_head:  # the actor's update also trains the values
        columns["old_values"], columns["value_targets"] = columns["values"], columns["returns"]
    if distillation.teachers:
        columns["advantages"], found = distill(
            columns["advantages"],
            teacher_log_probs=columns["teacher_log_probs"],
            old_log_probs=columns["old_log_probs"],
            response_mask=columns["response_mask"],
            coef=0.0 if distillation.topk else distillation.coef,
            task_coef=distillation.task_coef,
        )
        metrics |= found
    return next_coef, metrics


def choose_groups(batch: DataProto, setup: PlainSetup) -> tuple[list[int], Metrics]:
    """Chooses the rows of at most `train_batch_size` groups whose scores differ. The metrics count prompts left out for
    equal scores or as surplus, and prompts missing from a full batch."""
    groups = len(set(batch.non_tensor_batch["uid"].tolist())) if len(batch) else 0
    spread = spread_groups(batch, setup.algorithm.filter_groups.metric) if groups else []
    name, wanted = "training/filter_groups", setup.data.train_batch_size
    return [row for rows in spread[:wanted] for row in rows], {
        f"{name}/evicted_samples": float(groups - len(spread)),
        f"{name}/discarded_surplus_samples": float(max(len(spread) - wanted, 0)),
        f"{name}/missing_samples": float(max(wanted - len(spread), 0)),
    }


def uids_of(batch: Batch) -> set[str]:
    """Returns the uids of the prompts that have rows in the batch; for a reference, without fetching it."""
    if isinstance(batch, BatchRef):
        return set(batch.ids.tolist())
    return set(batch.non_tensor_batch["uid"].tolist()) if len(batch) else set()
