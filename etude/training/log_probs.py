"""Log-probs and entropies of chosen tokens without a full matrix of logits.

The vocabulary matrix product runs on `chunk` rows at a time; where the whole would be large, each chunk is recomputed in
the backward pass instead of kept, so that memory is O(chunk · vocabulary) rather than O(tokens · vocabulary).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_KEEP_LOGITS = 1 << 23  # elements (32 MiB in float32) up to which keeping logits is cheaper than recomputing them


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    chunk: int = 512,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, in float32.

    Args:
        hidden: (tokens, hidden_size).
        weight: (vocabulary, hidden_size); logits are hidden · weightᵀ + bias, divided by `temperature`.
        labels: (tokens,).
        entropy_grad: whether the entropies carry a gradient (an entropy bonus) or are only reported.

    Returns:
        (tokens,) log-probs and (tokens,) entropies, in nats.
    """

    def rows(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.nn.functional.linear(h, weight, bias).float()
        if temperature != 1.0:
            logits = logits / temperature
        normaliser = logits.logsumexp(dim=-1)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = normaliser - (logits.softmax(dim=-1) * logits).sum(dim=-1)
        return logits.gather(1, y[:, None]).squeeze(1) - normaliser, entropy

    if len(labels) == 0:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty
    recompute = torch.is_grad_enabled() and len(labels) * weight.shape[0] > _KEEP_LOGITS
    pieces = []
    for h, y in zip(hidden.split(chunk), labels.split(chunk)):
        pieces.append(checkpoint(rows, h, y, use_reentrant=False) if recompute else rows(h, y))
    log_probs, entropies = zip(*pieces)
    return torch.cat(log_probs), torch.cat(entropies)
