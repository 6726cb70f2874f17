"""Parsers of calls written as elements, an opening tag with the function's name, one element per argument, a closing tag:
Qwen3-Coder, Seed-OSS, MiniMax-M2, DeepSeek V3.2, Kimi K3, GLM-4.5.

Invariant: an argument's value is the text between its tags, converted according to the tool's schema or the argument's
tag. These formats have no escapes: an argument ends at its first closing tag, and everything before that tag is text, even
tags of calls or blocks. An argument is unclosed only if another argument's opening tag comes first, or no closing tag
follows at all. Then it ends at the next tag; if that tag opens a call or a block, text and markup cannot be told apart: the
call is an error, and nothing after it is parsed, so that no text becomes a call.

Linear time: an argument is scanned to the next tag that closes or opens one, and parsing continues at or before that tag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from etude.chat.parsers.arguments import (
    Unreadable,
    as_object,
    function_call,
    json_or_text,
    properties_of,
    takes_no_text,
    to_json,
    typed_value,
)
from etude.chat.parsers.base import Calls, ParsedResponse, ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Found, Malformed, attempt, skip_space
from etude.schemas import FunctionCall


class ElementParser(BlockParser):
    """Base class: parses one call; its block's tags are `opening[0]` and `closing[0]`.

    `call` and `argument` are opening tags, each as two patterns: its beginning, which alone makes a malformed call or
    argument, and its rest, with the name as its only group; `call_end` and `argument_end` close them. `form` says in errors
    how to write an argument. `lenient`: closing tags of arguments and calls may be missing before the next one or the end of
    the call. `stray` is a pattern of text that is not allowed between arguments.
    """

    call: ClassVar[tuple[str, str]]
    call_end: ClassVar[str]
    argument: ClassVar[tuple[str, str]]
    argument_end: ClassVar[str]
    form: ClassVar[str]
    lenient: ClassVar[bool] = False
    stray: ClassVar[re.Pattern[str] | None] = None
    _part: ClassVar[re.Pattern[str]]
    _closed: ClassVar[re.Pattern[str]]
    _cut: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.opening:
            return
        ends = [cls.call_end, cls.closing[0], *(closing for _, closing in cls.reasoning_tags)]
        begin, closing = re.escape(cls.opening[0]), "|".join(map(re.escape, ends))
        tag, end = "".join(cls.argument), re.escape(cls.argument_end)
        call, argument = cls.call, cls.argument
        cls._part = re.compile(rf"({argument[0]})(?:{argument[1]})?|({call[0]})(?:{call[1]})?|{begin}|{closing}")
        cls._closed = re.compile(f"{end}|{tag}")
        cls._cut = re.compile(f"({''.join(call)}|{begin})|{end}|{closing}|{tag}")

    @staticmethod
    def key(tag: str) -> str:
        """Returns the argument's name, from the text that its opening tag captured."""
        return tag.strip()

    @staticmethod
    def value(tag: str, text: str, schemas: Mapping[str, Any]) -> Any:
        """Converts an argument's text, without one line break on either side, by the tool's schemas."""
        return typed_value(text.removeprefix("\n").removesuffix("\n"), schemas.get(tag.strip()))

    def read_call(
        self, text: str, name: str | None, start: int, tools: Tools | None
    ) -> tuple[FunctionCall | Malformed, int]:
        """Parses the call of `name` whose arguments begin at `start`; returns it and where parsing continues. `name` is None
        if the opening tag is incomplete."""
        texts: list[tuple[str, str]] = []
        reasons = [] if name is not None else [f"its opening tag is not whole; write its arguments as {self.form}"]
        position = start
        while True:
            part = self._part.search(text, position)
            limit = len(text) if part is None else part.start()
            if self.stray is not None and self.stray.search(text, position, limit):
                reasons.append(f"write each argument as {self.form}")
            if part is None or part[1] is None:
                break
            begin, key = part.end(), part[2]
            end, position, reason = self._end_of_value(text, begin, key)
            reasons += [reason] if reason else []
            texts.append((key or "", text[begin:end]))
        if part is not None and part.group() == self.call_end:
            position = part.end()
        else:
            position = limit
            if not self.lenient:
                reasons.append(f"the function '{_short(name)}' is not closed; end it with {self.call_end}")
        return Malformed(reasons[0]) if reasons else attempt(self._make_call, name, texts, tools), position

    def _end_of_value(self, text: str, start: int, key: str | None) -> tuple[int, int, str | None]:
        """Returns (end of the argument's text, where parsing continues, the error if the call is malformed)."""
        end = None if key is None else self._closed.search(text, start)
        if end is not None and end.group() == self.argument_end:
            return end.start(), end.end(), None
        end = self._cut.search(text, start)
        stop = len(text) if end is None else end.start()
        unclosed = (
            "an argument is not closed" if key is None else f"the argument '{_short(self.key(key))}' is not closed"
        )
        if end is not None and end[1] is not None:
            unread = "before another call begins, and nothing after it was read"
            return stop, len(text), f"{unclosed} {unread}; end it with {self.argument_end}"
        if key is None:
            position = stop if end is None or end.group() != self.argument_end else end.end()
            return stop, position, f"the tag of an argument is not whole; write each argument as {self.form}"
        return stop, stop, None if self.lenient else f"{unclosed}; end it with {self.argument_end}"

    def _make_call(self, name: str, texts: Sequence[tuple[str, str]], tools: Tools | None) -> FunctionCall:
        if not name.strip():
            raise Unreadable("the function has no name")
        schemas = properties_of(tools, name.strip())
        values = as_object((self.key(tag), self.value(tag, text, schemas)) for tag, text in texts)
        return function_call(name.strip(), values)


