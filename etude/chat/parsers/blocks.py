"""`BlockParser`: base class of parsers for formats whose calls are in tagged blocks.

Invariant: every opening tag outside reasoning yields calls or an error, in the order written; a section tag without calls is
an error, too. Reasoning is the text between reasoning tags, after an opening tag that is never closed, or before a first
closing tag without an opening one (the prompt opened that block). Calls in reasoning are ignored, except where the model
seems to wait for their results, which is an error: in reasoning that ends the turn, and in reasoning that begins with a
call, has no opening tag, and has no call after it.

Parsing takes linear time if `read_block` takes time proportional to what it consumes or to the distance to the next tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from etude.chat.parsers.arguments import Unreadable, decode
from etude.chat.parsers.base import ParsedResponse, ToolParser, Tools
from etude.schemas import FunctionCall


@dataclass(frozen=True)
class Malformed:
    """A malformed call; `reason` completes a sentence that is shown to the model."""

    reason: str


Found = list[FunctionCall | Malformed]


class Thought(str):
    """A reasoning block, as a string with its tags; `inner` is the text without them, `closing` the closing tag."""

    inner: str
    closing: str
    opened: bool
    """Whether its opening tag is there."""

    @classmethod
    def of(cls, text: str, opening: str = "", closing: str = "") -> Thought:
        """Makes a reasoning block of `text`, in which either tag may be missing."""
        made = cls(text)
        made.inner = text.removeprefix(opening).removesuffix(closing).strip()
        made.closing, made.opened = closing, bool(opening)
        return made


Piece = str | FunctionCall | Malformed
Pieces = list[Piece]
"""A parsed turn in the order written: content, reasoning, calls and malformed calls."""


def any_of(*tags: str) -> re.Pattern[str]:
    """Compiles a pattern that matches one of `tags`, the longest possible."""
    return re.compile("|".join(re.escape(tag) for tag in sorted(set(tags), key=len, reverse=True)))


class Block(NamedTuple):
    """One parsed block: where parsing continues, and the calls, malformed calls and text in it, in order."""

    end: int
    found: Sequence[Piece]


class BlockParser(ToolParser):
    """Base class: a subclass declares its tags and parses one block in `read_block`.

    `opening` tags open a block and `closing` tags end it; `glue` tags are dropped; `sections` are those of them that must be
    followed by a block; `reasoning_tags` are pairs of tags around reasoning. Text that matches `bare`, at the beginning of a
    turn or after reasoning, is a block without a tag, never content.
    """

    opening: ClassVar[tuple[str, ...]] = ()
    glue: ClassVar[tuple[str, ...]] = ()
    sections: ClassVar[tuple[str, ...]] = ()
    reasoning_tags: ClassVar[tuple[tuple[str, str], ...]] = (("<think>", "</think>"),)
    closing: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[re.Pattern[str] | None] = None
    _tags: ClassVar[re.Pattern[str]]
    _ends: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._tags = any_of(*cls.opening, *cls.glue, *(tag for pair in cls.reasoning_tags for tag in pair))
        cls._ends = any_of(*cls.opening, *cls.closing)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """Parses the block whose opening `tag` ends at `start`; returns None if the tag is plain text."""
        raise NotImplementedError

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        """Parses a turn; the content is everything outside blocks, reasoning included, stripped."""
        return as_response(self.read(text, tools))

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str, str]:
        """See `ToolParser.split_reasoning`; from the first call on, the rest is as the model wrote it."""
        closing_of = dict(self.reasoning_tags)
        closings = set(closing_of.values())
        thoughts: list[str] = []
        words: list[str] = []
        position = 0
        tags = [tag for tag in self._tags.finditer(text) if tag.group() in closings or tag.group() in closing_of]
        if tags and tags[0].group() in closings:  # the prompt opened this block
            thoughts, position = [text[: tags[0].start()]], tags[0].end()
        elif opened and not tags:  # and the model did not close it
            call = self._tags.search(text)
            end = len(text) if call is None else call.start()
            thoughts, position = [text[:end]], end
        while tag := self._tags.search(text, position):
            name = tag.group()
            if name in closing_of:
                words.append(text[position : tag.start()])
                close = text.find(closing_of[name], tag.end())
                end = len(text) if close < 0 else close
                thoughts.append(text[tag.end() : end])
                position = end if close < 0 else end + len(closing_of[name])
            elif name in closings or (name in self.glue and name not in self.sections):
                words.append(text[position : tag.end() if name in closings else tag.start()])
                position = tag.end()
            else:
                break
        reasoning = "\n".join(filter(None, map(str.strip, thoughts)))
        return reasoning, "".join([*words, text[position:]]).strip()

    def opens_reasoning(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(tuple(opening for opening, _ in self.reasoning_tags))

    def read(self, text: str, tools: Tools | None = None) -> Pieces:
        """Parses a turn into pieces, plus an error for each call in reasoning whose result the model waits for; see the
        module's invariant."""
        pieces, errors = self.read_pieces(text, tools, dict(self.reasoning_tags)), Pieces()
        for piece in reversed(pieces):
            if isinstance(piece, Thought):
                errors += self._call_errors(piece, tools)
            elif not isinstance(piece, str) or piece.strip():
                break
        first, silent = pieces[0], all(isinstance(each, str) for each in pieces)
        if not errors and silent and isinstance(first, Thought) and not first.opened:
            errors = self._call_errors(first, tools, must_begin=True)
        return [*pieces, *errors]

    def read_pieces(self, text: str, tools: Tools | None, closing_of: Mapping[str, str]) -> Pieces:
        """Parses a text into pieces; `closing_of` maps opening to closing reasoning tags."""
        position, pieces = self._read_bare(text, 0, tools)
        may_close = True
        while tag := self._tags.search(text, position):
            name, start, end = tag.group(), tag.start(), tag.end()
            block = self.read_block(text, name, end, tools) if name in self.opening else None
            thought: Thought | None = None
            if name in closing_of:
                close = text.find(closing_of[name], end)
                end = len(text) if close < 0 else close + len(closing_of[name])
                thought = Thought.of(text[start:end], name, closing_of[name])
                pieces += [text[position:start], thought]
            elif may_close and name in closing_of.values():
                thought = Thought.of(text[:end], closing=name)
                pieces = [thought]
            elif block is not None:
                pieces += [text[position:start], *block.found]
                end = block.end
            elif name in self.sections and not (
                (following := self._tags.search(text, end)) and following.group() in self.opening
            ):
                pieces += [
                    text[position:start],
                    Malformed(f"no call follows {name}; begin each with {self.opening[0]}"),
                ]
            else:
                pieces.append(text[position : start if name in self.glue else end])
            if thought is not None:
                may_close = False
                end, found = self._read_bare(text, end, tools)
                pieces += found
            position = end
        return [*pieces, text[position:]]

    def _read_bare(self, text: str, start: int, tools: Tools | None) -> tuple[int, Pieces]:
        """Parses the blocks without a tag at `start`; returns where parsing continues, and what they hold."""
        found: Pieces = []
        while self.bare and self.bare.match(text, start) and (block := self.read_block(text, "", start, tools)):
            found += block.found
            start = block.end
        return start, found

    def _call_errors(self, thought: Thought, tools: Tools | None, must_begin: bool = False) -> Pieces:
        """Returns an error for each call in `thought`; with `must_begin`, only if it begins with a call."""
        pieces = [
            each for each in self.read_pieces(thought.inner, tools, {}) if not isinstance(each, str) or each.strip()
        ]
        if must_begin and not (pieces and isinstance(pieces[0], FunctionCall)):
            return []
        reason = f"it stands in a thought; end the thought with {thought.closing} and write the call after it"
        return [Malformed(reason) for each in pieces if not isinstance(each, str)]


