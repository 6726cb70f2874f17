"""Parsers of calls written as Python or like it: Llama 3.2 and 4, LFM2, Olmo 3, Gemma."""

from __future__ import annotations

import ast
import re
from typing import Any, ClassVar

from etude.chat.parsers.arguments import (
    MAX_CHARS,
    Unreadable,
    as_object,
    function_call,
    inner_schema,
    parse_expression,
    properties_of,
    read_literal,
    takes_null,
    to_json,
)
from etude.chat.parsers.base import Calls, ToolParser, Tools
from etude.chat.parsers.blocks import (
    Block,
    BlockParser,
    Found,
    Malformed,
    any_of,
    attempt,
    skip_space,
    until,
)
from etude.schemas import FunctionCall

_TOKEN = re.compile(
    r"""[\s\w.,:=+-]+|"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'|[()\[\]{}]""",
    re.DOTALL,
)
_STEP = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@ToolParser.register("pythonic", "llama4_pythonic", "llama4")
class PythonicToolParser(BlockParser):
    """The format of Llama 3.2, Llama 4 and others: a list of Python calls, `[get_weather(city="Beijing"), search(topk=3)]`.

    Llama 4 may put `<|python_start|>` and `<|python_end|>` around the list. Without a tag the turn must begin with the
    list. Values are Python literals, or JSON's true, false and null; nothing is evaluated. Arguments must be keyword
    arguments.
    """

    opening = ("<|python_start|>",)
    closing = ("<|python_end|>",)
    special_tokens = (*opening, *closing)
    bare: ClassVar[re.Pattern[str] | None] = re.compile(r"\s*\[\s*[A-Za-z_][\w.-]*\s*\(")
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
        Unreadable: it is not a call, an argument has no name or is given twice, or a value is not a literal.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise Unreadable('it must be a call such as name(key="value")')
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Unreadable(f"the arguments of '{name[:100]}' must be named: {name[:100]}(key=value)")
    try:
        given = as_object((str(keyword.arg), read_literal(keyword.value)) for keyword in node.keywords)
        return function_call(name, given)
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None


@ToolParser.register("lfm2")
class Lfm2ToolParser(PythonicToolParser):
    """The format of LFM2: a list of Python calls between `<|tool_call_start|>` and `<|tool_call_end|>`."""

    opening = ("<|tool_call_start|>",)
    closing = ("<|tool_call_end|>",)
    special_tokens = (*opening, *closing)
    bare = None  # the tag is required
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


