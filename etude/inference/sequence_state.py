"""A trajectory as the native engine sees it: its request, and where its keys and values are.

Invariant: `cached` tokens of the trajectory's context have keys and values: the first `shared` in the prefix, the `own` ones
after them in its slot. `feed` is what follows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from etude.chat.encoding import common_beginning
from etude.inference.cache import SlabCache, Slot
from etude.inference.prefixes import Prefix, PrefixStore
from etude.inference.stop_texts import StopTexts
from etude.inference.types import SamplingParams, TokenOutput
from etude.models.image_positions import ImagePositions


@dataclass
class Request:
    """A request and what has been sampled so far; `limit`: its maximum number of tokens.

    `prompt` is keyed if it has `images`, see `etude.models.image_positions`.
    """

    prompt: list[int]
    params: SamplingParams
    limit: int
    future: asyncio.Future[TokenOutput]
    images: ImagePositions | None = None
    stops: StopTexts | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens left to sample."""
        return self.limit - len(self.tokens)

    def finish(self, reason: str) -> None:
        """Answers, once."""
        if not self.future.done():
            self.future.set_result(TokenOutput(self.tokens, self.log_probs, reason, self.versions))


@dataclass(eq=False)
class SequenceState:
    """A trajectory. `head` is the length of its first prompt, which others may share."""

    rank: tuple[int, int, str]
    request: Request | None = None
    head: int = 0
    prefix: Prefix | None = None
    shared: int = 0
    slot: Slot | None = None
    own: list[int] = field(default_factory=list)
    feed: list[int] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        """Whether its prefix is still being computed."""
        return self.prefix is not None and not self.prefix.ready

    def context(self) -> list[int]:
        """The request's prompt and what was sampled after it."""
        assert self.request is not None
        return self.request.prompt + self.request.tokens

    def common(self, context: list[int]) -> int:
        """How many first tokens of `context` are cached."""
        if self.prefix is None:
            return 0
        head = self.prefix.tokens[: self.shared]
        if tuple(context[: self.shared]) != head:
            return common_beginning(list(head), context)
        own = common_beginning(self.own, context[self.shared : self.shared + len(self.own)])
        return self.shared + own

    def forget(self, cache: SlabCache, prefixes: PrefixStore) -> None:
        """Releases its memory; nothing is cached any more."""
        if self.slot is not None:
            cache.give_back(self.slot)
        if self.prefix is not None:
            prefixes.leave(self.prefix)
        self.slot, self.prefix, self.shared, self.own, self.feed = None, None, 0, [], []
