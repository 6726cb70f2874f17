"""Whether a parser reads the calls that a chat template writes: tried, by having the template write one.

Invariant: what is said was seen. A template that writes no calls, or not these, says nothing of a parser.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from etude.chat.encoding import Encoder, common_beginning
from etude.chat.parsers.base import ToolParser
from etude.chat.rendering import Renderer
from etude.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME, _ARGUMENTS = "weather_in", {"city": "Saint-Malo", "days": 3}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Says how the weather will be.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "days": {"type": "integer", "description": "how many"},
                },
                "required": ["city", "days"],
            },
        },
    }
]
_QUESTION = "What will it be like?"


def unread_call(parser: ToolParser, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A turn that the tokenizer's chat template writes with a call in it which `parser` does not read; None where it reads
    the call, or the template writes none, or the parser reads ids only."""
    if not parser.reads_text():
        return None
    encoder, unread = Encoder(tokenizer), None
    for turn, starts in _written(Renderer(tokenizer, {})):
        if any(_reads(parser, parser.decode(encoder.ids(turn[start:]))) for start in starts):
            return None
        unread = turn[starts[0] :]
    return unread


def shortened(turn: str) -> str:
    """The beginning of a turn, for messages."""
    return turn.strip()[:120]


def _reads(parser: ToolParser, text: str) -> bool:
    calls = parser.parse(text, _TOOLS).calls
    return [(call.name, json.loads(call.arguments)) for call in calls] == [(_NAME, _ARGUMENTS)]


def _written(renderer: Renderer) -> list[tuple[str, list[int]]]:
    """Conversations that end with a call, and where the turn with the call may begin: where the generation prompt ends,
    where the text leaves it, or behind the question."""
    question, found = {"role": "user", "content": _QUESTION}, []
    asked = [{"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}]
    for content in ("", None):  # there are templates that write calls where there is no content only
        call: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": asked}
        try:
            prompt = renderer.text([question], _TOOLS, generate=True)
            text = renderer.text([question, call], _TOOLS, generate=False)
        except ConfigError:
            continue
        behind = text.rfind(_QUESTION) + len(_QUESTION)
        if _NAME in text[behind:]:
            shared = common_beginning(prompt, text)
            found.append((text, [shared, behind]))
    return found