_CODE = "```tool_code"
_CLOSING = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>", _CODE: "```"}
_MARKS = ('<|"|>', "<escape>")
_CALL_HEAD = re.compile(r"\s*call:\s*([^\s{<]+)\s*\{")
_KEY = re.compile(r"([^:{}\[\],<]+):")
_BARE = re.compile(r"[^,{}\[\]<]+")
_BETWEEN = re.compile(r"[\s,]*")
_NUMBER = re.compile(r"-?[0-9]{1,300}(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,3})?")
_WORDS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 64
_ENDS = {
    tag: any_of(*_CLOSING, closing) for tag, closing in _CLOSING.items()
}  # a string may contain another format's closing tag


@ToolParser.register("gemma", "gemma4", "functiongemma", "gemma3")
class GemmaToolParser(BlockParser):
    """The formats of Gemma. Gemma 4 and FunctionGemma write keys without quotes and strings between marks:

        <|tool_call>call:get_weather{city:<|"|>Beijing<|"|>,days:3}<tool_call|>
        <start_function_call>call:get_weather{city:<escape>Beijing<escape>}<end_function_call>

    Gemma 3 writes Python in a fenced block, one call per line, possibly inside `print`:

        ```tool_code
        get_weather(city="Beijing")
        ```

    An unquoted `None`, which some templates write for null, is null if the tool's schema allows null or no string.
    """

    opening = tuple(_CLOSING)
    closing = tuple(_CLOSING.values())
    reasoning_tags = (("<|channel>thought", "<channel|>"), ("<think>", "</think>"))
    special_tokens = (*opening[:2], *closing[:2], *_MARKS, "<|channel>", "<channel|>")
    stop_tokens = ("<|tool_response>", "<start_function_response>")

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        return "".join(f"<|tool_call>call:{name}{_write(dict(arguments))}<tool_call|>" for name, arguments in calls)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        closing = _CLOSING[tag]
        if tag != _CODE:
            try:
                call, end = _read_call(text, start, tools)
                if text.startswith(closing, end):
                    return Block(end + len(closing), [call])
            except Unreadable:
                pass  # parsed again below, up to the next tag
        body, end = until(text, start, _ENDS[tag], (closing,))
        if body is None:
            return Block(end, [Malformed(f"it is not closed; end it with {closing}")])
        return Block(end, _read_code(body) if tag == _CODE else [attempt(_read_whole, body, tools)])


def _write(value: object) -> str:
    if isinstance(value, str):
        return f"{_MARKS[0]}{value}{_MARKS[0]}"
    if isinstance(value, list):
        return f"[{','.join(map(_write, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_write(each)}' for key, each in value.items())}}}"
    return to_json(value)


def _read_whole(body: str, tools: Tools | None) -> FunctionCall:
    call, end = _read_call(body, 0, tools)
    if end < len(body):
        raise Unreadable("nothing may follow the arguments' closing brace")
    return call


def _read_call(text: str, start: int, tools: Tools | None) -> tuple[FunctionCall, int]:
    """Parses the call at `start`; returns it and the index of the next non-space character after it."""
    head = _CALL_HEAD.match(text, start)
    if head is None:
        raise Unreadable("it must be call:name{key:value}")
    arguments, end = _read_object(text, head.end(), 1, {"properties": properties_of(tools, head[1])})
    return function_call(head[1], arguments), skip_space(text, end)


def _read_object(text: str, position: int, depth: int, schema: object) -> tuple[dict[str, Any], int]:
    held: list[tuple[str, Any]] = []
    while not text.startswith("}", position := _BETWEEN.match(text, position).end()):  # type: ignore[union-attr]
        key, position = _read_key(text, position)
        value, position = _read_value(text, position, depth, inner_schema(schema, key))
        held.append((key, value))
    return as_object(held), position + 1


def _read_list(text: str, position: int, depth: int, schema: object) -> tuple[list[Any], int]:
    held: list[Any] = []
    while not text.startswith("]", position := _BETWEEN.match(text, position).end()):  # type: ignore[union-attr]
        value, position = _read_value(text, position, depth, inner_schema(schema))
        held.append(value)
    return held, position + 1


def _read_key(text: str, position: int) -> tuple[str, int]:
    mark = next((mark for mark in _MARKS if text.startswith(mark, position)), None)
    if mark is not None:
        key, position = _read_marked(text, position, mark)
        if text.startswith(":", position):
            return key, position + 1
    elif (match := _KEY.match(text, position)) is not None:
        return match[1].strip(), match.end()
    raise Unreadable("write the arguments as {key:value,key:value} and close every brace")


def _read_value(text: str, position: int, depth: int, schema: object) -> tuple[Any, int]:
    """Parses the value at `position`, which must be followed by a comma, a closing brace or a closing bracket."""
    if depth > _MAX_DEPTH:
        raise Unreadable("it is nested too deeply")
    position = skip_space(text, position)
    mark = next((mark for mark in _MARKS if text.startswith(mark, position)), None)
    value: Any
    if mark is not None:
        value, position = _read_marked(text, position, mark)
    elif text.startswith("{", position):
        value, position = _read_object(text, position + 1, depth + 1, schema)
    elif text.startswith("[", position):
        value, position = _read_list(text, position + 1, depth + 1, schema)
    elif (bare := _BARE.match(text, position)) is not None:
        value, position = _bare_value(bare.group().strip(), schema), bare.end()
    else:
        raise Unreadable(f"a value is missing or not marked; write texts as {_MARKS[0]}text{_MARKS[0]}")
    position = skip_space(text, position)
    if not text.startswith((",", "}", "]"), position):
        raise Unreadable("a value must be followed by a comma or a closing brace")
    return value, position


def _read_marked(text: str, position: int, mark: str) -> tuple[str, int]:
    start = position + len(mark)
    end = text.find(mark, start)
    if end < 0:
        raise Unreadable(f"a text is not closed; end it with {mark}")
    return text[start:end], end + len(mark)


def _bare_value(word: str, schema: object) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    if word == "None" and takes_null(schema):
        return None
    number = _NUMBER.fullmatch(word)
    if number is None:
        return word
    return float(word) if number[1] or number[2] else int(word)


def _read_code(body: str) -> Found:
    if len(body) > MAX_CHARS:
        return [Malformed(f"it is longer than {MAX_CHARS} characters")]
    try:
        lines = ast.parse(body.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [Malformed("it is not valid Python; write name(key=value)")]
    return [attempt(_read_line, line) for line in lines] or [Malformed("it holds no call")]


def _read_line(line: ast.stmt) -> FunctionCall:
    node: ast.AST | None = line.value if isinstance(line, ast.Expr | ast.Assign) else line
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and len(node.args) == 1
    ):
        node = node.args[0]
    return read_python_call(node)
