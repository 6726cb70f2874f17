"""Parsers of calls written as a head with the function's name, and its JSON arguments: DeepSeek V3 and R1, DeepSeek V3.1,
Kimi-K2."""

from __future__ import annotations

import re
from typing import ClassVar

from etude.chat.parsers.arguments import Unreadable, decode, function_call, json_end, names_of, to_json
from etude.chat.parsers.base import CallForm, Calls, ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Malformed, attempt, skip_space, until
from etude.schemas import FunctionCall


class HeadedJsonParser(BlockParser):
    """Base class for blocks of a head with the function's name, and its JSON arguments, with which the block ends.

    `head` matches the head, with the name as its only group; `head_form` describes it in errors; `fence` may come between
    the JSON and the closing tag. `written` is what `write` puts before a call's JSON, with the function's `name` and the
    call's `number`, and after it; all calls stand in a section.
    """

    head: ClassVar[re.Pattern[str]]
    written: ClassVar[tuple[str, str]]
    head_form: ClassVar[str]
    fence: ClassVar[str] = ""

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        before, after = self.written
        blocks = [
            f"{self.opening[0]}{before.format(name=name, number=n)}{to_json(dict(arguments))}{after}{self.closing[0]}"
            for n, (name, arguments) in enumerate(calls)
        ]
        return f"{self.glue[0]}{''.join(blocks)}{self.glue[1]}"

    def read_call(self, named: str, arguments: str, tools: Tools | None) -> FunctionCall:
        """Builds a block's call from its head and arguments; raises `Unreadable` if they are malformed."""
        raise NotImplementedError

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        head = self.head.match(text, start)
        if head is not None:
            begin = skip_space(text, head.end())
            end = json_end(text, begin)
            after = len(text) if end is None else skip_space(text, end)
            if self.fence and text.startswith(self.fence, after):
                after = skip_space(text, after + len(self.fence))
            closing = next((each for each in self.closing if text.startswith(each, after)), None)
            if closing is not None:
                return Block(after + len(closing), [attempt(self.read_call, head[1], text[begin:end], tools)])
        body, end = until(text, start, self._ends, self.closing)
        if body is None:
            return Block(end, [Malformed(f"it is not closed; end it with {self.closing[0]}")])
        head = self.head.match(body)
        if head is None:
            return Block(end, [Malformed(f"it must begin with {self.head_form}")])
        arguments = body[head.end() :].strip().removesuffix(self.fence)
        return Block(end, [attempt(self.read_call, head[1], arguments, tools)])


_BARS = ("｜", "|")
_SEPARATORS = tuple(f"<{bar}tool▁sep{bar}>" for bar in _BARS)


class DeepseekToolParser(HeadedJsonParser):
    """Base class of the DeepSeek formats: tags around a call, and JSON arguments after a head with the function's name."""

    opening = tuple(f"<{bar}tool▁call▁begin{bar}>" for bar in _BARS)
    closing = tuple(f"<{bar}tool▁call▁end{bar}>" for bar in _BARS)
    glue = tuple(f"<{bar}tool▁calls▁{edge}{bar}>" for bar in _BARS for edge in ("begin", "end"))
    sections = tuple(f"<{bar}tool▁calls▁begin{bar}>" for bar in _BARS)
    special_tokens = (*opening, *closing, *glue, *_SEPARATORS)
    head = re.compile(r"[^`{<]*<[｜|]tool▁sep[｜|]>([^`{<]*)```(?:json)?")
    head_form = f"the function's name and {_SEPARATORS[0]}"
    fence = "```"
    written = (f"function{_SEPARATORS[0]}{{name}}\n```json\n", "\n```")

    def read_call(self, named: str, arguments: str, tools: Tools | None) -> FunctionCall:
        if not named.strip():
            raise Unreadable("the function has no name")
        return function_call(named.strip(), decode(arguments))


@ToolParser.register("deepseek_v3", "deepseek_r1", "deepseek")
class DeepseekV3ToolParser(DeepseekToolParser):
    """The format of DeepSeek-V3 and R1 (`｜` and `▁` are not ASCII; the documentation has `|`, which is accepted too):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Beijing"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    """

    call_forms = (
        CallForm(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "\n",
            "<｜tool▁calls▁end｜>",
        ),
    )


@ToolParser.register("deepseek_v31", "deepseek_v3.1")
class DeepseekV31ToolParser(DeepseekToolParser):
    """The format of DeepSeek-V3.1 (`｜` and `▁` are not ASCII):

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Beijing"}<｜tool▁call▁end｜>
        <｜tool▁calls▁end｜>

    The documentation has `|` and line breaks, which are accepted too.
    """

    head = re.compile(r"([^`{<]*)<[｜|]tool▁sep[｜|]>")
    fence = ""
    call_forms = (
        CallForm(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "",
            "<｜tool▁calls▁end｜>",
        ),
    )
    written = (f"{{name}}{_SEPARATORS[0]}", "")


_ARGUMENTS = "<|tool_call_argument_begin|>"
_IDENTIFIER = re.compile(r"(?:functions\.)?([^\s:]+):[0-9]+")


@ToolParser.register("kimi_k2", "kimi")
class KimiK2ToolParser(HeadedJsonParser):
    """The format of Kimi-K2, in which the call's id contains the function's name:

        <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
        {"city": "Beijing"}<|tool_call_end|><|tool_calls_section_end|>

    In `functions.a.b:0` the name is `a.b`, or, as in older versions of vLLM, `b` if only that is an available tool.
    """

    opening = ("<|tool_call_begin|>",)
    closing = ("<|tool_call_end|>",)
    glue = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    sections = ("<|tool_calls_section_begin|>",)
    reasoning_tags = (("<think>", "</think>"), ("◁think▷", "◁/think▷"))
    special_tokens = (*opening, *closing, *glue, _ARGUMENTS)
    call_forms = (
        CallForm(f"<|tool_call_begin|>functions.NAME:0{_ARGUMENTS}ARGUMENTS<|tool_call_end|>", glue[0], None, glue[1]),
    )

    head = re.compile(r"([^<]*)<\|tool_call_argument_begin\|>")
    head_form = f"functions.name:0 and {_ARGUMENTS}"
    written = (f"functions.{{name}}:{{number}}{_ARGUMENTS}", "")

    def read_call(self, named: str, arguments: str, tools: Tools | None) -> FunctionCall:
        match = _IDENTIFIER.fullmatch(named.strip())
        if match is None:
            raise Unreadable("the call must be named functions.name:0, with the number of the call")
        name, last = match[1], match[1].rsplit(".", 1)[-1]
        offered = names_of(tools)
        if name not in offered and last in offered:
            name = last
        return function_call(name, decode(arguments)).model_copy(update={"id": match[0]})
