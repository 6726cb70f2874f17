"""The format of MiniMax-M2, as elements; several in one block:

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Beijing</parameter>
    </invoke>
    </minimax:tool_call>

Texts are not quoted; the tool's schema tells their types. All closing tags must be there. As in vLLM, a call may stand
without a block; an opening tag among words that no argument and no closing tag follow is text.
"""

from __future__ import annotations

import re

from etude.chat.parsers.base import ToolParser
from etude.chat.parsers.element_call import ElementBlockParser, ElementFormat

_NAMED = r" name=[\"']?([^\"'<>\n]*)[\"']?"


@ToolParser.register("minimax_m2", "minimax")
class MinimaxM2ToolParser(ElementBlockParser):
    """Parser of `<invoke>` elements, in `<minimax:tool_call>` tags or alone."""

    opening = ("<minimax:tool_call>", "<invoke name=")
    closing = ("</minimax:tool_call>",)
    special_tokens = ("<minimax:tool_call>", "</minimax:tool_call>")
    elements = ElementFormat(
        call=(r"<invoke\b", f"{_NAMED}>"),
        call_end="</invoke>",
        argument=(r"<parameter\b", f"{_NAMED}>"),
        argument_end="</parameter>",
        block=special_tokens,
        form='<parameter name="key">value</parameter> in <invoke name="name">',
    )
    alone = re.compile(rf"<invoke{_NAMED}(?:(>)(?=\s*(?:<parameter\b|</invoke>|(?:<[/\w]*)?\Z))|\Z)")
