"""Calls written as elements: an opening tag with the function's name, one element for each argument, a closing tag.

Invariant: an argument's text is what stands between its tags, without the one line break that the format puts on either
side, read as the tool's schema says. These formats have no escapes: a text that holds a closing tag cannot be written
in them, and ends its argument early. Every search is for the next of all tags that matter, so reading is linear.
"""

from __future__ import annotations

import re

from etude.chat.parsers.base import Tools
from etude.chat.parsers.blocks import Found, Malformed
from etude.chat.parsers.json_call import Unreadable, function_call
from etude.chat.parsers.typed import properties_of, typed_value
from etude.schemas import FunctionCall


class ElementFormat:
    """The tags; `call` and `argument` are patterns of opening tags with the name as their only group.

    `lenient`: an argument may lack its closing tag where the next one begins or the call ends, and a call its own.
    """

    def __init__(self, *, call: str, call_end: str, argument: str, argument_end: str, lenient: bool = False) -> None:
        self.call, self.call_end, self.argument_end, self.lenient = re.compile(call), call_end, argument_end, lenient
        self.part = re.compile(f"{argument}|{re.escape(call_end)}")
        ends = [re.escape(argument_end), *([argument, re.escape(call_end)] if lenient else [])]
        self.value_end = re.compile("|".join(ends))

    def read(self, body: str, tools: Tools | None) -> Found:
        """Every call in one block, in order; one malformed one where there is none."""
        openings = list(self.call.finditer(body))
        limits = [*(opening.start() for opening in openings[1:]), len(body)]
        found: Found = []
        for opening, limit in zip(openings, limits):
            try:
                found.append(self._call(body, opening, limit, tools))
            except Unreadable as reason:
                found.append(Malformed(str(reason)))
        return found or [Malformed(f"it holds no function that ends with {self.call_end}")]

    def _call(self, body: str, opening: re.Match[str], limit: int, tools: Tools | None) -> FunctionCall:
        name = opening[1].strip()
        if not name:
            raise Unreadable("the function has no name")
        schemas = properties_of(tools, name)
        arguments: dict[str, object] = {}
        position = opening.end()
        while part := self.part.search(body, position, limit):
            if part.group() == self.call_end:
                return function_call(name, arguments)
            key = part[1].strip()
            end = self.value_end.search(body, part.end(), limit)
            if end is None and not self.lenient:
                raise Unreadable(f"the argument '{key[:100]}' is not closed; end it with {self.argument_end}")
            stop = limit if end is None else end.start()
            position = end.end() if end is not None and end.group() == self.argument_end else stop
            arguments[key] = typed_value(_without_breaks(body[part.end() : stop]), schemas.get(key))
        if not self.lenient:
            raise Unreadable(f"the function '{name[:100]}' is not closed; end it with {self.call_end}")
        return function_call(name, arguments)


def _without_breaks(text: str) -> str:
    text = text[1:] if text.startswith("\n") else text
    return text[:-1] if text.endswith("\n") else text
