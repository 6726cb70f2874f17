"""`BareParser`: formats whose calls need no tag where they begin the turn.

Invariant: what the turn begins with, or what follows a thought, is a call only if it begins as one (`bare`); then it is one
or an error, never text.
"""

from __future__ import annotations

import re
from typing import ClassVar

from etude.chat.parsers.base import Tools
from etude.chat.parsers.blocks import Block, BlockParser, Piece
from etude.chat.parsers.json_call import SCALARS

KEYS_OF_A_CALL = rf'\{{\s*(?:"name"|{SCALARS}"arguments")\s*:'
LIST_OF_CALLS = re.compile(rf"\s*\[\s*{KEYS_OF_A_CALL}")  # JSON; what may follow is the parser's to judge


class BareParser(BlockParser):
    """Reads blocks after a tag as `BlockParser`, and what matches `bare` at the beginning of a turn as one block."""

    bare: ClassVar[re.Pattern[str]]

    def read_bare(self, text: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_bare`; several that follow each other are one."""
        found: list[Piece] = []
        end = start
        while self.bare.match(text, end) and (block := self.read_block(text, "", end, tools)) is not None:
            found += block.found
            end = block.end
        return Block(end, found) if found else None
