"""Tests whether a parser can parse the calls that a chat template writes, by rendering one.

Invariant: a parser is rejected only for a call that was actually rendered; a template that renders no calls proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

from etude.chat.encoding import Encoder, common_beginning
from etude.chat.parsers.base import ToolParser
from etude.chat.rendering import PROBE_TOOL, STAND_IN, Renderer
from etude.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ARGUMENTS = {"city": "Saint-Malo", "days": 3}
_QUESTION = "What will it be like?"


def unread_call(parser: ToolParser, tokenizer: PreTrainedTokenizerBase, **options: Any) -> str | None:
    """Renders a call with the tokenizer's chat template and `options`; returns the beginning of the turn if `parser` cannot
    parse it. Returns None if it can, if the template renders no calls, or if the parser cannot be tested."""
    if not parser.reads_text() or type(parser).parse_ids is not ToolParser.parse_ids:
        return None
    encoder, unread = Encoder(tokenizer), None
    for turn, starts in _render_calls(Renderer(tokenizer, options), [PROBE_TOOL], STAND_IN, _ARGUMENTS):
        try:
            if any(_parses_call(parser, parser.decode(encoder.ids(turn[start:]))) for start in starts):
                return None
        except Exception:  # in a user's parser; the first turn of a rollout will raise it
            return None
        unread = unread or turn[starts[0] :].strip()[:120]
    return unread


def _parses_call(parser: ToolParser, text: str) -> bool:
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
    """Returns the ids of a turn that calls the tool `name` of `tools`, written by the chat template or in a its own
    or a well-known format, that `parser` parses to exactly this call; None if there is none."""
    encoder, renderer = Encoder(tokenizer), Renderer(tokenizer, options)
    texts = [turn[start:] for turn, starts in _render_calls(renderer, tools, name, arguments) for start in starts]
    with suppress(ConfigError):  # a user's parser need not write calls
        texts.append(parser.write([(name, arguments)], tools))
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


def _render_calls(
    renderer: Renderer, tools: Sequence[dict[str, Any]], name: str, arguments: Mapping[str, Any]
) -> list[tuple[str, list[int]]]:
    """Renders conversations that end with a call; returns each with the indices at which the turn may begin: where the text
    diverges from the generation prompt, or after the question."""
    question: dict[str, Any] = {"role": "user", "content": _QUESTION}
    rendered = []
    # Some templates write calls only if there is no content, some take arguments as JSON strings.
    for content, given in product(("", None), (dict(arguments), json.dumps(dict(arguments)))):
        asked = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": given}}
        call: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [asked]}
        try:
            prompt = renderer.text_as_given([question], tools, generate=True)
            text = renderer.text_as_given([question, call], tools, generate=False)
        except Exception:  # a template raises whatever its expressions raise
            continue
        if text.count(name) > prompt.count(name):
            rendered.append((text, [common_beginning(prompt, text), text.rfind(_QUESTION) + len(_QUESTION)]))
    return rendered
