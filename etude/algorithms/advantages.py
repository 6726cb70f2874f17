"""`compute_advantage`, and the outcome estimators: one advantage per rollout, relative to its group.

Invariant: rows whose mask is all zero (padding, dropped trajectories) are excluded from means, standard deviations and group
sizes, and their advantages are 0. Masked tokens (tool output, template glue) have advantage 0. A group with equal scores
(`equal_scores`) has advantage 0, and so has a group of one, unless `singleton_advantage="raw"` gives it its raw score.

GRPO's arithmetic, the group's mean subtracted and the rest divided by its standard deviation, is `centre` in `groups`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from etude.algorithms.groups import EPSILON, GroupIds, centre, compare, group_rows, spread, whiten_masked
from etude.algorithms.records import ADVANTAGE_ESTIMATORS, COLUMNS, RAE_DECAY, Singleton
from etude.errors import ConfigError
from etude.registry import did_you_mean


def compute_advantage(
    name: str,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds | None = None,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns, each (batch, response_len), with the estimator registered as `name`. Computed in
    float64, returned in the dtype of the rewards.

    Args:
        token_level_rewards: (batch, response_len).
        response_mask: (batch, response_len), 1 for sampled tokens.
        index: (batch,) hashable group ids; rows of one prompt share an id.
        values: (batch, response_len), for estimators that need a critic.
        options: the estimator's options, and other columns that it needs.

    Raises:
        ConfigError: the estimator is unknown, or an argument that it needs is missing.
    """
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    given = {"values": values, **options}
    for column in sorted(estimator.needs):
        if given.get(column) is None and estimator.requires(column):
            raise ConfigError(f"algorithm.adv_estimator={name} needs {column}: {COLUMNS[column]}")
    if index is None and estimator.min_group > 1:
        raise ConfigError(f"algorithm.adv_estimator={name} needs group ids")
    given |= {option: value for option, value in (("gamma", gamma), ("lam", lam)) if estimator.reads(option)}
    advantages, returns = estimator(
        token_level_rewards=token_level_rewards.double(),
        response_mask=response_mask,
        index=index,
        **{n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in given.items()},
    )
    kind = token_level_rewards.dtype
    return advantages.to(kind), returns.to(kind)


def _group_estimator(judge: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Turns a function of one group into an estimator. `judge` takes the (n,) total scores of the group's rollouts, their
    (n,) numbers of sampled tokens and the options that it names, and returns (n,) advantages."""
    options = list(inspect.signature(judge).parameters.values())[2:]

    @functools.wraps(judge)
    def estimate(
        *,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: GroupIds,
        singleton_advantage: Singleton = "zero",
        **given: Any,
    ) -> tuple[Tensor, Tensor]:
        lengths = (response_mask > 0).sum(dim=1).double()
        scores = token_level_rewards.sum(dim=1)
        found = compare(
            scores, lengths > 0, index, lambda group, rows: judge(group, lengths[rows], **given), singleton_advantage
        )
        advantages = spread(found, response_mask)
        return advantages, advantages

    common = list(
        inspect.signature(estimate, follow_wrapped=False).parameters.values()
    )  # the record passes the arguments that the signature names
    estimate.__signature__ = inspect.Signature([*common[:-1], *options])  # type: ignore[attr-defined]
    return estimate


@_group_estimator
def grpo(scores: Tensor, lengths: Tensor, *, norm_adv_by_std_in_grpo: bool = True) -> Tensor:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1): (r − mean_g) / (std_g + ε);
    `norm_adv_by_std_in_grpo=False` leaves out the division (Dr. GRPO, arXiv 2503.20783)."""
    return centre(scores, norm_adv_by_std_in_grpo)


@_group_estimator
def grpo_passk(scores: Tensor, lengths: Tensor, *, norm_adv_by_std_in_grpo: bool = True) -> Tensor:
    """Credit for pass@k (arXiv 2503.19595): the best rollout of a group gets its lead over the second best, divided by
    (std_g + ε) with `norm_adv_by_std_in_grpo`; all others get 0."""
    (best, second), places = scores.topk(2)
    lead = (best - second) / (scores.std() + EPSILON if norm_adv_by_std_in_grpo else 1.0)
    return torch.zeros_like(scores).index_put((places[0],), lead)


@_group_estimator
def rloo(scores: Tensor, lengths: Tensor) -> Tensor:
    """REINFORCE leave-one-out (arXiv 2402.14740): r − mean of the group's other rewards = n/(n − 1) · (r − mean_g)."""
    return centre(scores, by_std=False) * len(scores) / (len(scores) - 1)


@_group_estimator
def opo(scores: Tensor, lengths: Tensor) -> Tensor:
    """On-policy optimal baseline (arXiv 2505.23585): r − Σ l r / Σ l over the group, l the number of sampled tokens."""
    return scores - (lengths * scores).sum() / lengths.sum()


@_group_estimator
def max_rl(scores: Tensor, lengths: Tensor) -> Tensor:
    """Maximum-likelihood RL (Tajwar et al. 2026): (r − mean_g) / mean_g; 0 in groups whose mean is at most 1e-6, where it is
    undefined."""
    mean = scores.mean()
    return (scores - mean) / mean if mean > 1e-6 else torch.zeros_like(scores)


def rae(
    *, token_level_rewards: Tensor, response_mask: Tensor, role_baselines: Tensor, decay: float = RAE_DECAY
) -> tuple[Tensor, Tensor]:
    """Role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119): R − b, b the running mean of the rewards of the
    row's role, (batch,), which `running_means` made with `decay`."""
    advantages = spread(token_level_rewards.sum(dim=1) - role_baselines, response_mask)
    return advantages, advantages


def running_means(keys: Sequence[str], scores: Tensor, means: dict[str, float], decay: float) -> Tensor:
    """(rows,) the mean of each row's key before the row; then b ← decay · b + (1 − decay) · R, row by row in order, from 0.
    `means`, by key, are continued and updated: R stays out of its own baseline, as in SPIRAL's code."""
    before = []
    for key, score in zip(keys, scores.tolist(), strict=True):
        before.append(means.setdefault(key, 0.0))
        means[key] = decay * means[key] + (1 - decay) * score
    return torch.tensor(before, dtype=torch.float64)


def gpg(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    f_norm: float = 1.0,
    singleton_advantage: Singleton = "zero",
) -> tuple[Tensor, Tensor]:
    """Group policy gradient (arXiv 2504.02546): α (r − mean_g) / `f_norm`. α = rollouts / rollouts in groups with a non-zero
    advantage, so groups with equal scores do not shrink the step, as in TRL's GPG (verl's α counts non-zero scores)."""
    advantages, _ = grpo(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        singleton_advantage=singleton_advantage,
        norm_adv_by_std_in_grpo=False,
    )
    rows = group_rows(index, (response_mask > 0).any(dim=1))
    teaching = sum(len(members) for members in rows if bool((advantages[members].abs() > 1e-6).any()))
    advantages = advantages * (sum(map(len, rows)) / max(teaching, 1)) / f_norm
    return advantages, advantages


def reinforce_plus_plus_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    singleton_advantage: Singleton = "zero",
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): r − mean_g, whitened over the batch's sampled tokens."""
    advantages, _ = grpo(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        singleton_advantage=singleton_advantage,
        norm_adv_by_std_in_grpo=False,
    )
    advantages = whiten_masked(advantages, _without_singletons(response_mask, index, singleton_advantage))
    return advantages, advantages


