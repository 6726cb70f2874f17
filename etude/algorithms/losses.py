"""Policy and value losses as pure functions of log-probs, advantages and values.

Notation: r = π / π_old per token, A the advantage, sg the stop-gradient, T the number of scored tokens of a sequence. A loss
is computed per token and aggregated by `agg_loss`. A sequence-level ratio is repeated on each token of the sequence, so that
every aggregation mode applies, and a rollout's weight does not depend on its number of sequences.

Defaults of options are in the losses' records (`etude.algorithms.records`), the formulas in docs/algorithms.md.

Invariant: no label, log-prob, advantage or value at a masked position affects the loss or its gradient; a loss depends on
other sequences of the mini-batch only through counts and token selections over the whole mini-batch.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from etude.algorithms.aggregation import agg_loss, masked_mean
from etude.algorithms.records import POLICY_LOSSES
from etude.errors import ConfigError

Loss = tuple[Tensor, dict[str, float]]


def policy_loss(
    name: str,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | None = None,
    **options: Any,
) -> Loss:
    """Computes the loss registered as `name`. Tensors are (batch, response_len); returns a scalar and metrics, each a mean
    over the mask. Advantages are cast to the dtype of `log_prob`.

    Args:
        loss_agg_mode: None uses the loss's default mode.
        options: passed to the loss: its own options, the columns that it needs, `rollout_is_weights` (batch, response_len),
            which multiply the loss per token, and arguments of `agg_loss`. A loss that selects tokens over the mini-batch
            selects them here, unless `selected_tokens` is given.

    Raises:
        ConfigError: the loss or aggregation mode is unknown.
    """
    record = POLICY_LOSSES.get(name)
    columns = {"advantages": advantages, "response_mask": response_mask}
    if record.selects is not None and "selected_tokens" not in options:
        options["selected_tokens"] = record.select_tokens(old_log_probs=old_log_prob, **columns, **options)
    found: Loss = record(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        loss_agg_mode=loss_agg_mode or record.loss_agg_mode,
        **columns | {"advantages": advantages.to(log_prob.dtype)},
        **options,
    )
    return found


@dataclass(frozen=True)
class Tokens:
    """Inputs of a formula, (batch, response_len) each, set to 0 at masked positions, so that values there have no effect;
    the log-ratio log r is clipped to ±20."""

    mask: Tensor
    log_prob: Tensor
    old_log_prob: Tensor
    log_ratio: Tensor
    advantages: Tensor


Flags = dict[str, Tensor]


def _loss(formula: Callable[..., tuple[Tensor, Flags]]) -> Callable[..., Loss]:
    """Turns a formula into a policy loss. The formula maps `Tokens` to per-token losses and boolean flags, whose shares
    become metrics. It gets the options that it names, `agg_loss` gets the others; each token's loss is multiplied by
    `rollout_is_weights`, unless the formula takes these itself. Adds the metric `actor/ppo_kl`, the mean of log π_old −
    log π."""
    own = list(inspect.signature(formula).parameters.values())[1:]
    names = {parameter.name for parameter in own}

    @functools.wraps(formula)
    def loss(
        *, old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **options: Any
    ) -> Loss:
        mask = response_mask > 0
        log_prob, old_log_prob, advantages = (torch.where(mask, x, 0.0) for x in (log_prob, old_log_prob, advantages))
        log_ratio = (log_prob - old_log_prob).clamp(-20.0, 20.0)
        given = {name: options.pop(name) for name in names & options.keys()}
        losses, flags = formula(Tokens(mask, log_prob, old_log_prob, log_ratio, advantages), **given)
        if (weights := options.pop("rollout_is_weights", None)) is not None:
            losses = losses * torch.where(mask, weights, 0.0)
        with torch.no_grad():
            means = {f"actor/{name}": masked_mean(flag.double(), mask) for name, flag in flags.items()}
            means["actor/ppo_kl"] = masked_mean(-log_ratio, mask)
            metrics = dict(zip(means, torch.stack([mean.double() for mean in means.values()]).tolist()))  # one wait
        return agg_loss(losses, mask, **options), metrics

    common = list(
        inspect.signature(loss, follow_wrapped=False).parameters.values()
    )  # the record passes the arguments that the signature names
    loss.__signature__ = inspect.Signature([*common[:-1], *own, common[-1]])  # type: ignore[attr-defined]
    return loss


# -- clipped ratios ----------------------------------------------------------------------------------------------------


@_loss
def vanilla(t: Tokens, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> tuple[Tensor, Flags]:
    """max(−r A, −clip(r, 1 − ε_low, 1 + ε_high) A): PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds
    (DAPO, arXiv 2503.14476) and, for negative advantages, at most −c A, the dual clip (arXiv 1912.09729).

    Raises:
        ConfigError: `clip_ratio_c` is not greater than 1: it would cut off the gradient even at r = 1.
    """
    if clip_ratio_c <= 1:
        raise ConfigError(f"actor.clip_ratio_c must be greater than 1, not {clip_ratio_c}")
    pessimistic, is_clipped = _clip(t.log_ratio.exp(), t.advantages, clip_ratio_low, clip_ratio_high)
    dual = torch.minimum(pessimistic, -t.advantages * clip_ratio_c)
    is_bounded = (dual < pessimistic) & (t.advantages < 0)
    losses = torch.where(t.advantages < 0, dual, pessimistic)
    return losses, {"pg_clipfrac": is_clipped, "pg_clipfrac_lower": is_bounded}


@_loss
def gspo(t: Tokens, *, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, Flags]:
    """max(−s A, −clip(s, 1 − ε_low, 1 + ε_high) A) with the sequence's ratio s = exp(mean_t log r) (GSPO, arXiv 2507.18071,
    eq. 5; with per-token gradients, GSPO-token). Averaged over the sequence it is GSPO, summed LUSPO (arXiv 2602.05261)."""
    sequence = _sequence_mean(t.log_ratio, t.mask).detach()
    ratio = (t.log_prob - t.log_prob.detach() + sequence).clamp(max=10.0).exp()
    losses, is_clipped = _clip(ratio, t.advantages, clip_ratio_low, clip_ratio_high)
    return losses, {"pg_clipfrac": is_clipped}


@_loss
def geo_mean(t: Tokens, *, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, Flags]:
    """−A (Π_t r'_t)^(1/T), the geometric mean of the sequence's ratios, each clipped to [e^−ε_low, e^ε_high] where that
    lowers the objective (GMPO, arXiv 2507.20673)."""
    sign, bounded = t.advantages.sign(), t.log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    pessimistic = sign * torch.minimum(sign * t.log_ratio, sign * bounded)
    is_clipped = t.log_ratio != bounded
    flags = {"pg_clipfrac": is_clipped & (t.advantages > 0), "pg_clipfrac_lower": is_clipped & (t.advantages < 0)}
    return -t.advantages * _sequence_mean(pessimistic, t.mask).exp(), flags


# -- weighted log-probs ------------------------------------------------------------------------------------------------


@_loss
def reinforce(t: Tokens) -> tuple[Tensor, Flags]:
    """−A log π (Williams, 1992; with the estimator `gpg`, GPG, arXiv 2504.02546)."""
    return -t.advantages * t.log_prob, {}


@_loss
def cispo(t: Tokens, *, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, Flags]:
    """−sg(clip(r, 1 − ε_low, 1 + ε_high)) A log π: clips the weight, so every token keeps its gradient (CISPO, arXiv
    2506.13585)."""
    ratio = t.log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return -weight * t.advantages * t.log_prob, {"pg_clipfrac": weight != ratio}


@_loss
def dppo_tv(t: Tokens, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> tuple[Tensor, Flags]:
    """−A sg(min(r, c)) log π, masking tokens whose probability has already moved further than δ in the advantage's
    direction: π − π_old > δ_high for A > 0, < −δ_low otherwise (DPPO with total variation, arXiv 2602.04879)."""
    moved = t.log_prob.detach().exp() - t.old_log_prob.exp()
    return _divergence_bounded(t, moved > clip_ratio_high, moved < -clip_ratio_low, clip_ratio_c)


@_loss
def dppo_kl(t: Tokens, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> tuple[Tensor, Flags]:
    """As `dppo_tv`, with the divergence KL(Bernoulli(π_old) ‖ Bernoulli(π)) of sampling the token or not (arXiv
    2602.04879)."""
    new, old = t.log_prob.detach().exp(), t.old_log_prob.exp()
    others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    divergence = -old * t.log_ratio.detach() + (1 - old) * others
    up, down = (new > old) & (divergence > clip_ratio_high), (new < old) & (divergence > clip_ratio_low)
    return _divergence_bounded(t, up, down, clip_ratio_c)


def _divergence_bounded(t: Tokens, up: Tensor, down: Tensor, clip_ratio_c: float) -> tuple[Tensor, Flags]:
    """Masks tokens that moved too far; `up`, `down`: where the probability moved too far in that direction."""
    is_far, ratio = torch.where(t.advantages > 0, up, down), t.log_ratio.detach().exp()
    losses = torch.where(is_far, 0.0, -t.advantages * ratio.clamp(max=clip_ratio_c) * t.log_prob)
    return losses, {"pg_clipfrac": is_far, "pg_clipfrac_lower": ~is_far & (ratio > clip_ratio_c)}


@_loss
def vespo(
    t: Tokens,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Flags]:
    """−sg(φ(W)) A log π with φ = e^λ W^k e^(−λ W) of the sequence's ratio W = Π_t r_t (times the product of token-level
    `rollout_is_weights`), k and λ by the advantage's sign (VESPO, arXiv 2602.10693). A weight of 0 excludes its token from
    the loss and from the product."""
    factors, counts = t.log_ratio.detach(), t.mask
    if rollout_is_weights is not None:
        counts = counts & (rollout_is_weights > 0)
        factors = torch.where(counts, factors + rollout_is_weights.log(), 0.0)
    log_weight = factors.sum(dim=-1, keepdim=True).clamp(math.log(1e-8), 20.0)
    up = t.advantages >= 0
    k, decay = _by_sign(up, t.advantages, k_pos, k_neg), _by_sign(up, t.advantages, lambda_pos, lambda_neg)
    phi = (decay + k * log_weight - decay * log_weight.exp()).exp()
    return torch.where(counts, -phi * t.advantages * t.log_prob, 0.0), {}


# -- soft bounds -------------------------------------------------------------------------------------------------------


@_loss
def sapo(t: Tokens, *, tau_pos: float, tau_neg: float) -> tuple[Tensor, Flags]:
    """−A σ(τ (r − 1)) · 4 / τ, τ = τ_pos for A > 0, else τ_neg (SAPO, arXiv 2511.20347)."""
    tau = _by_sign(t.advantages > 0, t.advantages, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (t.log_ratio.exp() - 1)) * 4 / tau
    return -t.advantages * gate, {}


@_loss
def dro(t: Tokens, *, dro_beta: float) -> tuple[Tensor, Flags]:
    """−(A log π − β/2 (log r)²), the policy loss of DRO (arXiv 2405.19107)."""
    return 0.5 * dro_beta * t.log_ratio.square() - t.advantages * t.log_prob, {}


# -- tokens selected by their covariance (arXiv 2505.22617) ------------------------------------------------------------


@_loss
def clip_cov(
    t: Tokens, *, selected_tokens: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, Flags]:
    """Clip-Cov: PPO's clipped surrogate without the tokens that `select_clip_cov` selects."""
    losses, _ = _clip(t.log_ratio.exp(), t.advantages, clip_ratio_low, clip_ratio_high)
    left_out = selected_tokens > 0
    return torch.where(left_out, 0.0, losses), {"pg_clipfrac": left_out}


