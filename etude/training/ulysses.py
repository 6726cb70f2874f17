"""Sequence parallelism over a team of ranks, which compute each packed row together (Ulysses, Jacobs et al. 2023, arXiv
2309.14509).

A rank has every n-th token of the row, so that scored tokens are spread evenly. Around attention the team exchanges tokens
for heads: each rank attends with its part of the heads over all tokens, by the very layout that one rank uses, so windows,
chunks, sinks and shared prefixes need nothing of their own.

Invariant: each rank returns the outputs of the whole row, and its gradients are those of its own tokens: their sum over all
ranks is the gradient that one rank computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from etude.errors import ConfigError
from etude.models.attention import Scoring
from etude.models.packed import AttentionLayout, is_packed
from etude.models.vision import Vision


@dataclass(frozen=True)
class SequenceTeam:
    """`size` consecutive ranks that get the same rows; `rank`: this one's number in it; `key`: the key that says `size`."""

    size: int
    rank: int
    group: Any
    key: str

    @classmethod
    def join(cls, size: int, key: str) -> SequenceTeam | None:
        """Forms teams of `size` of all ranks (collective); None if that is 1."""
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size)
        return cls(size, dist.get_rank(group), group, key)

    def check(self, model: Any) -> None:
        """Raises:
        ConfigError: the team cannot share the attention of `model`, a Hugging Face model switched to packed attention.
        """
        heads = model.config.get_text_config().num_attention_heads
        for wrong, reason in (
            (Vision.of(model.config) is not None, "vision-language models are not divided over ranks"),
            (not is_packed(model), f"model type '{model.config.model_type}' computes one sequence a forward pass"),
            (heads % self.size != 0, f"it does not divide the model's num_attention_heads={heads}"),
        ):
            if wrong:
                raise ConfigError(f"{self.key}={self.size}: {reason}", fix=f"write {self.key}=1", key=self.key)

    def own(self, tokens: Tensor, filler: int = 0) -> Tensor:
        """Returns this rank's tokens of `tokens` (tokens, …); ranks that would have one less get `filler`."""
        padding = F.pad(tokens, (*[0, 0] * (tokens.ndim - 1), 0, -len(tokens) % self.size), value=filler)
        return padding[self.rank :: self.size]

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the team; the gradient of each rank is that of its own part."""
        total: Tensor = _Sum.apply(values, self.group)
        return total

    def exchange(self, parts: Tensor) -> Tensor:
        """Sends parts[i] to rank i and returns what the ranks sent, of the same shape (size, …)."""
        received: Tensor = _Exchange.apply(parts, self.group)
        return received


@dataclass(frozen=True)
class TeamLayout:
    """The layout of a packed row of `tokens` tokens of which each rank has its own."""

    whole: AttentionLayout
    team: SequenceTeam
    tokens: int

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Position ids (1, own tokens)."""
        return self.team.own(self.whole.position_ids(device)[0])[None]  # type: ignore[attr-defined]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        size, heads, groups = self.team.size, len(query), len(key)
        if heads % size:
            key_of = self.team.key
            raise ConfigError(
                f"{key_of}={size} does not divide the {heads} heads of layer {layer}",
                fix=f"write {key_of}=1",
                key=key_of,
            )
        repeats = math.lcm(groups, size) // groups  # fewer groups than ranks: several ranks get the same keys
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=0) for x in (key, value))
        parts = [x.unflatten(0, (size, -1)) for x in (query, key, value)]
        received = self.team.exchange(torch.cat(parts, dim=1))  # (ranks, heads of three kinds, own tokens, width)
        row = received.permute(1, 2, 0, 3).flatten(1, 2)[:, : self.tokens]
        if scoring.sinks is not None:
            scoring = replace(scoring, sinks=scoring.sinks.unflatten(0, (size, -1))[self.team.rank])
        query, key, value = row.split([part.shape[1] for part in parts])
        out = self.whole.attend(layer, query, key, value, scoring)
        padded = F.pad(out, (0, 0, 0, 0, 0, -self.tokens % size))
        sent = padded.unflatten(0, (-1, size)).transpose(0, 1)  # (ranks, their tokens, own heads, width)
        return self.team.exchange(sent).transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
