"""Whether a parser reads the calls that a chat template writes: tested by rendering one.

Invariant: the verdict rests on a rendering. A template that renders no calls, or not these, gives no verdict.
"""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

from etude.chat.encoding import Encoder, common_beginning
from etude.chat.parsers.base import ToolParser
from etude.chat.rendering import PROBE_TOOL, STAND_IN, Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ARGUMENTS = {"city": "Saint-Malo", "days": 3}
_QUESTION = "What will it be like?"


def unread_call(parser: ToolParser, tokenizer: PreTrainedTokenizerBase, **options: Any) -> str | None:
    """The beginning of a turn that the tokenizer's chat template, rendered with `options`, writes with a call in it which
    `parser` does not read; None where it reads the call, the template writes none, or the parser cannot be tried."""
    if not parser.reads_text() or type(parser).parse_ids is not ToolParser.parse_ids:
        return None
    encoder, unread = Encoder(tokenizer), None
    for turn, starts in _written(Renderer(tokenizer, options)):
        try:
            if any(_reads(parser, parser.decode(encoder.ids(turn[start:]))) for start in starts):
                return None
        except Exception:  # a user's parser; its first turn will show the error
            return None
        unread = unread or turn[starts[0] :].strip()[:120]
    return unread


def _reads(parser: ToolParser, text: str) -> bool:
    calls = parser.parse(text, [PROBE_TOOL]).calls
    return (STAND_IN, _ARGUMENTS) in [(call.name, json.loads(call.arguments)) for call in calls]


def _written(renderer: Renderer) -> list[tuple[str, list[int]]]:
    """Conversations that end with a call, and where the turn with the call may begin: where the text leaves that of the
    generation prompt, or after the question."""
    question: dict[str, Any] = {"role": "user", "content": _QUESTION}
    found = []
    # There are templates that write calls only where there is no content, and such that take arguments as text.
    for content, arguments in product(("", None), (_ARGUMENTS, json.dumps(_ARGUMENTS))):
        asked = {"id": "call00001", "type": "function", "function": {"name": STAND_IN, "arguments": arguments}}
        call: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [asked]}
        try:
            prompt = renderer.text_as_given([question], [PROBE_TOOL], generate=True)
            text = renderer.text_as_given([question, call], [PROBE_TOOL], generate=False)
        except Exception:  # a template raises whatever its expressions raise
            continue
        if text.count(STAND_IN) > prompt.count(STAND_IN):
            found.append((text, [common_beginning(prompt, text), text.rfind(_QUESTION) + len(_QUESTION)]))
    return found
