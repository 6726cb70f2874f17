"""Whether a parser reads the calls that a chat template writes: tried, by having the template write one.

Invariant: what is said was seen. A template that writes no calls, or not these, says nothing of a parser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from etude.chat.encoding import Encoder, common_beginning
from etude.chat.parsers.base import ToolParser

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


def unread_call(parser: ToolParser, tokenizer: PreTrainedTokenizerBase, **options: Any) -> str | None:
    """A turn that the tokenizer's chat template, rendered with `options`, writes with a call in it which `parser` does not
    read; None where it reads the call, the template writes none, or the parser cannot be tried."""
    if not parser.reads_text() or type(parser).parse_ids is not ToolParser.parse_ids:
        return None
    encoder, unread = Encoder(tokenizer), None
    for turn, starts in _written(tokenizer, options):
        try:
            if any(_reads(parser, parser.decode(encoder.ids(turn[start:]))) for start in starts):
                return None
        except Exception:  # a user's parser, of which its first turn will tell more
            return None
        unread = unread or turn[starts[0] :]
    return unread


def shortened(turn: str) -> str:
    """The beginning of a turn, for messages."""
    return turn.strip()[:120]


def _reads(parser: ToolParser, text: str) -> bool:
    calls = parser.parse(text, _TOOLS).calls
    return (_NAME, _ARGUMENTS) in [(call.name, json.loads(call.arguments)) for call in calls]


def _written(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Conversations that end with a call, and where the turn with the call may begin: where the text leaves that of the
    generation prompt, or behind the question."""
    question: dict[str, Any] = {"role": "user", "content": _QUESTION}
    found = []
    # There are templates that write calls only where there is no content, and such that take arguments as text.
    for content, arguments in product(("", None), (_ARGUMENTS, json.dumps(_ARGUMENTS))):
        asked = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        call: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [asked]}
        prompt, text = (
            _rendered(tokenizer, messages, options, generate)
            for messages, generate in (([question], True), ([question, call], False))
        )
        if prompt and text.count(_NAME) > prompt.count(_NAME):
            found.append((text, [common_beginning(prompt, text), text.rfind(_QUESTION) + len(_QUESTION)]))
    return found


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], options: Mapping[str, Any], generate: bool
) -> str:
    """The text; an empty one where the template refuses the messages."""
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=_TOOLS, tokenize=False, add_generation_prompt=generate, **options
            )
        )
    except Exception:  # a template raises whatever its expressions raise
        return ""
