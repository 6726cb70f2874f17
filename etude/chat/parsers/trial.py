"""Whether a parser reads the calls that a chat template writes: tested by rendering one.

Invariant: the verdict rests on a rendering. A template that renders no calls, or not these, gives no verdict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    for turn, starts in _written(Renderer(tokenizer, options), [PROBE_TOOL], STAND_IN, _ARGUMENTS):
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


async def write_call(
    parser: ToolParser,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    name: str,
    arguments: Mapping[str, Any],
    **options: Any,
) -> list[int] | None:
    """The ids of a turn that calls the tool `name` of `tools`, as the chat template writes it or in a well-known format,
    such that `parser` reads exactly this call; None if it reads none of them."""
    encoder, renderer = Encoder(tokenizer), Renderer(tokenizer, options)
    texts = [turn[start:] for turn, starts in _written(renderer, tools, name, arguments) for start in starts]
    texts.append(f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>")
    texts += [f"<search>{value}</search>" for value in arguments.values() if isinstance(value, str)]
    for text in texts:
        ids = encoder.ids(text)
        try:
            parsed = await parser.parse_ids(ids, list(tools))
            read = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
        except Exception:  # a user's parser may raise anything
            continue
        if read == [(name, dict(arguments))] and not parsed.errors:
            return ids
    return None


def _written(
    renderer: Renderer, tools: Sequence[dict[str, Any]], name: str, arguments: Mapping[str, Any]
) -> list[tuple[str, list[int]]]:
    """Conversations that end with a call, and where the turn with the call may begin: where the text leaves that of the
    generation prompt, or after the question."""
    question: dict[str, Any] = {"role": "user", "content": _QUESTION}
    found = []
    # There are templates that write calls only where there is no content, and such that take arguments as text.
    for content, given in product(("", None), (dict(arguments), json.dumps(dict(arguments)))):
        asked = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": given}}
        call: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [asked]}
        try:
            prompt = renderer.text_as_given([question], tools, generate=True)
            text = renderer.text_as_given([question, call], tools, generate=False)
        except Exception:  # a template raises whatever its expressions raise
            continue
        if text.count(name) > prompt.count(name):
            found.append((text, [common_beginning(prompt, text), text.rfind(_QUESTION) + len(_QUESTION)]))
    return found
