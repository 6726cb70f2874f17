"""Drawing tokens from logits, each row with its own parameters and its own random numbers.

Invariant: the uniform number behind the token at position p of a request depends only on (seed, p), never on which other
rows share the batch, so that a request draws the same tokens from the same logits wherever it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from etude.inference.types import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One float64 in [0, 1) a row, a hash of (seed, position).

    SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"), its state taken from a
    first round over the seed so that neighbouring seeds share no sequence.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64) + _GOLDEN)
        bits = _mix(state + _GOLDEN * (np.asarray(positions, dtype=np.uint64) + np.uint64(1)))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draws one token a row.

    Args:
        logits: (rows, vocabulary), any float type.
        params: one a row.
        positions: how many tokens each row's request has drawn so far.

    Returns:
        token ids (rows,) and their log-probs (rows,) in float32.
    """
    logits = logits.float()
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)
    log_probs = torch.log_softmax(restrict(logits / temperatures[:, None], params), dim=-1)
    # Inverse transform sampling: one uniform a row. float64 keeps the sum's rounding far below any probability.
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    draws = uniforms([p.seed for p in params], positions).to(logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, draws, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    chosen = log_probs.gather(1, tokens[:, None]).squeeze(1)
    greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
        chosen = torch.where(greedy, torch.zeros_like(chosen), chosen)
    return tokens, chosen


def restrict(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sets logits outside each row's top-k and top-p sets to -inf; (rows, vocabulary) in and out.

    Top-k first, then the smallest set of tokens whose probability reaches top_p, the most probable token always in it.
    """
    rows = [i for i, p in enumerate(params) if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1)]
    if not rows:
        return logits
    chosen = logits[rows]
    ordered, order = chosen.sort(dim=-1, descending=True, stable=True)
    width = chosen.shape[1]
    keep_k = torch.tensor([params[i].top_k if params[i].top_k > 0 else width for i in rows], device=logits.device)
    ordered = ordered.masked_fill(torch.arange(width, device=logits.device) >= keep_k[:, None], float("-inf"))
    probs = ordered.double().softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    top_p = torch.tensor([params[i].top_p for i in rows], device=logits.device, dtype=torch.float64)
    outside = before >= top_p[:, None]
    outside[:, 0] = False
    ordered = ordered.masked_fill(outside & (top_p[:, None] < 1), float("-inf"))
    result = logits.clone()
    result[rows] = torch.empty_like(chosen).scatter_(1, order, ordered)
    return result
