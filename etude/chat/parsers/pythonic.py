"""Parsers of the pythonic formats of Llama 3.2, Llama 4, LFM2, Olmo 3 and others:
`[get_weather(city="Beijing"), search(topk=3)]`.

Llama 4 may put `<|python_start|>` and `<|python_end|>` around the list. Without a tag the turn must begin with the list.
Values are Python literals, or JSON's true, false and null; nothing is evaluated. Arguments must be keyword arguments.
"""

from __future__ import annotations

import ast
import re
from typing import ClassVar

from etude.chat.parsers.base import Calls, ToolParser, Tools
from etude.chat.parsers.blocks import BareParser, Block, BlockParser, Found, Malformed, attempt, skip_space, until
from etude.chat.parsers.json_call import Unreadable, function_call
from etude.chat.parsers.literal import parse_expression, read_literal
from etude.schemas import FunctionCall

_TOKEN = re.compile(
    r"""[\s\w.,:=+-]+|"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'|[()\[\]{}]""",
    re.DOTALL,
)
_STEP = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@ToolParser.register("pythonic", "llama4_pythonic", "llama4")
class PythonicToolParser(BareParser):
    """Parser of a list of Python calls."""

    opening = ("<|python_start|>",)
    closing = ("<|python_end|>",)
    special_tokens = (*opening, *closing)
    bare = re.compile(r"\s*\[\s*[A-Za-z_][\w.-]*\s*\(")
    written: ClassVar[tuple[str, str]] = ("", "")

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        begin, end = self.written
        return f"{begin}[{', '.join(write_python_calls(calls))}]{end}"

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        begin = skip_space(text, start)
        end = _bracket_end(text, begin) if text.startswith("[", begin) else None
        if end is not None:
            after = skip_space(text, end)
            closed = text.startswith(self.closing[0], after)
            return Block(after + len(self.closing[0]) if closed else end, read_python_calls(text[begin:end]))
        body, end = until(text, start, self._ends, self.closing)
        return Block(end, read_python_calls((text[start:end] if body is None else body).strip()))


def write_python_calls(calls: Calls) -> list[str]:
    """Writes each call as Python, as `read_python_call` reads it."""
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]


def read_python_calls(body: str) -> Found:
    """Parses a Python list of calls; returns a single `Malformed` if it is none."""
    try:
        tree = parse_expression(body)
    except Unreadable as reason:
        return [Malformed(str(reason))]
    if not isinstance(tree, ast.List) or not tree.elts:
        return [Malformed('it must be a list of calls such as [name(key="value")]')]
    return [attempt(read_python_call, each) for each in tree.elts]


def read_python_call(node: ast.AST | None) -> FunctionCall:
    """Converts the syntax tree of a call.

    Raises:
        Unreadable: it is not a call, an argument has no name, or a value is not a literal.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise Unreadable('it must be a call such as name(key="value")')
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Unreadable(f"the arguments of '{name[:100]}' must be named: {name[:100]}(key=value)")
    try:
        return function_call(name, {str(keyword.arg): read_literal(keyword.value) for keyword in node.keywords})
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None


@ToolParser.register("lfm2")
class Lfm2ToolParser(PythonicToolParser):
    """The format of LFM2: a list of Python calls between `<|tool_call_start|>` and `<|tool_call_end|>`."""

    opening = ("<|tool_call_start|>",)
    closing = ("<|tool_call_end|>",)
    special_tokens = (*opening, *closing)
    bare = re.compile(r"(?!)")  # never matches: the tag is required
    written = (opening[0], closing[0])


_HEAD = re.compile(r"[A-Za-z_][\w.-]*\s*\(")


@ToolParser.register("olmo3")
class Olmo3ToolParser(BlockParser):
    """The format of Olmo 3: Python calls, one per line, between `<function_calls>` and `</function_calls>`."""

    opening = ("<function_calls>",)
    closing = ("</function_calls>",)

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        return "\n".join((self.opening[0], *write_python_calls(calls), self.closing[0]))

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        found: Found = []
        position = skip_space(text, start)
        while head := _HEAD.match(text, position):
            end = _bracket_end(text, head.end() - 1)
            if end is None:
                break
            found.append(attempt(lambda source: read_python_call(parse_expression(source)), text[position:end]))
            position = skip_space(text, end)
        if found and text.startswith(self.closing[0], position):
            return Block(position + len(self.closing[0]), found)
        body, end = until(text, position, self._ends, self.closing)
        reason = 'it must be calls such as name(key="value"), one a line'
        return Block(
            end, [*found, Malformed(reason if body is not None else f"it is not closed; end it with {self.closing[0]}")]
        )


def _bracket_end(text: str, start: int) -> int | None:
    """Returns the index after the bracket that matches the one at `text[start]`; None if there is none."""
    depth, position = 0, start
    while token := _TOKEN.match(text, position):
        position = token.end()
        depth += _STEP.get(token.group(), 0)
        if depth == 0:
            return position
    return None
