"""Parsers of JSON calls between tags: Hermes and Qwen, InternLM 2, Phi-4-mini, Cohere, Granite, xLAM, GigaChat 3."""

from __future__ import annotations

import re

from etude.chat.grammar import CallForm
from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import KEYS_OF_A_CALL, LIST_OF_CALLS, BareParser, Block, Found, JsonBlockParser, attempt
from etude.chat.parsers.json_call import call_of, decode
from etude.schemas import FunctionCall

_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
_TAGGED = CallForm(f"<tool_call>\n{_CALL}\n</tool_call>", between="\n")


@ToolParser.register("hermes", "qwen")
class HermesToolParser(JsonBlockParser):
    """The Hermes format, which Qwen uses too: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

    One object per block; only valid JSON is accepted, nothing is repaired. A tag inside a JSON string is text.
    """

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)
    call_forms = (_TAGGED,)
    written = ("<tool_call>\n", "\n</tool_call>")

    def read_calls(self, body: str) -> Found:
        """Parses the single call of a block."""
        return [attempt(lambda: call_of(decode(body)))]


_PLUGIN = "<|plugin|>"


@ToolParser.register("internlm2", "internlm")
class Internlm2ToolParser(JsonBlockParser):
    """The format of InternLM 2 and 2.5: `<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>`.

    The closing tag ends a turn, and may be missing, as upstream. `arguments` is accepted instead of `parameters`.
    """

    opening = ("<|action_start|>",)
    closing = ("<|action_end|>",)
    may_stay_open = True
    arguments = ("parameters", "arguments")
    special_tokens = ("<|action_start|>", "<|action_end|>", _PLUGIN)
    stop_tokens = ("<|action_end|>",)
    call_forms = (
        CallForm('<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ARGUMENTS}', after="<|action_end|>"),
    )
    written = (f"<|action_start|>{_PLUGIN}\n", "<|action_end|>")

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`; a block without the plug-in tag (the interpreter's) is text."""
        return super().read_block(text, tag, start + len(_PLUGIN), tools) if text.startswith(_PLUGIN, start) else None


_WORD = "functools"


@ToolParser.register("phi4", "phi4_mini_json")
class Phi4ToolParser(JsonBlockParser):
    """The formats of Phi-4-mini: `functools[{"name": …, "arguments": {…}}, …]`, and `<|tool_call|>[…]<|/tool_call|>`.

    `parameters` is accepted instead of `arguments`, as upstream. The word `functools` without a bracket is text.
    """

    opening = (_WORD, "<|tool_call|>")
    closing = ("<|/tool_call|>",)
    may_stay_open = True
    arguments = ("arguments", "parameters")
    special_tokens = ("<|tool_call|>", "<|/tool_call|>")
    call_forms = (
        CallForm(_CALL, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
        CallForm(_CALL, "functools[", ", ", "]"),
    )
    written, writes_list = (_WORD, ""), True

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        is_word = tag == _WORD and not text.startswith("[", start)
        return None if is_word else super().read_block(text, tag, start, tools)


_NO_TOOL = ("directly-answer", "directly_answer")


@ToolParser.register("cohere", "command", "cohere_command4")
class CohereToolParser(JsonBlockParser):
    """The format of Cohere's Command models, with reasoning in `<|START_THINKING|>`:

        <|START_ACTION|>[
            {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Beijing"}}
        ]<|END_ACTION|>

    Command R's older `Action: ```json […] ``` ` is accepted too; its `directly-answer` is not a call.
    """

    opening = ("<|START_ACTION|>", "Action: ```json", "Action:```json")
    closing = ("<|END_ACTION|>", "```")
    glue = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    reasoning_tags = (("<|START_THINKING|>", "<|END_THINKING|>"),)
    names = ("tool_name", "name")
    arguments = ("parameters", "arguments")
    plain_content = False
    written, writes_list = ("<|START_ACTION|>", "<|END_ACTION|>"), True
    special_tokens = ("<|START_ACTION|>", "<|END_ACTION|>", *glue, "<|START_THINKING|>", "<|END_THINKING|>")

    def read_calls(self, body: str) -> Found:
        """Parses the actions of one block; skips `directly-answer`."""
        found = super().read_calls(body)
        return [each for each in found if not (isinstance(each, FunctionCall) and each.name in _NO_TOOL)]


@ToolParser.register("granite")
class GraniteToolParser(BareParser, JsonBlockParser):
    """The formats of IBM's Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`.

    Granite 3.1 writes `<tool_call>`, Granite 4 closes the block with `</tool_call>`, and the 20B function-calling model
    writes `<function_call> {…}`, one object per tag; all are accepted. A turn may begin with the list, without a tag.
    """

    opening = ("<|tool_call|>", "<tool_call>", "<function_call>")
    closing = ("</tool_call>", "</function_call>")
    may_stay_open = True
    special_tokens = opening
    call_forms = (CallForm(_CALL, "<|tool_call|>[", ", ", "]"), _TAGGED)
    bare = LIST_OF_CALLS
    written, writes_list = ("<|tool_call|>", ""), True


_LIKE_A_CALL = re.compile(rf"\s*(?:json\s+)?(?:\[\s*)?{KEYS_OF_A_CALL}")


@ToolParser.register("xlam")
class XlamToolParser(BareParser, JsonBlockParser):
    """The formats of Salesforce's xLAM: a JSON list `[{"name": …, "arguments": {…}}, …]`.

    The list may be at the start of the turn, after reasoning, in a fenced block, after `[TOOL_CALLS]`, or in `<tool_call>`.
    A fenced block that does not begin like a call is text.
    """

    opening = ("```json", "```", "[TOOL_CALLS]", "<tool_call>")
    closing = ("```", "</tool_call>")
    may_stay_open = True
    special_tokens = ("[TOOL_CALLS]",)
    call_forms = (CallForm(_CALL, "[", ", ", "]"),)
    bare = LIST_OF_CALLS
    written, writes_list = ("", ""), True

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        if tag.startswith("`") and not _LIKE_A_CALL.match(text, start):
            return None
        return super().read_block(text, tag, start, tools)


@ToolParser.register("gigachat3", "gigachat")
class GigaChat3ToolParser(JsonBlockParser):
    """The format of GigaChat 3, a separate message: `function call<|role_sep|>\\n{"name": …, "arguments": {…}}`, sometimes
    `<|function_call|>{…}`."""

    opening = ("function call<|role_sep|>", "<|function_call|>")
    closing = ("<|message_sep|>",)
    glue = ("<|message_sep|>",)
    may_stay_open = True
    special_tokens = ("<|role_sep|>", "<|message_sep|>", "<|function_call|>")
    call_forms = (CallForm(_CALL, "function call<|role_sep|>\n"),)
    written = ("function call<|role_sep|>\n", "<|message_sep|>")
