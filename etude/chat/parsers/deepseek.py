"""The formats of DeepSeek: V3 and R1, and V3.1 (`｜` and `▁` are no ASCII)."""

from __future__ import annotations

import re

from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Malformed, attempt, skip_space, until
from etude.chat.parsers.json_call import Unreadable, decode, function_call, json_end
from etude.schemas import FunctionCall

_BARS = ("｜", "|")
_SEPARATORS = tuple(f"<{bar}tool▁sep{bar}>" for bar in _BARS)
_HEAD = re.compile(r"[^`{<]*<[｜|]tool▁sep[｜|]>([^`{<]*)```(?:json)?")


class DeepseekToolParser(BlockParser):
    """What the DeepSeek formats share: the tags around a call, and JSON arguments after a head that names it."""

    opening = tuple(f"<{bar}tool▁call▁begin{bar}>" for bar in _BARS)
    closing = tuple(f"<{bar}tool▁call▁end{bar}>" for bar in _BARS)
    glue = tuple(f"<{bar}tool▁calls▁{edge}{bar}>" for bar in _BARS for edge in ("begin", "end"))
    sections = tuple(f"<{bar}tool▁calls▁begin{bar}>" for bar in _BARS)
    special_tokens = (*opening, *closing, *glue, *_SEPARATORS)
    head: re.Pattern[str] = _HEAD
    fence: str = "```"

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`."""
        head = self.head.match(text, start)
        if head is not None:
            begin = skip_space(text, head.end())
            end = json_end(text, begin)
            after = len(text) if end is None else skip_space(text, end)
            if self.fence and text.startswith(self.fence, after):
                after = skip_space(text, after + len(self.fence))
            closing = next((each for each in self.closing if text.startswith(each, after)), None)
            if closing is not None:
                return Block(after + len(closing), [attempt(_read_call, head[1], text[begin:end])])
        body, end = until(text, start, self._ends, self.closing)
        if body is None:
            return Block(end, [Malformed(f"it is not closed; end it with {self.closing[0]}")])
        head = self.head.match(body)
        if head is None:
            return Block(end, [Malformed(f"it must begin with the function's name and {_SEPARATORS[0]}")])
        return Block(end, [attempt(_read_call, head[1], body[head.end() :].strip().removesuffix(self.fence))])


def _read_call(name: str, arguments: str) -> FunctionCall:
    if not name.strip():
        raise Unreadable("the function has no name")
    return function_call(name.strip(), decode(arguments))


@ToolParser.register("deepseek_v3", "deepseek_r1", "deepseek")
class DeepseekV3ToolParser(DeepseekToolParser):
    """The format of DeepSeek-V3 and R1 (`｜` and `▁` are no ASCII; the documents write `|`, which is read, too):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Beijing"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    """


@ToolParser.register("deepseek_v31", "deepseek_v3.1")
class DeepseekV31ToolParser(DeepseekToolParser):
    """The format of DeepSeek-V3.1 (`｜` and `▁` are no ASCII):

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Beijing"}<｜tool▁call▁end｜>
        <｜tool▁calls▁end｜>

    The documents write it with `|` and line breaks, which is read, too.
    """

    head = re.compile(r"([^`{<]*)<[｜|]tool▁sep[｜|]>")
    fence = ""
