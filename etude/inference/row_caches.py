"""Decoding with Transformers' own caches, one a sequence, for models that cannot run packed: layers with a state, attention
of their own.

A state cannot be cut back to an earlier token. So a prompt keeps the cache of all tokens but its last, and each trajectory
begins with a copy of it; a context that does not continue what was computed is computed again from the prompt's copy, or
from its first token. Each sequence is a forward pass of its own: slower than packed decoding, and its results do not depend
on what else is decoded.

Invariant: `RowCaches.of` accepts a model only if token by token it computes the hidden states of its plain forward pass.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from etude.errors import ConfigError, one_line
from etude.inference.scheduler import ScheduledInput
from etude.models.packable import are_close, probe_ids
from etude.models.packed import body_of, plain_hidden

_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")  # names of the cache in a family's forward pass
_PROBE_PARTS = (6, 1, 1, 3, 1)  # a prompt, decoded tokens, a tool's answer


@dataclass
class _Cached:
    """The first tokens of a context, and Transformers' cache after them."""

    tokens: list[int]
    cache: Any = None


class RowCaches:
    """The caches of one engine's trajectories and prompts; those that the scheduler drops go with them."""

    def __init__(self, model: Any) -> None:
        self._model, self._body = model, body_of(model)
        takes = inspect.signature(self._body.forward).parameters
        self._argument = next((name for name in _ARGUMENTS if name in takes), _ARGUMENTS[0])
        self._one_by_one = False  # Mamba's caches take a prompt or one more token
        self._kept: WeakKeyDictionary[Any, _Cached] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: Any) -> RowCaches:
        """Returns the caches of a model that runs plainly.

        Raises:
            ConfigError: its cache is wrong, or of an unknown kind.
        """
        made, training = cls(model), model.training
        model.eval()
        try:
            for made._one_by_one in (False, True):
                if failure := made._failure():
                    continue
                return made
        finally:
            model.train(training)
        raise ConfigError(
            f"the native engine cannot sample from model type '{model.config.model_type}': {failure}",
            fix="sample with rollout.name=vllm",
        )

    @torch.no_grad()
    def _failure(self) -> str:
        ids, cached, found = probe_ids(self._model, sum(_PROBE_PARTS)), _Cached([]), []
        try:
            for part in ids.split(_PROBE_PARTS):
                cached = copy.deepcopy(cached)
                found.append(self._feed(cached, part.tolist()))
            if are_close(torch.cat(found), plain_hidden(self._model, ids)):
                return ""
        except Exception as error:  # an unknown architecture can fail in any way
            return f"its cache fails with {type(error).__name__}: {one_line(error)}"
        return "with its own cache, later tokens get other hidden states than in one forward pass"

    def forget(self) -> None:
        """Drops all caches: the weights change."""
        self._kept.clear()

    def hidden(self, feeds: Sequence[ScheduledInput]) -> Tensor:
        """Computes the final hidden states of each feed's last token, (feeds, hidden)."""
        return torch.cat([self._last(feed) for feed in feeds])

    def _last(self, feed: ScheduledInput) -> Tensor:
        prefix = feed.computes
        if prefix is None:
            shared = feed.row.prefix.tokens[: feed.base] if feed.row.prefix else ()
            context = [*shared, *feed.row.own, *feed.ids]
            cached = self._continued(feed.row, context) or self._continued(feed.row.prefix, context)
            if cached is not self._kept.get(feed.row):
                cached = copy.deepcopy(cached)
            cached = self._kept[feed.row] = cached or _Cached([])
            return self._feed(cached, context[len(cached.tokens) :])[-1:]
        context = list(prefix.tokens[: feed.start + len(feed.ids)])
        cached = self._kept[prefix] = self._continued(prefix, context) or _Cached([])
        if len(context) < len(prefix.tokens):
            return self._feed(cached, context[len(cached.tokens) :])[-1:]
        if before := context[len(cached.tokens) : -1]:
            self._feed(cached, before)
        return self._feed(copy.deepcopy(cached), context[-1:])

    def _continued(self, owner: Any, context: list[int]) -> _Cached | None:
        """What is kept of `owner`, if `context` continues it."""
        cached = None if owner is None else self._kept.get(owner)
        if cached is None or len(cached.tokens) >= len(context):
            return None
        return cached if context[: len(cached.tokens)] == cached.tokens else None

    def _feed(self, cached: _Cached, tokens: Sequence[int]) -> Tensor:
        """Computes the hidden states (tokens, hidden) of tokens after those cached, and adds them to the cache."""
        if self._one_by_one and cached.tokens and len(tokens) > 1:
            return torch.cat([self._feed(cached, [token]) for token in tokens])
        ids = torch.tensor([list(tokens)], device=self._model.device)
        output = self._body(input_ids=ids, use_cache=True, **{self._argument: cached.cache})
        cached.tokens = [*cached.tokens, *tokens]
        cached.cache = next(output[name] for name in _ARGUMENTS if output.get(name) is not None)
        return output.last_hidden_state[0]
