"""The routers of a mixture of experts: what they chose in a forward pass, and a forward pass that repeats a choice.

Only the choice is repeated: the weights of the chosen experts come from the router's logits of now, so that it learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ROUTERS = ("Qwen3MoeTopKRouter",)


def routers(model: Any) -> list[nn.Module]:
    """In the order of their layers; none where the model is no (supported) mixture of experts."""
    return [part for part in model.modules() if type(part).__name__ in _ROUTERS]


@contextmanager
def record_experts(model: Any) -> Iterator[list[Tensor]]:
    """Yields a list that gets the ids (tokens, k) of each router, in order, of a forward pass inside."""
    chosen: list[Tensor] = []

    def keep(router: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen.append(output[2])

    with _hooked(model, lambda layer: keep):
        yield chosen


@contextmanager
def replay_experts(model: Any, experts: Tensor | None) -> Iterator[None]:
    """Inside, also in backward passes, token i goes to experts[i, layer] (tokens, layers, k); where that is negative, or
    `experts` is None, to where the router sends it."""
    if experts is None:
        yield
        return

    def repeat(layer: int) -> Callable[..., Any]:
        wanted = experts[:, layer]

        def choose(router: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, chosen = output
            chosen = torch.where(wanted < 0, chosen, wanted)
            kept = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, chosen)
            if router.norm_topk_prob:
                kept = kept / kept.sum(dim=-1, keepdim=True)
            return logits, kept.to(weights.dtype), chosen

        return choose

    with _hooked(model, repeat):
        yield


@contextmanager
def _hooked(model: Any, hook_of: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for layer, router in enumerate(routers(model)):
            stack.callback(router.register_forward_hook(hook_of(layer)).remove)
        yield