def select_clip_cov(
    *,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Tensor:
    """(batch, response_len) mask: selects the share `clip_cov_ratio` of all scored tokens, at least one, among those whose
    covariance lies between the bounds. The paper draws them at random; here they are spaced evenly over the sorted
    candidates."""
    covariance, mask = _covariance(old_log_probs, advantages, response_mask), response_mask > 0
    is_candidate = mask & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    candidates = _by_covariance(covariance, is_candidate)
    count = min(max(int(clip_cov_ratio * int(mask.sum())), 1), len(candidates))
    places = (torch.arange(count, dtype=torch.float64) + 0.5) * (len(candidates) / max(count, 1))
    return _mask_of(mask, candidates[places.long()])


@_loss
def kl_cov(t: Tokens, *, selected_tokens: Tensor, ppo_kl_coef: float) -> tuple[Tensor, Flags]:
    """KL-Cov: −r A, plus β |log r| on the tokens that `select_kl_cov` selects; no penalty where r is 1 up to rounding,
    because there the sign of log r is noise."""
    distance = t.log_ratio.abs()
    penalised = (selected_tokens > 0) & (distance > 1e-4)
    return -t.advantages * t.log_ratio.exp() + torch.where(penalised, ppo_kl_coef * distance, 0.0), {}


def select_kl_cov(*, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, kl_cov_ratio: float) -> Tensor:
    """(batch, response_len) mask: selects the share `kl_cov_ratio` of all scored tokens, at least one, with the largest
    covariance."""
    mask = response_mask > 0
    ordered = _by_covariance(_covariance(old_log_probs, advantages, response_mask), mask)
    return _mask_of(mask, ordered[: max(int(kl_cov_ratio * len(ordered)), 1)])


def _covariance(old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(A − mean A) (log π_old − mean log π_old), with means over all scored tokens, in float64. The paper uses the policy's
    current log-probs; the old ones are known before the mini-batch is split."""
    mask = response_mask > 0
    centred = [torch.where(mask, x.double() - masked_mean(x.double(), mask), 0.0) for x in (old_log_probs, advantages)]
    return centred[0] * centred[1]


def _by_covariance(covariance: Tensor, chosen: Tensor) -> Tensor:
    """Flat indices of the `chosen` tokens, largest covariance first. Tokens with equal contexts and advantages are equal up
    to rounding, which depends on how log-probs were batched: such ties keep their order."""
    places = chosen.flatten().nonzero().squeeze(1)
    return places[covariance.flatten()[places].round(decimals=6).argsort(descending=True, stable=True)]


def _mask_of(mask: Tensor, places: Tensor) -> Tensor:
    selected = torch.zeros(mask.numel(), dtype=torch.long, device=mask.device)
    selected[places] = 1
    return selected.view_as(mask)


# -- shared helpers and the value loss ---------------------------------------------------------------------------------


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(batch, 1) mean over the scored tokens of each row; `values` must be 0 elsewhere."""
    return values.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def _by_sign(up: Tensor, advantages: Tensor, positive: float, negative: float) -> Tensor:
    """`positive` where `up`, else `negative`, in the dtype of `advantages` (`torch.where` of two numbers gives float32)."""
    return torch.full_like(advantages, negative).masked_fill(up, positive)


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Returns max(−ratio A, −clip(ratio) A), and where the clipped term is the larger one."""
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def value_loss(
    *,
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    **scaling: Any,
) -> Loss:
    """Aggregates 0.5 · max((v − R)², (clip(v, v_old ± c) − R)²), the clipped value loss of PPO implementations (Huang et
    al., "The 37 implementation details of PPO", 2022). Tensors are (batch, response_len)."""
    mask = response_mask.bool()
    vpreds, values, returns = (torch.where(mask, x.to(vpreds.dtype), 0.0) for x in (vpreds, values, returns))
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain, bounded = (vpreds - returns).square(), (clipped - returns).square()
    loss = 0.5 * agg_loss(torch.maximum(plain, bounded), response_mask, loss_agg_mode, **scaling)
    with torch.no_grad():
        metrics = {
            "critic/vf_clipfrac": float(masked_mean((bounded > plain).double(), mask)),
            "critic/vpred_mean": float(masked_mean(vpreds, mask)),
        }
    return loss, metrics