def write_elements(calls: Calls, call: str, argument: str, call_end: str) -> str:
    """Writes calls with format strings: `call` has the function's {name} and the call's {number}; `argument` has {key},
    {value}, its JSON {type}, and whether it {is_text}, true or false."""
    return "".join(
        call.format(name=name, number=number)
        + "".join(
            argument.format(
                key=key,
                value=value if isinstance(value, str) else to_json(value),
                type=_TYPES.get(type(value), "null"),
                is_text=to_json(isinstance(value, str)),
            )
            for key, value in arguments.items()
        )
        + call_end
        for number, (name, arguments) in enumerate(calls)
    )


_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


def _short(name: str | None) -> str:
    return " ".join((name or "").split())[:100]


class ElementBlockParser(ElementParser):
    """Base class for blocks of one or more calls; `opening` is (tag of a block, tag of a call outside of blocks).

    `alone` matches the opening tag of a call outside of blocks, with the name as the first group and the end of the tag as
    the second, which is missing if the turn ends inside the tag. `written`: the block's tags, and those of
    `write_elements`, as `write` writes them.
    """

    written: ClassVar[tuple[str, str, str, str, str]]
    alone: ClassVar[re.Pattern[str]]

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        begin, call, argument, call_end, end = self.written
        return f"{begin}{write_elements(calls, call, argument, call_end)}{end}"

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        if tag == self.opening[0]:
            return self._read_calls(text, start, tools)
        head = self.alone.match(text, start - len(tag))
        if head is None:
            return None
        if head[2] is None:
            return Block(len(text), [Malformed(f"its tag {tag} is not closed; end it with >")])
        call, end = self.read_call(text, head[1], head.end(), tools)
        after = skip_space(text, end)  # a closing tag without an opening one may follow
        return Block(after + len(self.closing[0]) if text.startswith(self.closing[0], after) else end, [call])

    def _read_calls(self, text: str, start: int, tools: Tools | None) -> Block:
        """Parses the block that begins at `start`."""
        found: Found = []
        position = start
        while (part := self._part.search(text, position)) is not None:
            if part[1] is not None or part[3] is not None:  # an argument outside a call belongs to one without a tag
                begin = part.start() if part[3] is None else part.end()
                call, position = self.read_call(text, part[4], begin, tools)
                found.append(call)
            elif part.group() == self.call_end:
                position = part.end()
            else:
                break
        none = Malformed(f"it holds no function that ends with {self.call_end}")
        if part is not None and part.group() == self.closing[0]:
            return Block(part.end(), found or [none])
        end = len(text) if part is None else part.start()
        if self.lenient:
            return Block(end, found or [none])
        unread = next((each for each in found if isinstance(each, Malformed)), None)
        return Block(end, [unread or Malformed(f"it is not closed; end it with {self.closing[0]}")])


_FUNCTION = "<function="


