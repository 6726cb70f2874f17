"""From a batch's rewards to its advantages: the KL in the reward, the estimator, and a teacher's part.

Invariant: rewards and advantages are float64 here; baselines are those of all rollouts of the batch that can be trained on.
"""

from __future__ import annotations

from etude.algorithms import adapt_kl_coef, apply_kl_penalty, distill
from etude.protocol import DataProto
from etude.trainer.metrics import Metrics
from etude.trainer.rollouts import main_rows
from etude.trainer.sequences import sequence_advantages, sequence_scores
from etude.trainer.setup import PlainSetup


def add_advantages(batch: DataProto, setup: PlainSetup, kl_coef: float) -> tuple[float, Metrics]:
    """Adds `token_level_rewards`, `advantages` and `returns` (rows, response_len) and, with a critic on the actor's trunk,
    `old_values` and `value_targets`.

    Args:
        kl_coef: the coefficient of the KL in the reward, if there is one.

    Returns:
        The coefficient of the next step, and the metrics of the KL in the reward and of distillation, if any.
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
    if setup.roles.value_head:  # the actor's update learns them, too
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
