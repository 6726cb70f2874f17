"""Streams a response while it is sampled: token ids in, chunks of each choice's reasoning and content out.

Invariant: no chunk ends inside a character, and none contains text that the finished turn does not have: text is held back
from the first point where a tool call, a tag or a stop string may begin. So the chunks always concatenate to a prefix of
the turn's message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

from etude.agents.gateway.recording import RenderedRequest, Turn
from etude.chat import ToolParser
from etude.chat.parsers.streaming import Kind, beginnings, clear_end
from etude.errors import EtudeError
from etude.inference.types import OnTokens

_MOST_HELD = 64  # tokens without a complete character; after more, the rest is sent only at the end
_KEYS: tuple[tuple[Kind, str], ...] = (("reasoning", "reasoning_content"), ("content", "content"))


class LiveAnswer:
    """A request's response so far; `changed` is set with each token, `rendered` when sampling begins."""

    def __init__(self) -> None:
        self.rendered: RenderedRequest | None = None
        self.changed = asyncio.Event()
        self._choices: list[_LiveChoice] = []

    def begin(self, rendered: RenderedRequest, parser: ToolParser, thinking: bool) -> list[OnTokens]:
        """Starts a request that is about to be sampled; returns one token callback per choice."""
        self.rendered = rendered
        self._choices = [_LiveChoice(parser, rendered.request.stops, thinking) for _ in range(rendered.request.n or 1)]
        return [partial(self._take, choice) for choice in self._choices]

    def _take(self, choice: _LiveChoice, ids: Sequence[int]) -> None:
        choice.waiting += ids  # decoded by the sender, so that the engine never waits
        self.changed.set()

    def pieces(self) -> Iterator[tuple[int, Kind, str]]:
        """Yields (choice, kind, text) chunks that became final since the last call."""
        self.changed.clear()
        for number, choice in enumerate(self._choices):
            for kind, text in choice.read():
                yield number, kind, text

    def remaining(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Kind, str]]:
        """Yields what the finished turns contain beyond the chunks already sent.

        Raises:
            EtudeError: decoding a turn at once gave different text than decoding it token by token.
        """
        for number, (choice, turn) in enumerate(zip(self._choices, turns)):
            for kind, key in _KEYS:
                whole, said = turn.message.get(key, ""), choice.stream.emitted[kind]
                if not whole.startswith(said):
                    raise EtudeError(f"a streamed turn does not begin with what was sent of it: {said[-80:]!r}")
                if len(whole) > len(said):
                    yield number, kind, whole[len(said) :]


class _LiveChoice:
    def __init__(self, parser: ToolParser, stops: Sequence[str], thinking: bool) -> None:
        self.waiting: list[int] = []
        self.stream = parser.stream(thinking)
        self._parser, self._stops, self._beginnings = parser, stops, beginnings(stops)
        self._ids: list[int] = []
        self._start = 0  # tokens from here on are decoded again with the new ones: a character may span both
        self._read = 0  # number of tokens whose text is in `_text`
        self._text = ""
        self._sent = 0
        self._stopped = False

    def read(self) -> list[tuple[Kind, str]]:
        """Decodes the waiting tokens; returns the chunks that are now final."""
        new, self.waiting = self.waiting, []
        if self._stopped or not new:
            return []
        self._ids += new
        known, whole = (self._parser.decode(self._ids[self._start : end]) for end in (self._read, len(self._ids)))
        if whole.endswith("\ufffd"):  # possibly the first bytes of a character
            self._stopped = len(self._ids) - self._read > _MOST_HELD
            return []
        if len(whole) > len(known):
            self._text += whole[len(known) :]
            self._start, self._read = self._read, len(self._ids)
        ends = [at for stop in self._stops if (at := self._text.find(stop, max(0, self._sent - len(stop)))) >= 0]
        self._stopped = bool(ends)
        end = min([*ends, clear_end(self._text, self._beginnings)])
        piece, self._sent = self._text[self._sent : end], max(end, self._sent)
        return self.stream.feed(piece)
