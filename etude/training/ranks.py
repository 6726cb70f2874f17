"""`sum_gradients`: the one collective operation of training ranks.

Invariant: afterwards all ranks hold the gradients that one rank with all the rows would have (up to rounding); a parameter
that no rank reached has none, and its optimizer state stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replaces each parameter's gradient by the sum over all ranks, in place.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, so that a rank cannot reach the others.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "several ranks cannot learn together in one process: start each in its own, with torch.distributed initialised"
        )
    reached = torch.tensor([int(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(reached)
    for parameter, ranks in zip(parameters, reached.tolist()):
        if ranks:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
