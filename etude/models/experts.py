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


class Balance:
    """How evenly routers use their experts: the sums of the load-balancing loss over all layers of forward passes.

    The loss (Fedus et al. 2021, arXiv 2101.03961, eq. 4; over all layers and the k chosen experts as Transformers has it) is
    E · Σ_e f_e · P_e over E experts: f_e is the share of (token, layer) pairs that go to expert e, P_e the mean probability
    that routers give it. f is no differentiable function of the weights, so that with f of the whole mini-batch the loss is
    a sum over its tokens, however they are divided into micro-batches and ranks.
    """

    def __init__(self) -> None:
        self.sent: Tensor | float = 0.0  # (experts,)
        self.probabilities: Tensor | float = 0.0  # (experts,), differentiable
        self.pairs: Tensor | float = 0.0

    @contextmanager
    def recording(self, model: Any, weights: Tensor) -> Iterator[None]:
        """Adds up a forward pass inside; a token counts `weights` (tokens,) times."""
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
        """This part's share of the loss; `whole` is that of the mini-batch."""
        assert isinstance(self.probabilities, Tensor)
        shares = torch.as_tensor(whole.sent / whole.pairs**2).to(self.probabilities)
        return len(shares) * (shares * self.probabilities).sum()


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
