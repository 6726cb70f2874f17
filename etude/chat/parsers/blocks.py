"""`BlockParser`: the one reader of turns in which calls stand in blocks that a tag opens.

Invariant: every opening tag outside reasoning is one or more calls or an error, in the order written, and so is a tag
that announces calls if none follows. Reasoning is the text between the tags of a thought, after an opening one that is
never closed, and, if the text has no opening one before it, before the first closing one (the prompt opened that thought).
A call in reasoning is ignored, but an error if the model waits for an answer to it: in a thought that the turn ends with,
and in one that begins with a call, has no opening tag and no call after it.

Reading takes linear time, as long as `read_block` takes time proportional to what it consumes or to the distance to the next
tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from etude.chat.parsers.base import ParsedResponse, ToolParser, Tools
from etude.chat.parsers.json_call import SCALARS, Unreadable, call_of, decode, json_end
from etude.chat.parsers.streaming import BlockStream, TurnStream
from etude.schemas import FunctionCall

KEYS_OF_A_CALL = rf'\{{\s*(?:"name"|{SCALARS}"arguments")\s*:'
LIST_OF_CALLS = re.compile(rf"\s*\[\s*{KEYS_OF_A_CALL}")  # JSON; what may follow is the parser's to judge


@dataclass(frozen=True)
class Malformed:
    """A malformed call; `reason` is a part of a sentence for the model."""

    reason: str


Found = list[FunctionCall | Malformed]


class Thought(str):
    """A piece of a turn that is reasoning, with its tags; `inner` is it without them, `closing` the tag that ends it."""

    inner: str
    closing: str
    opened: bool
    """Whether its opening tag is there."""

    @classmethod
    def of(cls, text: str, opening: str = "", closing: str = "") -> Thought:
        """A thought in which either tag may be missing."""
        made = cls(text)
        made.inner = text.removeprefix(opening).removesuffix(closing).strip()
        made.closing, made.opened = closing, bool(opening)
        return made


Piece = str | FunctionCall | Malformed
Pieces = list[Piece]
"""A turn in the order written: words, thoughts, calls and malformed calls."""


def any_of(*tags: str) -> re.Pattern[str]:
    """Finds one of `tags`, the longest that fits."""
    return re.compile("|".join(re.escape(tag) for tag in sorted(set(tags), key=len, reverse=True)))


class Block(NamedTuple):
    """What one opening tag led to: calls, malformed ones and words among them, in order, and where reading goes on."""

    end: int
    found: Sequence[Piece]


class BlockParser(ToolParser):
    """A subclass names its tags and reads one block.

    `opening` open a block and `closing` end one, `glue` stands around blocks and means nothing, but for `sections`, which
    of it announce blocks; `thoughts` are pairs of tags around reasoning.
    """

    opening: ClassVar[tuple[str, ...]] = ()
    glue: ClassVar[tuple[str, ...]] = ()
    sections: ClassVar[tuple[str, ...]] = ()
    thoughts: ClassVar[tuple[tuple[str, str], ...]] = (("<think>", "</think>"),)
    closing: ClassVar[tuple[str, ...]] = ()
    _tags: ClassVar[re.Pattern[str]]
    _ends: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        """Compiles the tags."""
        super().__init_subclass__()
        cls._tags = any_of(*cls.opening, *cls.glue, *(tag for pair in cls.thoughts for tag in pair))
        cls._ends = any_of(*cls.opening, *cls.closing)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """The block whose opening `tag` ends at `start`; None where the tag is plain text after all."""
        raise NotImplementedError

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        """Content (everything outside the blocks, reasoning included, stripped), calls and errors of a turn."""
        return as_response(self.read(text, tools))

    bare_begins: ClassVar[str] = ""
    """Characters that a block without a tag may begin with."""

    def read_bare(self, text: str, start: int, tools: Tools | None) -> Block | None:
        """The block without a tag that words begin with, those of a turn or after a thought; None where they do not."""
        return None

    def stream(self, thinking: bool = False) -> TurnStream:
        calls, glue = {*self.opening, *self.sections}, {*self.glue} - {*self.sections}
        return BlockStream(calls, glue, dict(self.thoughts), thinking, self.bare_begins)

    def opens_thought(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(tuple(opening for opening, _ in self.thoughts))

    def read(self, text: str, tools: Tools | None = None) -> Pieces:
        """The pieces of a turn in the order written."""
        pieces = self.read_pieces(text, tools, dict(self.thoughts))
        return [*pieces, *self._lost(pieces, tools)]

    def read_pieces(self, text: str, tools: Tools | None, closing_of: Mapping[str, str]) -> Pieces:
        """The pieces of a text in which `closing_of`, by opening tag, are the tags around thoughts."""
        begun = self.read_bare(text, 0, tools)
        pieces: Pieces = [*begun.found] if begun else []
        position = begun.end if begun else 0
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
            elif name in self.sections and not self._holds_a_block(text, end):
                pieces += [
                    text[position:start],
                    Malformed(f"no call follows {name}; begin each with {self.opening[0]}"),
                ]
            else:
                pieces.append(text[position : start if name in self.glue else end])
            if thought is not None:
                may_close = False
                begun = self.read_bare(text, end, tools)
                pieces += begun.found if begun else []
                end = begun.end if begun else end
            position = end
        return [*pieces, text[position:]]

    def _lost(self, pieces: Pieces, tools: Tools | None) -> Pieces:
        """An error for each call in reasoning that the model waits for; see the invariant."""
        lost: Pieces = []
        for piece in reversed(pieces):
            if isinstance(piece, Thought):
                lost += self._calls_in(piece, tools)
            elif not isinstance(piece, str) or piece.strip():
                break
        first = pieces[0]
        if (
            not lost
            and isinstance(first, Thought)
            and not first.opened
            and all(isinstance(each, str) for each in pieces)
        ):
            return self._calls_in(first, tools, must_begin=True)
        return lost

    def _calls_in(self, thought: Thought, tools: Tools | None, must_begin: bool = False) -> Pieces:
        """An error for each call in `thought`; none if it `must_begin` with one and does not."""
        pieces = [
            each for each in self.read_pieces(thought.inner, tools, {}) if not isinstance(each, str) or each.strip()
        ]
        if must_begin and not (pieces and isinstance(pieces[0], FunctionCall)):
            return []
        reason = f"it stands in a thought; end the thought with {thought.closing} and write the call after it"
        return [Malformed(reason) for each in pieces if not isinstance(each, str)]

    def _holds_a_block(self, text: str, start: int) -> bool:
        tag = self._tags.search(text, start)
        return tag is not None and tag.group() in self.opening


class BareParser(BlockParser):
    """Formats whose calls need no tag where they begin a turn or follow a thought: what matches `bare` there is a call or
    an error, never text."""

    bare: ClassVar[re.Pattern[str]]
    bare_begins = "[{"

    def read_bare(self, text: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_bare`; several that follow each other are one."""
        found: list[Piece] = []
        end = start
        while self.bare.match(text, end) and (block := self.read_block(text, "", end, tools)) is not None:
            found += block.found
            end = block.end
        return Block(end, found) if found else None


