"""The scheduler: which trajectories the next step computes, and which are preempted when memory is short.

Rows wait in a queue, in row order, until the batch has a place and the cache has memory for their context (admission).
Between two steps each row of the batch gets room for its next tokens. When the budget is used up, memory is taken from, in
this order: unused prefixes, rows that are not in the batch (the last first), and the batch's last rows, which go back to the
queue and keep their sampled tokens (preemption). Evicted keys and values are recomputed, so budgets and chunked prefill
change when a token is computed, never which token.

Invariant: between steps a row is in the batch, in the queue, or has no request. The first row of the batch is never
preempted for another, so some request always completes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from etude.chat.encoding import common_beginning
from etude.errors import EngineError, GrammarError
from etude.inference.grammar import Matcher
from etude.inference.kv_cache import Prefix, PrefixStore, SlabCache, Slot
from etude.inference.layout import StepInput
from etude.inference.stop_strings import StopStrings
from etude.inference.types import SamplingParams, TokenOutput
from etude.models.image_positions import ImagePositions
from etude.trajectory import Kept, RoutedExperts


@dataclass
class Request:
    """A request and the tokens sampled so far; `limit`: maximum number of new tokens.

    With `images`, `prompt` has keyed ids (see `etude.models.image_positions`).
    """

    prompt: list[int]
    params: SamplingParams
    limit: int
    future: asyncio.Future[TokenOutput]
    images: ImagePositions | None = None
    stops: StopStrings | None = None
    matcher: Matcher | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_ids: list[Kept | None] = field(default_factory=list)

    def finish(self, reason: str, experts: RoutedExperts | None = None) -> None:
        """Resolves the future with the tokens sampled so far, unless it is done."""
        if not self.future.done():
            kept = self.kept_ids if any(self.kept_ids) else None
            output = TokenOutput(
                self.tokens, self.log_probs, reason, self.versions, kept_ids=kept, routed_experts=experts
            )
            self.future.set_result(output)

    def mask(self) -> bytes | GrammarError | None:
        """Returns the ids that its grammar allows next (see `Matcher.mask`), the error if there are none that it could
        determine, or None without a grammar."""
        try:
            return None if self.matcher is None else self.matcher.mask(self.tokens, self.params.stop_token_ids)
        except GrammarError as error:
            return error


@dataclass(eq=False)
class SequenceState:
    """A trajectory's state in the engine. `head` is the length of its first prompt, which others may share.

    Invariant: the first tokens of its context are in the KV cache: `shared` tokens in the prefix's slot, then the tokens
    `own` in its own slot. `feed` are the tokens after them, still to be computed.
    """

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
        assert self.request is not None
        return self.request.prompt + self.request.tokens

    def common(self, context: list[int]) -> int:
        """Returns how many tokens from the start of `context` are cached."""
        if self.prefix is None:
            return 0
        head = self.prefix.tokens[: self.shared]
        if tuple(context[: self.shared]) != head:
            return common_beginning(list(head), context)
        own = common_beginning(self.own, context[self.shared : self.shared + len(self.own)])
        return self.shared + own

    def routed_experts(self) -> RoutedExperts | None:
        """Returns the experts of the cached tokens; None if the cache does not record them."""
        parts = [(None if self.prefix is None else self.prefix.slot, self.shared), (self.slot, len(self.own))]
        kept = [
            slot.slab.experts[slot.index, :count] for slot, count in parts if slot and slot.slab.experts is not None
        ]
        return RoutedExperts.of(np.concatenate(kept)) if kept else None

    def forget(self, cache: SlabCache, prefixes: PrefixStore) -> None:
        """Releases all its cache memory."""
        if self.slot is not None:
            cache.give_back(self.slot)
        if self.prefix is not None:
            prefixes.leave(self.prefix)
        self.slot, self.prefix, self.shared, self.own, self.feed = None, None, 0, [], []


@dataclass(frozen=True, kw_only=True)
class ScheduledInput(StepInput):
    """The input of `row`: its own tokens, or those of the prefix that it waits for and `computes`; `sampled`: whether it is
    the one token that the previous step drew (decode, not prefill)."""

    row: SequenceState
    computes: Prefix | None = None
    sampled: bool = False


@dataclass(frozen=True)
class StepPlan:
    """What a step computes. `drawing`: the rows that sample a token, each with the index of the feed whose last logits it
    is sampled from."""

    feeds: list[ScheduledInput]
    drawing: list[tuple[SequenceState, int]]

    @property
    def tokens(self) -> int:
        """The number of tokens that the step computes."""
        return sum(len(part.ids) for part in self.feeds)

    @property
    def prefill(self) -> int:
        """The number of tokens not sampled by the previous step."""
        return sum(len(part.ids) for part in self.feeds if not part.sampled)


class Scheduler:
    """Schedules the rows of one engine: at most `max_num_seqs` in the batch, `max_num_batched_tokens` tokens per step."""

    def __init__(
        self, cache: SlabCache, prefixes: PrefixStore, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.cache, self.prefixes = cache, prefixes
        self._max_rows, self._max_tokens = max_num_seqs, max_num_batched_tokens
        self.rows: dict[str, SequenceState] = {}
        self.queue: list[SequenceState] = []
        self.active: list[SequenceState] = []
        self._closed: list[SequenceState] = []  # their memory is freed at the next admission
        self.context_tokens = self.preemptions = 0

    def close(self, row: SequenceState) -> None:
        """Has the memory of a row that was removed from `rows` freed at the next admission."""
        self._closed.append(row)

    def reclaim(self) -> None:
        """Frees the memory of closed rows."""
        for row in sorted(self._closed, key=lambda row: row.rank):
            row.forget(self.cache, self.prefixes)
        self._closed = []

    # -- admission -----------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Moves queued rows into the batch, in row order, while it has a place and the cache has memory."""
        self.reclaim()
        self.queue.sort(key=lambda row: row.rank)
        while self.queue and len(self.active) < self._max_rows:
            row = self.queue[0]
            if not self._prepare(row):
                if not self.active:
                    self._give_up(row)
                break
            self.queue.pop(0)
            self.active.append(row)
        self.active.sort(key=lambda row: row.rank)

    def _prepare(self, row: SequenceState) -> bool:
        """Finds the cached part of the row's context and allocates memory for the rest; False: not enough memory."""
        assert row.request is not None
        context = row.context()
        if row.waiting and tuple(context[: row.shared]) != row.prefix.tokens:  # type: ignore[union-attr]
            row.forget(self.cache, self.prefixes)
        held = row.common(context)
        if not held and not row.waiting:
            row.forget(self.cache, self.prefixes)
            row.head = row.head if 0 < row.head <= len(row.request.prompt) else len(row.request.prompt)
            while (prefix := self.prefixes.join(context[: row.head])) is None:
                if not self._make_room(row):
                    return False
            row.prefix, row.shared = prefix, row.head
            held = row.head
        if not row.waiting:
            held = min(held, len(context) - 1)  # the last token is always computed: its logits are needed
        row.shared = min(row.shared, held)
        row.own, row.feed = context[row.shared : held], context[held:]
        fits = self._resize(row, len(context) - row.shared + 1, evict_batch=False)
        self.context_tokens += len(context) if fits else 0
        return fits

    def _give_up(self, row: SequenceState) -> None:
        """Fails the request of a context that does not fit into an otherwise empty cache."""
        self.queue.remove(row)
        row.forget(self.cache, self.prefixes)
        request, row.request = row.request, None
        if request is not None and not request.future.done():
            request.future.set_exception(
                EngineError(
                    f"a context of {len(request.prompt) + len(request.tokens)} tokens does not fit into the key/value "
                    "cache: raise rollout.kv_cache_memory_mb"
                )
            )

    # -- memory --------------------------------------------------------------------------------------------------

    def _resize(self, row: SequenceState, length: int, *, evict_batch: bool) -> bool:
        """Ensures that the row's slot has room for `length` tokens; False: not enough memory. `evict_batch`: the batch's
        last rows are preempted for it."""
        if row.slot is not None and row.slot.capacity >= length:
            return True
        while (slot := self.cache.take(length)) is None:
            if self._make_room(row):
                continue
            if not evict_batch or self.active[-1] is row:
                return False
            self.preempt(self.active[-1])
        if row.slot is not None:
            self.cache.copy(row.slot, slot, len(row.own))
            self.cache.give_back(row.slot)
        row.slot = slot
        return True

    def _make_room(self, row: SequenceState) -> bool:
        """Evicts an unused prefix, or else the cache of a row outside the batch other than `row`; False: there is none."""
        if self.prefixes.evict():
            return True
        computing = set(self.active)
        others = [*self.rows.values(), *self._closed]
        idle = [r for r in others if (r.slot or r.prefix) and r is not row and r not in computing]
        if not idle:
            return False
        max(idle, key=lambda r: r.rank).forget(self.cache, self.prefixes)
        return True

    def preempt(self, row: SequenceState) -> None:
        """Moves a row from the batch to the queue and frees its cache; its sampled tokens stay."""
        row.forget(self.cache, self.prefixes)
        self.active.remove(row)
        self.queue.append(row)
        self.preemptions += 1

    def forget_all(self) -> None:
        """Drops everything that is cached, and moves the batch back to the queue."""
        self.reclaim()
        self.queue += self.active
        self.active = []
        for row in self.rows.values():
            row.forget(self.cache, self.prefixes)
        self.prefixes.clear_unused()

    # -- steps ---------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Plans a step: one token for every decoding row, and prefill of prompts and tool results in row order up to
        `max_num_batched_tokens`.

        The first of the rows that wait for a prefix computes it; rows with nothing to feed after it sample from its last
        logits. Of prefixes that begin alike, such as prompts with one system message, the first computes the beginning, and
        the others wait for it.
        """
        for row in list(self.active):  # a preempted row has no slot
            if row.slot is not None and not self._resize(row, len(row.own) + len(row.feed), evict_batch=True):
                self.preempt(row)
        decoding = sum(len(row.feed) == 1 and not row.waiting for row in self.active)
        room = max(self._max_tokens - decoding, 0 if decoding else 1)
        feeds: list[ScheduledInput] = []
        drawing: list[tuple[SequenceState, int]] = []
        carried: dict[Prefix, int | None] = {}  # prefixes in this step → index of the feed that completes it, if any
        for row in self.active:
            prefix = row.prefix if row.waiting else None
            if prefix is not None and prefix not in carried and not self.prefixes.copy_beginning(prefix, carried):
                carried[prefix] = None
            if prefix is None or prefix not in carried:
                left = len(row.feed) if prefix is None else len(prefix.tokens) - prefix.filled
                count = 1 if prefix is None and left == 1 else min(left, room)
                room -= count if prefix is not None or left > 1 else 0
                completes = len(feeds) if count == left else None
                if count:
                    feeds.append(self._feed(row, prefix, count))
                if prefix is not None:
                    carried[prefix] = completes
            else:
                completes = carried[prefix]
            if completes is not None and not (prefix is not None and row.feed):
                drawing.append((row, completes))
        return StepPlan(feeds, drawing)

    @staticmethod
    def _feed(row: SequenceState, prefix: Prefix | None, count: int) -> ScheduledInput:
        """Returns the next `count` tokens of the row, or of the prefix that it waits for."""
        assert row.slot is not None
        assert row.request is not None
        images = row.request.images
        if prefix is not None:
            ids = prefix.tokens[prefix.filled : prefix.filled + count]
            return ScheduledInput(ids, prefix.slot, prefix.filled, images=images, row=row, computes=prefix)
        assert row.prefix is not None
        sampled = len(row.feed) == 1 and bool(row.request.tokens)
        before = row.prefix.slot if row.shared else None
        own = row.feed[:count]
        return ScheduledInput(own, row.slot, len(row.own), row.shared, before, images, row=row, sampled=sampled)

    def fed(self, plan: StepPlan) -> None:
        """Records that the step was computed: its tokens are cached now."""
        for part in plan.feeds:
            if part.computes is None:
                part.row.own += part.ids
                part.row.feed = part.row.feed[len(part.ids) :]
            else:
                part.computes.filled += len(part.ids)

    def sweep(self) -> None:
        """Removes rows without a request from the batch."""
        for row in self.active:
            if row.request is None:
                row.feed = []
        self.active = [row for row in self.active if row.request is not None]
