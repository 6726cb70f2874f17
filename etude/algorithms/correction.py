"""Measures and corrects the mismatch between the policy that sampled (the engine) and the one that is trained.

With μ the engine's probabilities of the sampled tokens and π the trainer's, the log-ratio is log π − log μ. Three
corrections are based on it: importance weights (truncated, or IcePop's), which multiply the loss; rejection, which removes
tokens or sequences from the mask; and the off-policy sequence mask, weights of 0 or 1.

A sequence is all sampled tokens of a rollout if `rollout` says which rows belong together, so that it does not matter how a
rollout is split into rows; otherwise each row is a sequence.

Invariant: values at masked positions have no effect. All tensors are (batch, response_len) unless stated otherwise; results
carry no gradient and are computed in float64; metrics are partial results to be added over ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from etude.algorithms.distillation import ABSENT
from etude.metrics import Max, Mean, Metrics, Pooled

Bounds: TypeAlias = tuple[float, float]

_MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: larger ratios add no information, and squares must not overflow
_MIN_TAIL = 1e-6  # as in the paper: below this, 1 − Σ p in float32 is only rounding
_BINS_PER_DECADE, _SMALLEST, _DECADES = 20, -9, 11  # |Δ log p| from 1e-9 to 100


def rollout_mismatch(log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Metrics:
    """Metrics of the differences between the trainer's and the engine's log-probs of the sampled tokens; none without such
    tokens.

    `training/rollout_probs_diff_{mean,max}`: |π − μ|. Under `rollout_corr/…`, with Δ = log π − log μ, clipped to ±20 before
    exponentiation:

    - `kl`, `k3_kl`: KL(μ ‖ π) per token, as mean −Δ and mean exp(Δ) − 1 − Δ; `chi2_token`: mean exp(2Δ) − 1;
    - `log_prob_diff_max`, `log_prob_diff_p99`: of |Δ|; the second is the upper edge of a bin 12 % wide;
    - `eff_sample_size`: (Σ w)² / (n Σ w²) with w = exp(Δ): the effective sample size after reweighting, as a share of n;
    - means over rows: `training_ppl`, `rollout_ppl` = exp(−mean log p), their ratio `ppl_ratio`, `log_ppl_diff`,
      `log_ppl_abs_diff`, and `chi2_seq`: exp(2 Σ Δ) − 1.
    """
    mask = response_mask > 0
    if not mask.any():
        return {}
    actor, engine = (torch.where(mask, x.detach().double(), 0.0) for x in (log_prob, rollout_log_prob))
    gap = (actor.exp() - engine.exp())[mask].abs()
    delta = (actor - engine)[mask]
    ratio = _exp(delta)
    count = len(delta)
    metrics: Metrics = {
        "training/rollout_probs_diff_mean": Mean(float(gap.sum()), count),
        "training/rollout_probs_diff_max": Max(float(gap.max())),
        "rollout_corr/kl": Mean(float(-delta.sum()), count),
        "rollout_corr/k3_kl": Mean(float((ratio - 1 - delta.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)).sum()), count),
        "rollout_corr/chi2_token": Mean(float((ratio.square() - 1).sum()), count),
        "rollout_corr/log_prob_diff_max": Max(float(delta.abs().max())),
        "rollout_corr/log_prob_diff_p99": Pooled(_histogram(delta.abs()), _p99),
        "rollout_corr/eff_sample_size": Pooled(_moments(ratio), _effective_share),
    }
    rows = mask.any(dim=1)
    lengths = mask.sum(dim=1)[rows]
    ours, theirs = actor.sum(dim=1)[rows], engine.sum(dim=1)[rows]
    for name, values in {
        "training_ppl": _exp(-ours / lengths),
        "rollout_ppl": _exp(-theirs / lengths),
        "ppl_ratio": _exp((theirs - ours) / lengths),
        "log_ppl_diff": (theirs - ours) / lengths,
        "log_ppl_abs_diff": (theirs - ours).abs() / lengths,
        "chi2_seq": _exp(ours - theirs).square() - 1,
    }.items():
        metrics[f"rollout_corr/{name}"] = Mean(float(values.sum()), len(values))
    return metrics


def importance_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    level: str,
    bounds: Bounds | float,
    batch_normalize: bool = False,
    rollout: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Computes the factor of each token's loss, 0 where masked, and the metrics `rollout_corr/rollout_is_*`.

    The weight w is exp(log-ratio) of each token (`level="token"`) or of the sum over its sequence ("sequence"). If `bounds`
    is a number C: truncated importance sampling, min(w, C) (Ionides 2008; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"). If a pair: IcePop (Ring-1T, arXiv 2510.18855), w within [low, high], 0
    outside. Tokens with weight 0 still count in the loss's denominators.

    Args:
        batch_normalize: divides by the batch's mean weight, over its tokens or its sequences.
        rollout: (batch,) index of each row's rollout; see the module's docstring.
    """
    mask = response_mask > 0
    logs = torch.where(mask, log_ratio.detach().double(), 0.0)
    members = _members(mask, rollout)
    if level == "sequence":
        logs = _sequence_sum(logs, members)[:, None].expand_as(logs)
    raw = _exp(logs)
    low, high = bounds if isinstance(bounds, tuple) else (None, bounds)
    outside = raw > high if low is None else (raw > high) | (raw < low)
    kept = raw.clamp(max=high) if low is None else torch.where(outside, 0.0, raw)
    weights = torch.where(mask, kept, 0.0)
    count = float(mask.sum())
    below = raw < (1 / high if low is None else low)
    name = "rollout_corr/rollout_is"
    metrics: Metrics = {
        f"{name}_mean": Mean(float(weights.sum()), count),
        f"{name}_eff_sample_size": Pooled(_moments(weights[mask]), _effective_share),
        f"{name}_ratio_fraction_high": Mean(float((raw > high)[mask].sum()), count),
        f"{name}_ratio_fraction_low": Mean(float(below[mask].sum()), count),
    }
    if count:
        metrics[f"{name}_max"] = Max(float(raw[mask].max()))
    if low is not None:
        metrics[f"{name}_oob_ratio"] = Mean(float(outside[mask].sum()), count)
    if batch_normalize:
        each = _per_sequence(weights.sum(dim=1), mask, members) if level == "sequence" else weights[mask]
        mean = float(each.mean()) if len(each) else 0.0
        metrics[f"{name}_batch_norm_factor"] = Mean(mean if mean > 1e-8 else 1.0, 1)
        weights = weights / mean if mean > 1e-8 else weights
    return weights, metrics