class JsonBlockParser(BlockParser):
    """Blocks of JSON: `opening`, an object or a list of objects, and one of `closing`.

    A JSON text that ends decides where its block ends, so that tags inside its strings are text. A block without its
    closing tag is unreadable, unless it `may_stay_open`: then it ends with its JSON, if no other object follows a comma.
    """

    may_stay_open: ClassVar[bool] = False
    names: ClassVar[tuple[str, ...]] = ("name",)
    arguments: ClassVar[tuple[str, ...]] = ("arguments",)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        begin = skip_space(text, start)
        end = json_end(text, begin)
        if end is not None:
            after = skip_space(text, end)
            for closing in self.closing:
                if text.startswith(closing, after):
                    return Block(after + len(closing), self.read_calls(text[begin:end]))
            if self.may_stay_open and _ANOTHER.match(text, end) is None:
                return Block(end, self.read_calls(text[begin:end]))
        body, end = until(text, start, self._ends, self.closing)
        if body is None and not self.may_stay_open:
            return Block(end, [Malformed(f"it is not closed; end it with {self.closing[0]}")])
        return Block(end, self.read_calls(text[start:end] if body is None else body))

    def read_calls(self, body: str) -> Found:
        """The calls of one block's JSON."""
        return read_each(body, lambda value: call_of(value, self.names, self.arguments))


class HeadedJsonParser(BlockParser):
    """Blocks of a head that names the function, and the JSON of its arguments, which decides where the block ends.

    `head` has what names the function as its only group; `head_form` is how to begin a block; `fence`: what may stand
    between the JSON and the closing tag.
    """

    head: ClassVar[re.Pattern[str]]
    head_form: ClassVar[str]
    fence: ClassVar[str] = ""

    def read_call(self, named: str, arguments: str, tools: Tools | None) -> FunctionCall:
        """The call of a block; raises `Unreadable`."""
        raise NotImplementedError

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        head = self.head.match(text, start)
        if head is not None:
            begin = skip_space(text, head.end())
            end = json_end(text, begin)
            after = len(text) if end is None else skip_space(text, end)
            if self.fence and text.startswith(self.fence, after):
                after = skip_space(text, after + len(self.fence))
            closing = next((each for each in self.closing if text.startswith(each, after)), None)
            if closing is not None:
                return Block(after + len(closing), [attempt(self.read_call, head[1], text[begin:end], tools)])
        body, end = until(text, start, self._ends, self.closing)
        if body is None:
            return Block(end, [Malformed(f"it is not closed; end it with {self.closing[0]}")])
        head = self.head.match(body)
        if head is None:
            return Block(end, [Malformed(f"it must begin with {self.head_form}")])
        arguments = body[head.end() :].strip().removesuffix(self.fence)
        return Block(end, [attempt(self.read_call, head[1], arguments, tools)])


def read_each(body: str, call: Callable[[object], FunctionCall]) -> Found:
    """What `call` makes of the object in `body`, or of each member of the list in it."""
    try:
        value = decode(body)
    except Unreadable as reason:
        return [Malformed(str(reason))]
    return [attempt(call, each) for each in (value if isinstance(value, list) and value else [value])]


def attempt(call: Callable[..., FunctionCall], *arguments: object) -> FunctionCall | Malformed:
    """`call(*arguments)`, or the reason why it is none."""
    try:
        return call(*arguments)
    except Unreadable as reason:
        return Malformed(str(reason))


def until(text: str, start: int, ends: re.Pattern[str], closing: tuple[str, ...]) -> tuple[str | None, int]:
    """(text from `start` to the next closing tag, its end), or (None, where the next other tag of `ends` or all ends)."""
    tag = ends.search(text, start)
    if tag is None:
        return None, len(text)
    if tag.group() not in closing:
        return None, tag.start()
    return text[start : tag.start()], tag.end()


def skip_space(text: str, start: int) -> int:
    """The first place at or after `start` that is no white space."""
    space = _SPACE.match(text, start)
    return start if space is None else space.end()


def as_response(pieces: Pieces) -> ParsedResponse:
    """The words and thoughts as content, the calls, and one line for each malformed one."""
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
    return ParsedResponse(whole, calls, errors, reasoning="\n".join(filter(None, thoughts)), words=spoken)


_SPACE = re.compile(r"\s*")
_ANOTHER = re.compile(r"\s*,\s*\{")
