"""Log-probs and entropies of given tokens without materialising the full logits matrix.

Invariant: about `_CHUNK` logits (on a GPU `GPU_CHUNK`) exist at a time, plus up to `_KEEP` probabilities that a small batch
keeps for the backward pass; a larger batch recomputes its chunks there. Autograd saves no intermediate matrices: the
gradient is implemented here.

With logits z, p = softmax(z) and H = -Σ p log p:  ∂ log p(y) / ∂z = onehot(y) - p  and  ∂H / ∂z = -p (log p + H).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from etude.trajectory import Kept

_CHUNK = 1 << 22  # logits per chunk (16 MiB in float32): fits into a CPU's cache
GPU_CHUNK = 1 << 27  # 512 MiB: a GPU reads the whole output embedding from memory once a chunk
_MASKED_LOGIT = -1e30  # logit of an id that could not be sampled
_KEEP = 1 << 24  # max probabilities (64 MiB) to keep: up to here, keeping is cheaper than recomputing

Finish = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Support:
    """The ids that each token was sampled from (top-k, top-p, a grammar): `ids[offsets[i]:offsets[i + 1]]` for token i; if
    empty, those of the mask number `mask[i]`; if that is -1, the whole vocabulary.

    `masks`: (masks, vocabulary / 8) bytes with a bit per id, the lowest bit of a byte first.
    """

    offsets: Sequence[int]
    ids: Tensor
    mask: Sequence[int] = ()
    masks: Tensor | None = None

    @classmethod
    def of(cls, kept: Sequence[Kept | None], device: torch.device) -> Support:
        """Makes the support of tokens whose ids are `kept`; equal masks are stored once."""
        lists = [ids if isinstance(ids, array) else array("i") for ids in kept]
        flat = b"".join(ids.tobytes() for ids in lists)
        ids = torch.frombuffer(bytearray(flat), dtype=torch.int32) if flat else torch.zeros(0)
        numbers: dict[bytes, int] = {}
        mask = [numbers.setdefault(each, len(numbers)) if isinstance(each, bytes) else -1 for each in kept]
        masks = None
        if numbers:
            masks = torch.frombuffer(bytearray(b"".join(numbers)), dtype=torch.uint8).view(len(numbers), -1).to(device)
        return cls([0, *accumulate(map(len, lists))], ids.long().to(device), mask, masks)

    def outside(self, rows: slice, vocabulary: int) -> Tensor:
        """(rows, vocabulary) mask of ids that could not be sampled."""
        offsets = torch.tensor(self.offsets[rows.start : rows.stop + 1], device=self.ids.device)
        counts = offsets.diff()
        left_out = (counts > 0)[:, None].repeat(1, vocabulary)
        place = torch.arange(len(counts), device=self.ids.device).repeat_interleave(counts)
        left_out[place, self.ids[offsets[0] : offsets[-1]]] = False
        if self.masks is not None:
            number = torch.tensor(self.mask[rows], device=self.ids.device)
            shifts = torch.arange(8, dtype=torch.uint8, device=self.ids.device)
            bits = self.masks[number[number >= 0], :, None] >> shifts & 1
            left_out[number >= 0] = bits.flatten(1)[:, :vocabulary] == 0
        return left_out


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    finish: Finish | None = None,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    sum_pi_squared: Tensor | None = None,
    top_k: tuple[Tensor, Tensor] | None = None,
    support: Support | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the log-prob of each label and the entropy of each distribution, in float32 (float64 for a float64 model).

    Args:
        hidden: (tokens, hidden_size).
        weight: (vocabulary, hidden_size); logits are hidden · weightᵀ + bias, divided by `temperature`.
        finish: post-processing of the model's logits, applied before the temperature (see
            `etude.models.packed.logit_finish`).
        labels: (tokens,) ids, or (tokens, k) for several per distribution.
        entropy_grad: whether the entropies carry a gradient (for an entropy bonus) or are only reported.
        sum_pi_squared: (tokens,), filled in place with Σ p² over the vocabulary, without a gradient.
        top_k: (tokens, k) ids and log-probs, filled in place with the top-k, in descending order, without a gradient.
        support: renormalises the distributions over these ids, which include the labels.
        chunk: tokens per chunk.

    Returns:
        Log-probs of the shape of `labels` and (tokens,) entropies, in nats.
    """
    size = chunk or tokens_per_chunk(weight)
    keep = torch.is_grad_enabled() and len(labels) * weight.shape[0] <= _KEEP
    head = _Head(finish, temperature, entropy_grad, size, keep, sum_pi_squared, top_k, support)
    log_probs, entropies = _LabelLogProbs.apply(
        hidden, weight, bias, labels[:, None] if labels.ndim == 1 else labels, head
    )
    return log_probs.view(labels.shape), entropies


