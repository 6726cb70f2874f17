"""Sampling of tokens from logits: grammar masks, temperature, top-k, top-p, with parameters and random numbers per row.

Invariant: the random number for the token at position p of a request depends only on (seed, p), never on the other rows of
the batch, so a request samples the same tokens from the same logits wherever it runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.inference.types import SamplingParams
from etude.trajectory import Head, Kept

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1)  # set bits of each byte
_BLOCK = 256  # tokens
_FIRST_CANDIDATES = 64  # a nucleus (top-p set) is rarely larger; if it is, four times as many candidates are tried


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Returns one float64 in [0, 1) per row, a hash of (seed, position).

    SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"). The seed goes through one
    round first to give the state, so that neighbouring seeds do not share a sequence.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64) + _GOLDEN)
        bits = _mix(state + _GOLDEN * (np.asarray(positions, dtype=np.uint64) + np.uint64(1)))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], masks: Sequence[bytes | None] = ()
) -> tuple[Tensor, Tensor, list[Kept | None]]:
    """Samples one token per row.

    Args:
        logits: (rows, vocabulary), any float type.
        params: one per row.
        positions: how many tokens each row's request has sampled so far.
        masks: per row the ids that its grammar allows, a bit each, the lowest of a byte first; None for all.

    Returns:
        token ids (rows,), their log-probs (rows,) in float32, and per row the ids that the mask, top-k and top-p kept; None
        for rows with none of these, and for greedy rows. With `top_logprobs`, a `Head` that has these.
    """
    logits = _apply_masks(logits.float(), masks)
    greedy = [p.temperature == 0 for p in params]
    if all(greedy):
        return logits.argmax(dim=-1), logits.new_zeros(len(logits)), [None] * len(logits)
    if any(p.temperature not in (0, 1) for p in params):
        logits = logits / torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)[:, None]
    restricted = restrict(logits, params)
    draws = uniforms([p.seed for p in params], positions).to(logits.device)
    tokens, chosen = _draw(restricted, draws)
    if any(greedy):
        point = torch.tensor(greedy, device=logits.device)
        tokens = torch.where(point, logits.argmax(dim=-1), tokens)
        chosen = torch.where(point, torch.zeros_like(chosen), chosen)
    kept = _kept_ids(restricted, params, masks)
    if rows := [i for i, each in enumerate(params) if each.top_logprobs and each.temperature]:
        heads = _heads(restricted[rows], [params[i].top_logprobs for i in rows], [kept[i] for i in rows])
        for row, head in zip(rows, heads):
            kept[row] = head
    return tokens, chosen, kept


def _heads(logits: Tensor, sizes: Sequence[int], kept: Sequence[Any]) -> list[Head]:
    """Returns each row's `sizes` most probable ids, fewer if fewer are left, with their log-probs in float32."""
    top = logits.topk(min(max(sizes), logits.shape[1]), dim=-1)  # sorted: what is not left comes last
    counts = (top.values > float("-inf")).sum(dim=-1).tolist()
    log_probs = (top.values - logits.logsumexp(dim=-1, keepdim=True)).tolist()
    return [
        Head(of_row, array("i", ids[: min(size, count)]), array("f", values[: min(size, count)]))
        for of_row, size, count, ids, values in zip(kept, sizes, counts, top.indices.tolist(), log_probs)
    ]


def _apply_masks(logits: Tensor, masks: Sequence[bytes | None]) -> Tensor:
    rows = [i for i, mask in enumerate(masks) if mask is not None]
    if not rows:
        return logits
    packed = np.frombuffer(b"".join(mask for mask in masks if mask is not None), dtype=np.uint8).reshape(len(rows), -1)
    outside = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little") == 0
    logits = logits.clone()
    logits[rows] = logits[rows].masked_fill(torch.from_numpy(outside).to(logits.device), float("-inf"))
    return logits


def _restricted_rows(params: Sequence[SamplingParams]) -> list[int]:
    return [i for i, p in enumerate(params) if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1)]


def _kept_ids(restricted: Tensor, params: Sequence[SamplingParams], masks: Sequence[bytes | None]) -> list[Kept | None]:
    """Returns, per row, the ids that its mask and `restrict` kept; None for greedy rows and those left unchanged."""
    kept_ids: list[Kept | None] = [
        mask and compact(mask) if each.temperature > 0 else None
        for each, mask in zip(params, masks or [None] * len(params))
    ]
    if rows := _restricted_rows(params):
        place, ids = (restricted[rows] > float("-inf")).nonzero(as_tuple=True)
        counts = torch.bincount(place, minlength=len(rows)).tolist()
        for row, part in zip(rows, ids.to("cpu", torch.int32).split(counts)):
            kept_ids[row] = array("i", part.numpy().tobytes())
    return kept_ids


