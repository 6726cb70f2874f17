"""Parsers of calls written as JSON objects with the function's name in them: Hermes and Qwen, InternLM 2, Phi-4-mini,
Cohere, Granite, xLAM, GigaChat 3, Llama 3, Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from etude.chat.parsers.arguments import (
    SCALARS,
    Unreadable,
    call_of,
    decode,
    function_call,
    json_end,
    json_objects,
    to_json,
)
from etude.chat.parsers.base import CallForm, Calls, ToolParser, Tools
from etude.chat.parsers.blocks import (
    Block,
    BlockParser,
    Found,
    Malformed,
    Pieces,
    Thought,
    any_of,
    attempt,
    read_each,
    skip_space,
    until,
)
from etude.schemas import FunctionCall

_KEYS_OF_A_CALL = rf'\{{\s*(?:"name"|{SCALARS}"arguments")\s*:'
_LIST_OF_CALLS = re.compile(rf"\s*\[\s*{_KEYS_OF_A_CALL}")  # beginning of a JSON list; the parser checks the rest
_ANOTHER = re.compile(r"\s*,\s*\{")


class JsonBlockParser(BlockParser):
    """Base class for JSON blocks: an opening tag, an object or a list of objects, and a closing tag.

    The block ends where its JSON ends, so that tags inside JSON strings are text. A block without a closing tag is
    malformed, unless `may_stay_open`: then it ends with its JSON, if no comma and further object follow.

    `written` is what `write` puts before and after a block's JSON, which is a list of all calls if `writes_list`.
    """

    may_stay_open: ClassVar[bool] = False
    written: ClassVar[tuple[str, str]]
    writes_list: ClassVar[bool] = False
    names: ClassVar[tuple[str, ...]] = ("name",)
    arguments: ClassVar[tuple[str, ...]] = ("arguments",)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        begin = skip_space(text, start)
        end = json_end(text, begin)
        if end is not None:
            after = skip_space(text, end)
            for closing in self.closing:
                if text.startswith(closing, after):
                    return Block(after + len(closing), self.read_calls(text[begin:end]))
            if self.may_stay_open and _ANOTHER.match(text, end) is None:
                return Block(end, self.read_calls(text[begin:end]))
        body, end = until(text, start, self._ends, self.closing)
        if body is None and not self.may_stay_open:
            return Block(end, [Malformed(f"it is not closed; end it with {self.closing[0]}")])
        return Block(end, self.read_calls(text[start:end] if body is None else body))

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        begin, end = self.written
        objects = [{self.names[0]: name, self.arguments[0]: dict(arguments)} for name, arguments in calls]
        return "\n".join(f"{begin}{to_json(each)}{end}" for each in ([objects] if self.writes_list else objects))

    def read_calls(self, body: str) -> Found:
        return read_each(body, lambda value: call_of(value, self.names, self.arguments))


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
class GraniteToolParser(JsonBlockParser):
    """The formats of IBM's Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`.

    Granite 3.1 writes `<tool_call>`, Granite 4 closes the block with `</tool_call>`, and the 20B function-calling model
    writes `<function_call> {…}`, one object per tag; all are accepted. A turn may begin with the list, without a tag.
    """

    opening = ("<|tool_call|>", "<tool_call>", "<function_call>")
    closing = ("</tool_call>", "</function_call>")
    may_stay_open = True
    special_tokens = opening
    call_forms = (CallForm(_CALL, "<|tool_call|>[", ", ", "]"), _TAGGED)
    bare = _LIST_OF_CALLS
    written, writes_list = ("<|tool_call|>", ""), True


_LIKE_A_CALL = re.compile(rf"\s*(?:json\s+)?(?:\[\s*)?{_KEYS_OF_A_CALL}")


@ToolParser.register("xlam")
class XlamToolParser(JsonBlockParser):
    """The formats of Salesforce's xLAM: a JSON list `[{"name": …, "arguments": {…}}, …]`.

    The list may be at the start of the turn, after reasoning, in a fenced block, after `[TOOL_CALLS]`, or in `<tool_call>`.
    A fenced block that does not begin like a call is text.
    """

    opening = ("```json", "```", "[TOOL_CALLS]", "<tool_call>")
    closing = ("```", "</tool_call>")
    may_stay_open = True
    special_tokens = ("[TOOL_CALLS]",)
    call_forms = (CallForm(_CALL, "[", ", ", "]"),)
    bare = _LIST_OF_CALLS
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


_TAG, _BRACE = "<|python_tag|>", "{"
_PYTHON_TAG = any_of(_TAG)
_NEXT = any_of(_TAG, *(tag for pair in BlockParser.reasoning_tags for tag in pair))
_SEPARATOR = re.compile(r"[\s;,]*")
_BARE_CALL = re.compile(r'\s*\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
_CALL_HEAD = re.compile(rf'\{{\s*{SCALARS}"name"\s*:\s*"[^"\\]{{1,200}}"\s*,\s*{SCALARS}"(?:parameters|arguments)"\s*:')


@ToolParser.register("llama3_json", "llama3")
class Llama3JsonToolParser(BlockParser):
    """The format of Llama 3: `{"name": …, "parameters": {…}}`, alone or after `<|python_tag|>`.

    Several calls are separated by `;`. A turn that begins with such an object is a call or an error. As in vLLM, objects
    with a name and parameters inside content are calls, too, with keys in any order; the text around them stays content.
    Any other object is content that happens to be JSON, including everything in it. `arguments` is accepted instead of
    `parameters`.
    """

    opening = (_TAG, _BRACE)
    special_tokens = (_TAG,)
    stop_tokens = ("<|eom_id|>",)
    call_forms = (CallForm('{"name": "NAME", "parameters": ARGUMENTS}'),)
    bare = _BARE_CALL

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        return "; ".join(to_json({"name": name, "parameters": dict(arguments)}) for name, arguments in calls)

    def read_pieces(self, text: str, tools: Tools | None, closing_of: Mapping[str, str]) -> Pieces:
        """See `BlockParser.read_pieces`; separators between calls are dropped."""
        pieces: Pieces = []
        waiting: Pieces = []
        for piece in super().read_pieces(text, tools, closing_of):
            if not isinstance(piece, str):
                pieces.append(piece)
                waiting = []
            elif (
                pieces
                and not isinstance(pieces[-1], str)
                and not isinstance(piece, Thought)
                and _SEPARATOR.fullmatch(piece)
            ):
                waiting.append(piece)
            else:
                pieces += [*waiting, piece]
                waiting = []
        return [*pieces, *waiting]

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        if tag == _BRACE:
            return self._read_among_words(text, start - len(tag))
        found: Found = []
        position = start
        while (end := json_end(text, begin := _SEPARATOR.match(text, position).end())) is not None:  # type: ignore[union-attr]
            found.append(attempt(_read_call, text[begin:end]))
            position = end
        if found and not _BARE_CALL.match(text, begin):
            return Block(position, found)
        _, end = until(text, position, _PYTHON_TAG, ())
        return Block(end, [*found, attempt(_read_call, text[skip_space(text, begin) : end])])

    def _read_among_words(self, text: str, start: int) -> Block:
        """Parses the object at `start` inside content. What is inside a valid JSON object is not searched for calls; if it
        is not valid JSON, for example because of doubled braces, objects in it that begin like calls are parsed."""
        whole, unfinished, end = json_objects(text, start)
        cut = next((begin for begin in unfinished if _CALL_HEAD.match(text, begin)), None)
        pieces: Pieces = []
        position = outside = start
        for begin, close in whole:
            if begin < position or (cut is not None and begin >= cut):
                continue
            value = None  # inside an invalid object, only the head is checked, so that each text is decoded once
            if begin >= outside:
                value, outside = _loads(text[begin:close]), close
            is_call = value is not None and "name" in value and ("parameters" in value or "arguments" in value)
            if is_call or (value is None and _CALL_HEAD.match(text, begin)):
                pieces += [text[position:begin], attempt(_read_call, text[begin:close])]
                position = close
            elif value is not None:
                pieces.append(text[position:close])
                position = close
        if cut is None:
            return Block(end, [*pieces, text[position:end]])
        _, end = until(text, end, _NEXT, ())
        return Block(end, [*pieces, text[position:cut], attempt(_read_call, text[cut:end])])


def _loads(text: str) -> dict[str, Any] | None:
    """Decodes what begins with a brace; unlike `decode` also an object that cannot be a call, as a key is given twice."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_call(body: str) -> FunctionCall:
    if not body.startswith("{"):
        raise Unreadable('it must be a JSON object {"name": "...", "parameters": {...}}')
    return call_of(decode(body), arguments=("parameters", "arguments"))


