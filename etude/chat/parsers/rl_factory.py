"""Parsers of RL-Factory's format: `<tool_call>` blocks of JSON5, and an `<answer>` that ends the conversation.

For RL-Factory's tool managers, `read_tools` returns a malformed block as the tool `<empty>`; the parsers report it as an
error that the model sees. If a turn has both an answer and calls, the answer wins in `rl_factory`, as in RL-Factory, and the
calls win in `rl_factory_calls_first`. Reasoning is searched for neither.

JSON5 (comments, single quotes, trailing commas) is tried if JSON fails, up to `MAX_JSON5_CHARS`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

from etude.chat.parsers.arguments import Unreadable, call_of, decode
from etude.chat.parsers.base import ParsedResponse, ToolParser, Tools
from etude.chat.parsers.blocks import Found, Pieces, Thought, as_response, attempt
from etude.chat.parsers.json_formats import JsonBlockParser
from etude.schemas import FunctionCall

EMPTY_TOOL = {"name": "<empty>", "args": "# Extract the tool name failed"}
MAX_JSON5_CHARS = 5000  # the JSON5 parser is slow and not hardened against hostile text
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@ToolParser.register("rl_factory")
class RLFactoryToolParser(JsonBlockParser):
    """Parser in which an answer wins over calls."""

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)
    written = ("<tool_call>\n", "\n</tool_call>")
    stop_strings: tuple[str, ...] = ("</answer>",)
    answer_first: ClassVar[bool] = True

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        """See `BlockParser.parse`; the calls of a turn with an answer are dropped if `answer_first`."""
        pieces = self.read(text, tools)
        if self.answer_first and _find_answers(pieces):
            return replace(as_response(pieces), content=text.strip(), calls=[], errors=[])
        return as_response(pieces)

    def read_calls(self, body: str) -> Found:
        """Parses the single call of a block."""
        return [attempt(_read_call, body)]


@ToolParser.register("rl_factory_calls_first")
class CallsFirstToolParser(RLFactoryToolParser):
    """Parser in which calls win over an answer in the same turn."""

    stop_strings = ()  # a call may follow the answer
    answer_first = False


def final_answer(text: str) -> str | None:
    """Returns the text of the last `<answer>…</answer>` outside reasoning, stripped; None if there is none."""
    answers = _find_answers(RLFactoryToolParser().read(text))
    return answers[-1].strip() if answers else None


def read_tools(text: str) -> list[dict[str, str]]:
    """Returns the tools that a turn calls, as `{"name", "args"}`, in order; malformed calls are `EMPTY_TOOL`."""
    return [
        {"name": piece.name, "args": piece.arguments} if isinstance(piece, FunctionCall) else dict(EMPTY_TOOL)
        for piece in RLFactoryToolParser().read(text)
        if not isinstance(piece, str)
    ]


def _find_answers(pieces: Pieces) -> list[str]:
    words = [piece for piece in pieces if isinstance(piece, str) and not isinstance(piece, Thought)]
    return [answer for piece in words for answer in _ANSWER.findall(piece)]


def _read_call(body: str) -> FunctionCall:
    try:
        return call_of(decode(body))
    except Unreadable as reason:
        value = _json5_or_none(body)
        if not isinstance(value, dict):
            raise reason from None
        return call_of(value)


def _json5_or_none(body: str) -> Any:
    if len(body) > MAX_JSON5_CHARS:
        return None
    import json5  # imported here: no other format needs it

    try:
        return json5.loads(body)
    except (ValueError, RecursionError):
        return None
