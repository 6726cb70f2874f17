"""`BareParser`: formats whose calls need no tag where they begin the turn.

Invariant: what follows the reasoning is a call only if it begins as one (`bare`); then it is one or an error, never text.
"""

from __future__ import annotations

import re
from typing import ClassVar

from etude.chat.parsers.base import Tools
from etude.chat.parsers.blocks import BlockParser, Pieces, Thought

LIST_OF_CALLS = re.compile(r'\s*\[\s*\{\s*"(?:name|arguments)"\s*:')  # JSON; what may follow is the parser's to judge


class BareParser(BlockParser):
    """Reads blocks after a tag as `BlockParser`, and, where there is none, a turn that matches `bare` as one block."""

    bare: ClassVar[re.Pattern[str]]

    def read(self, text: str, tools: Tools | None = None) -> Pieces:
        """See `BlockParser.read`."""
        for start in self._beginnings(text):
            block = self.read_block(text, "", start, tools) if self.bare.match(text, start) else None
            if block is not None:
                return [self._thought(text[:start]), *block.found, text[block.end :]]
        return super().read(text, tools)

    def _thought(self, text: str) -> Thought:
        tags = next((pair for pair in self.thoughts if text.rstrip().endswith(pair[1])), ("", ""))
        return Thought.of(text.strip(), *tags)

    def _beginnings(self, text: str) -> list[int]:
        """Where a turn's words may begin: at once, or after its first thought."""
        ends = [text.find(closing) + len(closing) for _, closing in self.thoughts if closing in text]
        return [0, *([min(ends)] if ends else [])]