def tokens_per_chunk(weight: Tensor) -> int:
    """How many tokens' logits are computed at a time with this output embedding."""
    return max(64, (_CHUNK if weight.device.type == "cpu" else GPU_CHUNK) // weight.shape[0])


@dataclass(frozen=True, eq=False)
class _Head:
    """Settings common to all chunks, of `chunk` tokens each; `keep`: whether to keep probabilities for the backward pass."""

    finish: Finish | None
    temperature: float
    entropy_grad: bool
    chunk: int
    keep: bool
    sum_pi_squared: Tensor | None
    top_k: tuple[Tensor, Tensor] | None
    support: Support | None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns the raw logits of `rows` and the input of the softmax; both (rows, vocabulary), the second at least
        float32."""
        product = torch.nn.functional.linear(hidden[rows], weight, bias)
        finished = product if self.finish is None else self.finish(product)
        finished = finished.to(torch.promote_types(finished.dtype, torch.float32))
        finished = finished if self.temperature == 1.0 else finished / self.temperature
        if self.support is not None:  # finite, so that 0 · logit is 0
            finished = finished.masked_fill(self.support.outside(rows, weight.shape[0]), _MASKED_LOGIT)
        return product, finished

    def gradient(self, product: Tensor, gradient: Tensor) -> Tensor:
        """Maps the gradient of the softmax's input to that of the raw logits, in their dtype."""
        gradient = gradient if self.temperature == 1.0 else gradient.div_(self.temperature)
        if self.finish is None:
            return gradient.to(product.dtype)
        with torch.enable_grad():
            leaf = product.detach().requires_grad_()
            finished = self.finish(leaf)
        return torch.autograd.grad(finished, leaf, gradient.to(finished.dtype))[0]


class _LabelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(labels.shape, dtype=kind)
        entropies = hidden.new_empty(len(labels), dtype=kind)
        kept: list[Tensor] = []
        for start in range(0, len(labels), head.chunk):
            rows = slice(start, min(start + head.chunk, len(labels)))
            _, logits = head.logits(hidden, weight, bias, rows)
            logs = logits.log_softmax(dim=-1)
            probs = logs.exp()
            log_probs[rows] = logs.gather(1, labels[rows])
            entropies[rows] = -torch.linalg.vecdot(
                probs, logs
            )  # log Σ exp - Σ p · logit cancels where the model is sure
            if head.sum_pi_squared is not None:
                head.sum_pi_squared[rows] = torch.linalg.vecdot(probs, probs)
            if head.top_k is not None:
                ids, top = head.top_k
                found = logs.topk(ids.shape[1], dim=-1)
                ids[rows], top[rows] = found.indices, found.values
            if head.keep:
                kept.append(probs)
        ctx.save_for_backward(hidden, weight, bias, labels, entropies, *kept)
        ctx.head = head
        if not head.entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_log_probs, of_entropies = gradients
        hidden, weight, bias, labels, entropies, *kept = ctx.saved_tensors
        head: _Head = ctx.head
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        for_hidden = torch.empty_like(hidden) if wants_hidden else None
        for_weight = torch.zeros_like(weight, dtype=entropies.dtype) if wants_weight else None
        for_bias = torch.zeros_like(bias, dtype=entropies.dtype) if wants_bias else None
        for number, start in enumerate(range(0, len(labels), head.chunk)):
            rows = slice(start, min(start + head.chunk, len(labels)))
            product = None
            if kept and head.finish is None:
                probs = kept[number]
            else:
                product, logits = head.logits(hidden, weight, bias, rows)
                probs = logits.softmax(dim=-1)
            gradient = probs * -of_log_probs[rows].sum(dim=1, keepdim=True)
            gradient.scatter_add_(1, labels[rows], of_log_probs[rows])
            if head.entropy_grad:
                bent = torch.xlogy(probs, probs).addcmul_(probs, entropies[rows, None])
                gradient.addcmul_(bent, of_entropies[rows, None], value=-1.0)
            gradient = head.gradient(hidden if product is None else product, gradient)
            if for_hidden is not None:
                for_hidden[rows] = gradient @ weight
            if for_weight is not None:
                if gradient.dtype == for_weight.dtype:
                    for_weight.addmm_(gradient.t(), hidden[rows])
                else:
                    for_weight += gradient.t() @ hidden[rows]
            if for_bias is not None:
                for_bias += gradient.sum(dim=0)
        return (
            for_hidden,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            None,
            None,
        )
