"""Parser of Search-R1's format: `<search> query </search>` calls the tool that takes a single string, `<answer> … </answer>`
ends the trajectory.

Results are given between `<information>` tags. As in Search-R1, whichever comes first after the reasoning counts, search or
answer; further searches in the turn are calls, too. A plain query in `<tool_call>` tags is also a call, whose result is
rendered by the chat template; an object in these tags is a call as in the Hermes format.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etude.chat.parsers.arguments import Unreadable, call_of, decode, function_call, to_json
from etude.chat.parsers.base import Calls, ParsedResponse, ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Malformed, Thought, as_response, attempt, until
from etude.schemas import FunctionCall

_CLOSING = {"<search>": "</search>", "<tool_call>": "</tool_call>"}
_ANSWER = re.compile(r"<answer>(?:(?!<answer>).)*?</answer>", re.DOTALL)


@ToolParser.register("search_r1")
class SearchR1ToolParser(BlockParser):
    """Parser of plain queries; the tool and its argument are found in the schemas in `tools`."""

    opening = tuple(_CLOSING)
    closing = tuple(_CLOSING.values())
    reasoning_tags = (("<think>", "</think>"), ("<information>", "</information>"))
    special_tokens = ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")
    stop_tokens = ("</search>", "</answer>")
    stop_strings = ("</search>", "</answer>", "</tool_call>")
    result_tag = "information"

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        """See `BlockParser.parse`; a turn in which the answer comes first has no calls."""
        pieces = self.read(text, tools)
        words = [piece for piece in pieces if not isinstance(piece, Thought)]
        before = itertools.takewhile(lambda piece: isinstance(piece, str), words)
        if any(_ANSWER.search(str(piece)) for piece in before):
            return replace(as_response(pieces), content=text.strip(), calls=[], errors=[])
        return replace(as_response(pieces), result_tag="information" if "<search>" in text else None)

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        """Writes a call of the tool that takes a single string as a search, any other as in the Hermes format."""
        texts = []
        for name, arguments in calls:
            query = next((each for each in arguments.values() if isinstance(each, str)), "")
            call = {"name": name, "arguments": dict(arguments)}
            is_search = query.strip() == query != "" and (name, call["arguments"]) == _searched(query, tools)
            texts.append(f"<search> {query} </search>" if is_search else f"<tool_call>{to_json(call)}</tool_call>")
        return "\n".join(texts)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        body, end = until(text, start, self._ends, (_CLOSING[tag],))
        if body is None:
            return Block(end, [Malformed(f"it is not closed; end it with {_CLOSING[tag]}")])
        return Block(end, [attempt(_read_query, body, tag, tools)])


def _read_query(body: str, tag: str, tools: Tools | None) -> FunctionCall:
    if not body.strip():
        raise Unreadable("the query is empty")
    if tag == "<tool_call>" and body.lstrip().startswith("{"):
        return call_of(decode(body))
    name, argument, is_list = text_argument(tools)
    return function_call(name, {argument: [body.strip()] if is_list else body.strip()})


def _searched(query: str, tools: Tools | None) -> tuple[str, dict[str, Any]] | None:
    try:
        name, argument, is_list = text_argument(tools)
    except Unreadable:
        return None
    return name, {argument: [query] if is_list else query}


def text_argument(tools: Tools | None) -> tuple[str, str, bool]:
    """Returns (tool, argument, whether the argument is a list of strings) for the tool that takes a single string.

    Of several, takes the one named `search`, else the first; without schemas, `search(query)`.

    Raises:
        Unreadable: no tool takes a single string.
    """
    if tools is None:
        return "search", "query", False
    fitting = [found for tool in tools if (found := _one_text(tool)) is not None]
    if not fitting:
        raise Unreadable("none of the tools takes a single text; call one with its arguments")
    return next((found for found in fitting if found[0] == "search"), fitting[0])


def _one_text(tool: Any) -> tuple[str, str, bool] | None:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    wanted = parameters.get("required") or list(properties)
    if len(wanted) != 1 or wanted[0] not in properties:
        return None
    schema = properties[wanted[0]]
    if schema.get("type") == "string":
        return function["name"], wanted[0], False
    is_list = schema.get("type") == "array" and (schema.get("items") or {}).get("type", "string") == "string"
    return (function["name"], wanted[0], True) if is_list else None