@ToolParser.register("qwen3_coder", "qwen3_xml")
class Qwen3CoderToolParser(ElementBlockParser):
    """The format of Qwen3-Coder, as elements:

        <tool_call>
        <function=get_weather>
        <parameter=city>
        Beijing
        </parameter>
        </function>
        </tool_call>

    As in vLLM, an argument's closing tag may be missing before the next argument or the end of the function, a function's
    before the next function; several functions may be in one block, and a function may be outside of blocks.
    """

    opening = ("<tool_call>", _FUNCTION)
    closing = ("</tool_call>",)
    call, call_end = (r"<function\b", r"=([^<>\n]*)>"), "</function>"
    argument, argument_end = (r"<parameter\b", r"=([^<>\n]*)>"), "</parameter>"
    form = "<parameter=key>value</parameter> in <function=name>"
    lenient = True
    written = (
        "<tool_call>\n",
        "<function={name}>\n",
        "<parameter={key}>\n{value}\n</parameter>\n",
        "</function>\n",
        "</tool_call>",
    )
    alone = re.compile(rf"{_FUNCTION}([^<>\n]*)(?:(>)|\Z)")


@ToolParser.register("seed_oss", "seed")
class SeedOssToolParser(Qwen3CoderToolParser):
    """The format of Seed-OSS, as elements, with reasoning in `<seed:think>`:

        <seed:tool_call>
        <function=get_weather>
        <parameter=city>Beijing</parameter>
        </function>
        </seed:tool_call>

    A function may be outside of blocks, as in vLLM.
    """

    opening = ("<seed:tool_call>", Qwen3CoderToolParser.opening[1])
    closing = ("</seed:tool_call>",)
    written = (
        "<seed:tool_call>\n",
        "<function={name}>\n",
        "<parameter={key}>{value}</parameter>\n",
        "</function>\n",
        "</seed:tool_call>",
    )
    reasoning_tags = (("<seed:think>", "</seed:think>"), ("<think>", "</think>"))
    special_tokens = ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>")


_NAMED = r" name=[\"']?([^\"'<>\n]*)[\"']?"


@ToolParser.register("minimax_m2", "minimax")
class MinimaxM2ToolParser(ElementBlockParser):
    """The format of MiniMax-M2, as elements; several in one block:

        <minimax:tool_call>
        <invoke name="get_weather">
        <parameter name="city">Beijing</parameter>
        </invoke>
        </minimax:tool_call>

    No closing tag may be missing. As in vLLM, a call may be outside of blocks; an opening tag in content that is followed by
    neither an argument nor a closing tag is text.
    """

    opening = ("<minimax:tool_call>", "<invoke name=")
    closing = ("</minimax:tool_call>",)
    special_tokens = ("<minimax:tool_call>", "</minimax:tool_call>")
    call, call_end = (r"<invoke\b", f"{_NAMED}>"), "</invoke>"
    argument, argument_end = (r"<parameter\b", f"{_NAMED}>"), "</parameter>"
    form = '<parameter name="key">value</parameter> in <invoke name="name">'
    written = (
        "<minimax:tool_call>\n",
        '<invoke name="{name}">\n',
        '<parameter name="{key}">{value}</parameter>\n',
        "</invoke>\n",
        "</minimax:tool_call>",
    )
    alone = re.compile(rf"<invoke{_NAMED}(?:(>)(?=\s*(?:<parameter\b|</invoke>|(?:<[/\w]*)?\Z))|\Z)")


class StatedTypeParser(ElementBlockParser):
    """Base class for arguments whose opening tags say whether they are strings; anything else is JSON."""

    @staticmethod
    def key(tag: str) -> str:
        return tag.split('"')[0].replace("&quot;", '"').replace("&amp;", "&").strip()

    @staticmethod
    def value(tag: str, text: str, schemas: Mapping[str, Any]) -> Any:
        return text if tag.endswith(("string", "true")) else json_or_text(text)


_DSML = "｜DSML｜"
_SAID = r'="([^"<>\n]*" string="(?:true|false))">'