def gdpo(
    *,
    response_mask: Tensor,
    index: GroupIds,
    reward_components: Mapping[str, Tensor],
    gdpo_reward_keys: Sequence[str],
    gdpo_reward_weights: Sequence[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    singleton_advantage: Singleton = "zero",
) -> tuple[Tensor, Tensor]:
    """Group reward-decoupled normalisation (arXiv 2601.05242): Σ_k w_k · grpo(r_k) over the components `gdpo_reward_keys`,
    whitened over the batch's sampled tokens, so that no component drowns out another.

    Raises:
        ConfigError: a component is unknown or infinite, or a row lacks it.
    """
    valid = (response_mask > 0).any(dim=1)
    advantages = torch.zeros(len(valid), dtype=torch.float64)
    weights = gdpo_reward_weights or [1.0] * len(gdpo_reward_keys)
    for name, weight in zip(gdpo_reward_keys, weights, strict=True):
        scores = torch.as_tensor(reward_components.get(name, [float("nan")] * len(valid)), dtype=torch.float64)
        if bool(scores[valid].isnan().any()):
            raise ConfigError(
                f"algorithm.gdpo_reward_keys: a rollout was scored without '{name}'"
                f"{did_you_mean(name, reward_components)} (known: {', '.join(sorted(reward_components))}; the scorer "
                "returns them in a dict)"
            )
        if bool(scores[valid].isinf().any()):
            raise ConfigError(
                f"algorithm.gdpo_reward_keys: a rollout's '{name}' is infinite, which would spoil its whole group",
                fix=f"return a finite number as '{name}'",
            )
        advantages += weight * compare(
            scores, valid, index, lambda group, _: centre(group, norm_adv_by_std_in_grpo), singleton_advantage
        )
    found = whiten_masked(advantages[:, None], _without_singletons(response_mask, index, singleton_advantage))
    return found, found


def _without_singletons(response_mask: Tensor, index: GroupIds, singleton: Singleton) -> Tensor:
    """Returns `response_mask` without groups of one whose advantage is 0 by definition."""
    mask = response_mask > 0
    alone = [rows for rows in group_rows(index, mask.any(dim=1)) if len(rows) == 1 and singleton == "zero"]
    return mask.index_fill(0, torch.tensor([row for rows in alone for row in rows], dtype=torch.long), False)