_NAMED_HEAD = re.compile(r"[\s,]*([\w.-]+)\s*(?:\[CALL_ID\](\w*))?\s*(?:\[ARGS\])?(?=\s*\{)")

_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")


@ToolParser.register("mistral")
class MistralToolParser(BlockParser):
    """The formats of Mistral's models, with reasoning in `[THINK]`:

        [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Beijing"}}, …]
        [TOOL_CALLS]get_weather{"city": "Beijing"}
        [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Beijing"}

    Tokenizers up to version 7 use the first one, later ones (from version 11) the others. Several calls may follow one tag.
    """

    opening = ("[TOOL_CALLS]",)
    reasoning_tags = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    special_tokens = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
    call_forms = (
        CallForm("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between=""),
        CallForm('{"name": "NAME", "arguments": ARGUMENTS}', "[TOOL_CALLS][", ", ", "]"),
    )

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        return f"[TOOL_CALLS]{to_json([{'name': name, 'arguments': dict(given)} for name, given in calls])}"

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        begin = skip_space(text, start)
        if text.startswith(("[", "{"), begin) and not text.startswith(self.opening[0], begin):
            end = json_end(text, begin)
            if end is not None:
                return Block(end, read_each(text[begin:end], _call_of_object))
        found: Found = []
        position = start
        while named := _NAMED_HEAD.match(text, position):
            begin = skip_space(text, named.end())
            end = json_end(text, begin)
            if end is None:
                break
            found.append(attempt(_call_of_name, named[1], text[begin:end], named[2]))
            position = end
        if found and not named:
            return Block(position, found)
        _, end = until(text, position, self._ends, ())
        return Block(end, [*found, attempt(_unreadable, text[position:end])])


def _call_of_object(value: object) -> FunctionCall:
    call = call_of(value, arguments=("arguments", "parameters"))
    return _with_id(call, value.get("id")) if isinstance(value, dict) else call


def _call_of_name(name: str, arguments: str, identifier: str | None) -> FunctionCall:
    return _with_id(function_call(name, decode(arguments)), identifier)


def _with_id(call: FunctionCall, identifier: object) -> FunctionCall:
    """Adds the call's id, if it is one that Mistral's templates accept in messages."""
    fits = isinstance(identifier, str) and _CALL_ID.fullmatch(identifier) is not None
    return call.model_copy(update={"id": identifier}) if fits else call


def _unreadable(body: str) -> FunctionCall:
    if body.lstrip().startswith(("[", "{")):
        decode(body)
    raise Unreadable('it must be a name and its JSON arguments, or a JSON list of {"name": ..., "arguments": {...}}')