@ToolParser.register("deepseek_v32", "deepseek_v3.2", "deepseek_v4")
class DeepseekV32ToolParser(StatedTypeParser):
    """The format of DeepSeek V3.2, as elements that say whether they are strings; V4 calls the block `tool_calls`:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Beijing</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
    """

    opening = (f"<{_DSML}function_calls>", f"<{_DSML}invoke name=")
    closing = (f"</{_DSML}function_calls>",)
    special_tokens = (_DSML,)
    call, call_end = (rf"<{_DSML}invoke\b", r' name="([^"<>\n]*)">'), f"</{_DSML}invoke>"
    argument, argument_end = (rf"<{_DSML}parameter\b", f" name{_SAID}"), f"</{_DSML}parameter>"
    form = f'<{_DSML}parameter name="key" string="true">value</{_DSML}parameter>'
    written = (
        f"<{_DSML}function_calls>\n",
        f'<{_DSML}invoke name="{{name}}">\n',
        f'<{_DSML}parameter name="{{key}}" string="{{is_text}}">{{value}}</{_DSML}parameter>\n',
        f"</{_DSML}invoke>\n",
        f"</{_DSML}function_calls>",
    )
    alone = re.compile(rf'<{_DSML}invoke name="([^"<>\n]*)"(?:(>)|\Z)')

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        return super().parse(text.replace(f"{_DSML}tool_calls>", f"{_DSML}function_calls>"), tools)


@ToolParser.register("kimi_k3")
class KimiK3ToolParser(StatedTypeParser):
    """The format of Kimi K3, as elements of a channel, whose arguments state their types:

        <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
        <|open|>argument key="city" type="string"<|sep|>Beijing<|close|>argument<|sep|>
        <|close|>call<|sep|><|close|>tools<|sep|>

    Content is in the channel `response` before it, reasoning in `think`.
    """

    opening = ("<|open|>tools<|sep|>", "<|open|>call tool=")
    closing = ("<|close|>tools<|sep|>",)
    glue = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    reasoning_tags = (("<|open|>think<|sep|>", "<|close|>think<|sep|>"), ("<think>", "</think>"))
    special_tokens = ("<|open|>", "<|close|>", "<|sep|>")
    plain_content = False
    call, call_end = (r"<\|open\|>call\b", r' tool="([^"<>\n]*)"[^<>\n]*<\|sep\|>'), "<|close|>call<|sep|>"
    argument = (r"<\|open\|>argument\b", r' key="([^"<>\n]*" type="\w*)"<\|sep\|>')
    argument_end = "<|close|>argument<|sep|>"
    form = '<|open|>argument key="key" type="string"<|sep|>value<|close|>argument<|sep|>'
    written = (
        "<|open|>tools<|sep|>",
        '<|open|>call tool="{name}" index="{number}"<|sep|>',
        '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
        "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
    )
    alone = re.compile(r'<\|open\|>call tool="([^"<>\n]*)"[^<>\n]*(?:(<\|sep\|>)|\Z)')


_NAME = re.compile(r"\s*([^\s<]+)\s*(?=<|\Z)")


@ToolParser.register("glm4_moe", "glm45", "glm47", "glm")
class Glm4MoeToolParser(ElementParser):
    """The format of GLM-4.5 to GLM-4.7, pairs of keys and values:

        <tool_call>get_weather
        <arg_key>city</arg_key>
        <arg_value>Beijing</arg_value>
        </tool_call>

    GLM-4.7 writes the same without line breaks. Strings are not quoted: types come from the tool's schema, and an argument
    that is not in it is decoded as JSON if possible, as upstream. The template has no end-of-turn token: the model ends a
    turn with the first token of the next message, `<|observation|>` after tool calls and `<|user|>` otherwise.
    """

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)
    glue = ("<|observation|>", "<|user|>")
    special_tokens = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    stop_tokens = ("<|observation|>", "<|user|>")
    call, call_end = ("<tool_call>", "([^<]*)"), "</tool_call>"
    argument, argument_end = ("<arg_key>", r"([^<]*)</arg_key>\s*<arg_value>"), "</arg_value>"
    form = "<arg_key>key</arg_key><arg_value>value</arg_value>"
    stray = re.compile(r"\S")

    @staticmethod
    def value(tag: str, text: str, schemas: Mapping[str, Any]) -> Any:
        """Converts an argument's text by the tool's schemas, or as JSON; it may be JSON that is encoded twice."""
        schema = schemas.get(tag.strip())
        if tag.strip() not in schemas:
            return json_or_text(text)
        value = typed_value(text, schema)
        if value == text and takes_no_text(schema) and isinstance(written_twice := json_or_text(text), str):
            return typed_value(written_twice, schema)
        return value

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        argument = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        return write_elements(calls, "<tool_call>{name}\n", argument, "</tool_call>")

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        name = _NAME.match(text, start)
        call, end = self.read_call(text, name and name[1], start if name is None else name.end(), tools)
        return Block(end, [call if name else Malformed("the function's name must come first, alone in its line")])