def compact(mask: bytes) -> Kept:
    """Returns the ids of a mask with a bit per id, or the mask itself if it is smaller than they are."""
    packed = np.frombuffer(mask, dtype=np.uint8)
    if 4 * int(_BITS[packed].sum()) > len(mask):
        return mask
    ids = np.unpackbits(packed, bitorder="little").nonzero()[0]
    return array("i", ids.astype(np.int32).tobytes())


def _draw(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse transform sampling, one uniform per row: returns token ids (rows,) and log-probs (rows,).

    The rounding of cumulative sums must stay far below any probability, so they are float64. To save time, they are
    computed over blocks of the vocabulary, and then only within the block that the draw falls into.
    """
    rows, width = logits.shape
    weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    padded = F.pad(weights, (0, -width % _BLOCK)) if width % _BLOCK else weights
    blocks = padded.view(rows, -1, _BLOCK)
    cumulative = _running_sums(blocks.sum(dim=-1, dtype=torch.float64))
    total = cumulative[:, -1:]
    target = draws[:, None] * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=logits.device), block[:, 0]]
    within = _running_sums(inside.double())
    place = torch.searchsorted(within, target - before, right=True)
    # Rounding may put a draw past the end of its block: then take the block's last token with nonzero probability.
    last = (inside > 0).mul(torch.arange(1, _BLOCK + 1, device=logits.device)).amax(dim=-1, keepdim=True) - 1
    tokens = block * _BLOCK + torch.minimum(place, last)
    log_probs = (weights.gather(1, tokens).double() / total).log().float()
    return tokens[:, 0], log_probs[:, 0]


def _running_sums(rows: Tensor) -> Tensor:
    """Cumulative sums of each row. A GPU adds up several rows in a fixed order, a single one in any, and PyTorch refuses
    both where `trainer.deterministic` wants determinism."""
    if rows.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return rows.cumsum(dim=-1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return rows.expand(max(2, len(rows)), -1).cumsum(dim=-1)[: len(rows)]
    finally:
        torch.use_deterministic_algorithms(True)


def restrict(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sets logits outside each row's top-k and top-p sets to -inf; (rows, vocabulary) in and out.

    Top-k is applied first, then top-p: the smallest set of tokens whose probability reaches top_p, always including the
    most probable one. Ties are broken in favour of lower ids. Instead of sorting the vocabulary, `topk` finds as many of
    its largest logits as the sets need.
    """
    rows = _restricted_rows(params)
    if not rows:
        return logits
    everything = len(rows) == len(params)
    chosen = logits if everything else logits[rows]
    width = chosen.shape[1]
    limits = [params[i].top_k if 0 < params[i].top_k < width else width for i in rows]
    top_k = torch.tensor(limits, device=logits.device)
    top_p = torch.tensor([params[i].top_p for i in rows], device=logits.device, dtype=torch.float64)
    count, threshold = _kept(chosen, top_k, top_p)
    above, equal = chosen > threshold, chosen == threshold
    ties = count - above.sum(dim=-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=-1) <= ties))
    cut = chosen.masked_fill(~kept, float("-inf"))
    if everything:
        return cut
    result = logits.clone()
    result[rows] = cut
    return result


def _kept(logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many tokens each row keeps, and the smallest logit among them; both (rows, 1)."""
    width = logits.shape[1]
    nucleus = top_p < 1
    size = min(max(_FIRST_CANDIDATES, int(torch.where(top_k < width, top_k, 0).max())), width)
    # top_p is a fraction of the mass of the top-k set if there is one, else of that of the whole vocabulary.
    top = logits.amax(dim=-1, keepdim=True)
    mass = torch.exp(logits - top).sum(dim=-1, keepdim=True, dtype=torch.float64)
    while True:
        values = logits.topk(size, dim=-1).values  # sorted
        inside = torch.arange(size, device=logits.device) < top_k[:, None]
        weights = torch.exp((values - top).double()) * inside
        probs = weights / torch.where((top_k < width)[:, None], weights.sum(dim=-1, keepdim=True), mass)
        reached = _running_sums(probs)
        if size == width or bool((~nucleus | (top_k < width) | (reached[:, -1] >= top_p)).all()):
            break
        size = min(4 * size, width)
    before = reached - probs
    wanted = inside & ((before < top_p[:, None]) | ~nucleus[:, None])
    wanted[:, 0] = True
    count = torch.where(nucleus | (top_k <= size), wanted.sum(dim=-1), width)[:, None]
    threshold = values.gather(1, (count - 1).clamp(max=size - 1))
    return count, torch.where(count <= size, threshold, float("-inf"))
