"""Routers of mixtures of experts: records the experts chosen in a forward pass, replays a choice, and measures balance.

Only the choice is replayed: the weights of the chosen experts come from the router's current logits, so that it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ROUTERS = ("Qwen3MoeTopKRouter",)


def routers(model: Any) -> list[nn.Module]:
    """Returns the routers in layer order; empty if the model is not a (supported) mixture of experts."""
    return [part for part in model.modules() if type(part).__name__ in _ROUTERS]


@contextmanager
def record_experts(model: Any) -> Iterator[list[Tensor]]:
    """Yields a list to which a forward pass inside appends each router's expert ids (tokens, k), in layer order."""
    chosen: list[Tensor] = []

    def keep(router: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen.append(output[2])

    with _hooked(model, lambda layer: keep):
        yield chosen


class Balance:
    """Accumulates the load-balancing loss of the routers over all layers and forward passes.

    The loss (Fedus et al. 2021, arXiv 2101.03961, eq. 4; over all layers and the k chosen experts, as in Transformers) is
    E · Σ_e f_e · P_e over E experts: f_e is the share of (token, layer) pairs routed to expert e, P_e the mean probability
    that routers assign to it. f is not differentiable, so with f of the whole mini-batch the loss is a sum over its tokens,
    however they are split into micro-batches and ranks.
    """

    def __init__(self) -> None:
        self.sent: Tensor | float = 0.0  # (experts,)
        self.probabilities: Tensor | float = 0.0  # (experts,), differentiable
        self.pairs: Tensor | float = 0.0

    @contextmanager
    def recording(self, model: Any, weights: Tensor) -> Iterator[None]:
        """Adds the statistics of forward passes inside; each token counts `weights` (tokens,) times."""
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))

        def add(router: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            logits, _, chosen = output
            counts = logits.new_zeros(logits.shape[-1], dtype=weights.dtype)
            self.sent = self.sent + counts.index_add(0, chosen.flatten(), weights.repeat_interleave(chosen.shape[-1]))
            self.probabilities = self.probabilities + weights @ logits.to(weights.dtype).softmax(dim=-1)
            self.pairs = self.pairs + weights.sum()

        with _hooked(model, lambda layer: add):
            yield

    def loss(self, whole: Balance) -> Tensor:
        """Returns this part's share of the loss; `whole` has the statistics of the mini-batch."""
        assert isinstance(self.probabilities, Tensor)
        shares = torch.as_tensor(whole.sent / whole.pairs**2).to(self.probabilities)
        return len(shares) * (shares * self.probabilities).sum()


@contextmanager
def replay_experts(model: Any, experts: Tensor | None) -> Iterator[None]:
    """Inside, also in backward passes, routes token i to experts[i, layer] (tokens, layers, k). Negative entries, or
    `experts` None, leave the choice to the router."""
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
