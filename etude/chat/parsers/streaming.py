"""`TurnStream`: incremental parser that emits a turn's reasoning and content while its text is still being sampled.

Invariant: emitted text is final. However the text is split into chunks, the same reasoning and content come out, in the same
order, and are prefixes of what the parser returns for the whole turn, with one exception: text before a closing reasoning
tag without an opening one was already emitted as content, while the parser, which does not know the prompt, takes it for
reasoning. Text is held back from where a tool call may begin, or a tag may be incomplete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

Kind = Literal["reasoning", "content"]


class TurnStream:
    """The stream of one turn, fed in chunks. This base class, for parsers without tags, emits nothing."""

    def __init__(self) -> None:
        self.text = ""
        self.emitted: dict[Kind, str] = {"reasoning": "", "content": ""}
        """All text emitted so far, without white space at its ends."""
        self._position = 0
        self._held = False
        self._closed = False
        self._new: list[tuple[Kind, str]] = []
        self._space: dict[Kind, str] = {"reasoning": "", "content": ""}
        self._thought_begins = True

    def feed(self, text: str) -> list[tuple[Kind, str]]:
        """Adds a chunk; returns the (kind, text) pairs that are now final."""
        self.text += text
        while not self._held and self._step():
            pass
        new, self._new = self._new, []
        return new

    def close(self) -> list[tuple[Kind, str]]:
        """Ends the turn; returns the (kind, text) pairs that are now final."""
        self._closed = True
        return self.feed("")

    @property
    def rest(self) -> str:
        """The text that has not been emitted."""
        return self._space["content"] + self.text[self._position :]

    def _step(self) -> bool:
        """Parses the next part; returns False if more text is needed."""
        self._held = True
        return False

    def _hold(self, position: int) -> bool:
        """Holds back everything from `position` on, for the rest of the turn."""
        self._position, self._held = position, True
        return False

    def _new_thought(self) -> None:
        """Starts a reasoning block; blocks are stripped and joined by line breaks."""
        self._space["reasoning"], self._thought_begins = "\n" if self.emitted["reasoning"] else "", True

    def _emit(self, kind: Kind, text: str) -> None:
        if kind == "reasoning" and self._thought_begins:
            text = text.lstrip()
            self._thought_begins = not text
        whole = self._space[kind] + text
        if kind == "content" and not self.emitted[kind]:
            whole = whole.lstrip()
        words = whole.rstrip()
        self._space[kind] = whole[len(words) :]
        if words:
            self.emitted[kind] += words
            self._new.append((kind, words))

    def _emit_until(self, kind: Kind, end: int) -> None:
        self._emit(kind, self.text[self._position : end])
        self._position = end

    def _find(self, tags: re.Pattern[str], beginnings: frozenset[str]) -> re.Match[str] | None:
        """Finds the next complete tag; None if there is none, or if it may still grow into a longer one."""
        tag = tags.search(self.text, self._position)
        grows = tag is not None and tag.end() == len(self.text) and tag.group() in beginnings and not self._closed
        return None if grows else tag

    def _clear_end(self, beginnings: frozenset[str]) -> int:
        return len(self.text) if self._closed else clear_end(self.text, beginnings, self._position)


def beginnings(tags: Iterable[str]) -> frozenset[str]:
    """Returns all proper, non-empty prefixes of the tags."""
    return frozenset(tag[:length] for tag in tags for length in range(1, len(tag)))


def clear_end(text: str, beginnings: frozenset[str], start: int = 0) -> int:
    """Returns where the incomplete tag at the end of `text` begins, at or after `start`; `len(text)` if there is none."""
    start = max(start, len(text) - max(map(len, beginnings), default=0))
    return next((at for at in range(start, len(text)) if text[at:] in beginnings), len(text))


class BlockStream(TurnStream):
    """Stream for formats whose calls are in tagged blocks.

    `calls` are tags that open a block, `glue` tags that are dropped, and `thoughts` maps opening to closing reasoning tags.
    `thinking`: whether the prompt ends inside a reasoning block. `bare`: characters with which a call without a tag may
    begin, where content begins.
    """

    def __init__(
        self,
        calls: Iterable[str],
        glue: Iterable[str],
        thoughts: Mapping[str, str],
        thinking: bool,
        bare: str = "",
    ) -> None:
        super().__init__()
        self._calls, self._glue, self._thoughts, self._bare = frozenset(calls), frozenset(glue), thoughts, bare
        tags = sorted({*self._calls, *self._glue, *thoughts, *thoughts.values()}, key=len, reverse=True)
        self._tags, self._beginnings = re.compile("|".join(map(re.escape, tags))), beginnings(tags)
        self._ends = frozenset[str]()
        self._begins = not thinking  # whether content begins here
        self._thought_before = False
        self._reads: Callable[[], bool] = self._opened_thought if thinking else self._words

    def _step(self) -> bool:
        return self._reads()

    def _words(self) -> bool:
        if self._begins and self._bare:
            rest = self.text[self._position :].lstrip()
            if not rest or rest[0] in self._bare:
                return self._hold(self._position) if rest else False
        self._begins = False
        tag = self._find(self._tags, self._beginnings)
        if tag is None:
            self._emit_until("content", self._clear_end(self._beginnings))
            return False
        self._emit_until("content", tag.start())
        name = tag.group()
        if name in self._thoughts:
            self._begin_thought(tag.end(), self._thoughts[name])
        elif name in self._glue:
            self._position = tag.end()
        elif name in self._calls or not self._thought_before:
            return self._hold(tag.start())
        else:  # a lone closing tag is text
            self._emit_until("content", tag.end())
        return True

    def _begin_thought(self, start: int, closing: str) -> None:
        self._new_thought()
        self._position, self._ends, self._reads = start, frozenset([closing]), self._thought
        self._thought_before = True

    def _thought(self) -> bool:
        [closing] = self._ends
        end = self.text.find(closing, self._position)
        self._emit_until("reasoning", self._clear_end(beginnings([closing])) if end < 0 else end)
        if end < 0:
            return False
        self._end_thought(end + len(closing))
        return True

    def _end_thought(self, position: int) -> None:
        self._position, self._reads, self._begins = position, self._words, True
        self._thought_before = True

    def _opened_thought(self) -> bool:
        tag = self._find(self._tags, self._beginnings)
        if tag is None:
            self._emit_until("reasoning", self._clear_end(self._beginnings))
            return False
        self._emit_until("reasoning", tag.start())
        name = tag.group()
        if name in self._thoughts.values():
            self._end_thought(tag.end())
        elif name in self._thoughts and not self.emitted["reasoning"]:  # the model repeats the prompt's opening tag
            self._begin_thought(tag.end(), self._thoughts[name])
        else:  # a call, or a mention of one in the reasoning: unknown until the block ends
            return self._hold(tag.start())
        return True