def rejection_mask(
    log_ratio: Tensor, response_mask: Tensor, criteria: Sequence[tuple[str, Bounds]], rollout: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Removes from `response_mask` what fails any criterion. Also returns `rollout_corr/rollout_rs_masked_fraction`, the
    share of removed tokens, and `…_seq_masked_fraction`, the share of sequences that lost any.

    Args:
        criteria: (name, bounds). A name is `token_`, `seq_sum_`, `seq_mean_` or `seq_max_` plus an estimator of KL(μ ‖ π):
            with d = log-ratio, clipped to ±20, k1 is −d, k2 is d²/2, k3 is exp(d) − 1 − d. The bounds are inclusive and
            apply to exp(k1), or to k2 and k3 themselves.
        rollout: (batch,) index of each row's rollout; see the module's docstring.
    """
    mask = response_mask > 0
    ratio = torch.where(mask, log_ratio.detach().double(), 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    estimates = {"k1": -ratio, "k2": ratio.square() / 2, "k3": torch.expm1(ratio) - ratio}
    members = _members(mask, rollout)
    kept = mask
    for name, (low, high) in criteria:
        span, _, kind = name.rpartition("_")
        values = estimates[kind]
        if span == "seq_max":
            values = _sequence_max(values, mask, members)[:, None]
        elif span != "token":
            values = _sequence_sum(values, members)[:, None]
            if span == "seq_mean":
                values = values / _sequence_sum(mask.double(), members).clamp(min=1)[:, None]
        if kind == "k1":
            low, high = math.log(low), math.log(high)
        kept = kept & (values >= low) & (values <= high)
    lost = mask & ~kept
    touched = _per_sequence(lost.sum(dim=1).double(), mask, members, per_token=False) > 0
    return response_mask * kept, {
        "rollout_corr/rollout_rs_masked_fraction": Mean(float(lost.sum()), float(mask.sum())),
        "rollout_corr/rollout_rs_seq_masked_fraction": Mean(float(touched.sum()), len(touched)),
    }


def off_policy_sequence_mask(
    log_prob: Tensor, rollout_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, threshold: float
) -> tuple[Tensor, Metrics]:
    """Returns weights of 0 for tokens with negative advantage in rows whose mean of log μ − log π is above `threshold`, else
    1 (DeepSeek-V3.2, arXiv 2512.02556, section 3.1); and the share of tokens with weight 0."""
    mask = response_mask > 0
    gaps = torch.where(mask, (rollout_log_prob - log_prob).detach().double(), 0.0)
    far = gaps.sum(dim=1) / mask.sum(dim=1).clamp(min=1) > threshold
    dropped = far[:, None] & (advantages < -1e-9) & mask  # rewards at the group's mean have advantage 0 up to rounding
    share = Mean(float(dropped.sum()), float(mask.sum()))
    return (~dropped).double(), {"rollout_corr/off_policy_masked_fraction": share}


def center_scores(
    log_probs: Tensor, head_log_probs: Tensor, response_mask: Tensor, bounds: Bounds | float | None = None
) -> tuple[Tensor, Metrics]:
    """Computes C of score centering (Marek & Ryabinin 2026, arXiv 2609.20807, eq. 6-14, appendix A.3); the loss gets + A C.

    Off-policy, E_q[A ∇ log p] = E_q[A] E_q[∇ log p] + Cov_q(A, ∇ log p), where q is the engine's distribution and p the
    trainer's. The first term draws p towards q whatever is rewarded; ∇ C is E_q[w ∇ log p], so that it vanishes:

        C = Σ_{v ∈ H} sg(q_v w(p_v / q_v) − ρ w(1 / ρ) p_v) log p_v,  ρ = (1 − Σ_H q) / (1 − Σ_H p)

    with the engine's most probable tokens H; outside, q is taken to be ρ p. w is the weight of a token's score in the loss.

    Args:
        log_probs: (batch, response_len, k) of the policy, at the engine's most probable tokens.
        head_log_probs: the same of the engine; `ABSENT` where it has fewer.
        bounds: of w, as in `importance_weights` at the token level; None: w is 1.

    Returns:
        C (batch, response_len), 0 where masked, with a gradient to `log_probs`; and means over the tokens of the head's mass
        under q, `rollout_corr/score_centering_head_mass`, and of the sum of the coefficients' sizes, `…_l1`.
    """
    mask = response_mask > 0
    given = (head_log_probs > ABSENT / 2) & mask[..., None]
    ours, theirs = (torch.where(given, x.detach().double(), -torch.inf) for x in (log_probs, head_log_probs))
    p, q = ours.exp(), theirs.exp()
    q_mass = q.sum(dim=-1)
    tail = (1 - q_mass).clamp(min=_MIN_TAIL) / (1 - p.sum(dim=-1)).clamp(min=_MIN_TAIL)
    scale = tail * _token_weight(1 / tail, bounds)
    weights = _token_weight(_exp(torch.where(given, ours - theirs, 0.0)), bounds)
    factors = torch.where(given, q * weights - scale[..., None] * p, 0.0)
    centred = (factors.to(log_probs.dtype) * torch.where(given, log_probs, 0.0)).sum(dim=-1)
    count, name = float(mask.sum()), "rollout_corr/score_centering"
    return centred, {
        f"{name}_head_mass": Mean(float(q_mass.sum()), count),
        f"{name}_l1": Mean(float(factors.abs().sum()), count),
    }


def _token_weight(ratio: Tensor, bounds: Bounds | float | None) -> Tensor:
    if bounds is None:
        return torch.ones_like(ratio)
    if isinstance(bounds, tuple):
        return torch.where((ratio >= bounds[0]) & (ratio <= bounds[1]), ratio, 0.0)
    return ratio.clamp(max=bounds)


# -- sequences ---------------------------------------------------------------------------------------------------


def _exp(logs: Tensor) -> Tensor:
    return logs.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _members(mask: Tensor, rollout: Tensor | None) -> Tensor:
    """(batch,) index of each row's sequence, from 0."""
    if rollout is None:
        return torch.arange(len(mask), device=mask.device)
    return torch.unique(rollout, return_inverse=True)[1]


def _sequence_sum(values: Tensor, members: Tensor) -> Tensor:
    """(batch,) sum over each row's sequence."""
    return torch.zeros(len(members), dtype=values.dtype).to(values).index_add(0, members, values.sum(dim=1))[members]


def _sequence_max(values: Tensor, mask: Tensor, members: Tensor) -> Tensor:
    """(batch,) maximum over each row's sequence; 0 for an empty one."""
    largest = torch.where(mask, values, -torch.inf).amax(dim=1)
    found = torch.full_like(largest, -torch.inf).scatter_reduce(0, members, largest, "amax")[members]
    return torch.where(found.isinf(), 0.0, found)


def _per_sequence(of_rows: Tensor, mask: Tensor, members: Tensor, *, per_token: bool = True) -> Tensor:
    """(sequences,) for each sequence with a sampled token, the sum of its rows' values, with `per_token` divided by its
    number of tokens."""
    zeros = torch.zeros(int(members.max()) + 1 if len(members) else 0, dtype=torch.float64, device=mask.device)
    tokens = zeros.index_add(0, members, mask.sum(dim=1).double())
    sums = zeros.index_add(0, members, of_rows)[tokens > 0]
    return sums / tokens[tokens > 0] if per_token else sums


# -- pooled metrics ----------------------------------------------------------------------------------------------


def _moments(weights: Tensor) -> tuple[float, ...]:
    return float(len(weights)), float(weights.sum()), float(weights.square().sum())


def _effective_share(moments: tuple[float, ...]) -> float:
    count, total, squares = moments
    return total**2 / (count * squares) if squares else 0.0


def _histogram(sizes: Tensor) -> tuple[float, ...]:
    """Counts `sizes` in logarithmic bins; the first bin starts at 0, the last one is unbounded and also counts NaN."""
    places = (
        ((sizes.nan_to_num(nan=math.inf, posinf=math.inf).log10() - _SMALLEST) * _BINS_PER_DECADE)
        .ceil()
        .clamp(0, _BINS_PER_DECADE * _DECADES)
    )
    return tuple(torch.bincount(places.long(), minlength=_BINS_PER_DECADE * _DECADES + 1).double().tolist())


def _p99(histogram: tuple[float, ...]) -> float:
    """Returns the upper edge of the bin that contains the 99th percentile."""
    wanted, seen = 0.99 * sum(histogram), 0.0
    for place, count in enumerate(histogram):
        seen += count
        if count and seen >= wanted:
            return float(10.0 ** (_SMALLEST + place / _BINS_PER_DECADE))
    return 0.0