def read_each(body: str, call: Callable[[object], FunctionCall]) -> Found:
    """Decodes `body` and applies `call` to the object in it, or to each element of the list in it."""
    try:
        value = decode(body)
    except Unreadable as reason:
        return [Malformed(str(reason))]
    return [attempt(call, each) for each in (value if isinstance(value, list) and value else [value])]


def attempt(call: Callable[..., FunctionCall], *arguments: object) -> FunctionCall | Malformed:
    """Returns `call(*arguments)`, or `Malformed` if it raises `Unreadable`."""
    try:
        return call(*arguments)
    except Unreadable as reason:
        return Malformed(str(reason))


def until(text: str, start: int, ends: re.Pattern[str], closing: tuple[str, ...]) -> tuple[str | None, int]:
    """Returns (text from `start` to the next closing tag, that tag's end), or, if another tag of `ends` or none comes first,
    (None, that tag's start or the end of the text)."""
    tag = ends.search(text, start)
    if tag is None:
        return None, len(text)
    if tag.group() not in closing:
        return None, tag.start()
    return text[start : tag.start()], tag.end()


def skip_space(text: str, start: int) -> int:
    """Returns the first index at or after `start` that is not white space."""
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]


def as_response(pieces: Pieces) -> ParsedResponse:
    """Builds the response: text and reasoning as content, the calls, and one line per malformed call."""
    content: list[str] = []
    words: list[str] = []
    thoughts: list[str] = []
    calls: list[FunctionCall] = []
    errors: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            content.append(piece)
            if isinstance(piece, Thought):
                thoughts.append(piece.inner)
            else:
                words.append(piece)
        elif isinstance(piece, FunctionCall):
            calls.append(piece)
        else:
            number = len(calls) + len(errors) + 1
            errors.append(f"tool call {number} was not read: {piece.reason}")
    whole = "".join(content).strip()
    spoken = whole if not thoughts else "".join(words).strip()
    return ParsedResponse(whole, calls, errors, reasoning="\n".join(filter(None, thoughts)), without_reasoning=spoken)


_SPACE = re.compile(r"\s*")
