"""`ToolPrompt`: shows a model its tools in plain messages, for templates that do not write schemas, calls or tool results.

Schemas, the call format and an example of it go to the end of the system message, or into one of their own before the
others; without a system role, before the first user message's text. Calls in assistant messages become text in the parser's
format. If the template has no tool role, the results of a turn become one user message, with tags around each.

Invariant: what a prompt shows as a call is what the parser reads as that call; a parser that cannot do both is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.chat.parsers.arguments import to_json
from etude.chat.parsers.base import ToolParser
from etude.chat.rendering import PROBE_TOOL, STAND_IN, Message
from etude.errors import ConfigError
from etude.schemas import example_of

Call = tuple[str, Mapping[str, Any]]
RESULT_TAG = "tool_response"
_PROBE: Call = (STAND_IN, {"city": "Saint-Malo", "days": 3})


class ToolPrompt:
    """Rewrites messages and tools for a template, in the format of `parser`.

    Attributes:
        answers_as_user: whether tool results become user messages.
        has_system: whether the template has a system role.

    Raises:
        ConfigError: the parser cannot write a call, or does not read what it writes.
    """

    def __init__(self, parser: ToolParser) -> None:
        self.parser, self.answers_as_user, self.has_system = parser, False, True
        written = parser.write([_PROBE], [PROBE_TOOL])
        if parser.reads_text():
            read = [(call.name, json.loads(call.arguments)) for call in parser.parse(written, [PROBE_TOOL]).calls]
            if read != [_PROBE]:
                raise ConfigError(
                    f"tool parser {type(parser).__name__} does not read the call that it writes: {written!r}"
                )

    def rewrite(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        """Returns the messages in roles and contents that any template writes."""
        rewritten: list[dict[str, Any]] = []
        after_result = False
        for message in messages:
            is_result = self.answers_as_user and message.get("role") == "tool"
            if is_result:
                opened = _join(f"<{RESULT_TAG}>\n", message.get("content"), "")
                message = {"role": "user", "content": _join(opened, f"\n</{RESULT_TAG}>", "")}
            if is_result and after_result:
                rewritten[-1]["content"] = _join(rewritten[-1]["content"], message["content"], "\n")
            else:
                rewritten.append(self._with_calls(message, tools))
            after_result = is_result
        return self._with_tools(rewritten, tools) if tools else rewritten

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Returns what the system message says of `tools`: their schemas, and a call in the parser's format."""
        schemas = "\n".join(map(to_json, tools))
        name, arguments = _example(tools)
        given = ", ".join(f"{key} = {to_json(value)}" for key, value in arguments.items())
        with_arguments = f" with {given}" if given else ""
        return (
            "# Tools\n\nYou may call functions. Each line within <tools></tools> describes one, as JSON:\n"
            f"<tools>\n{schemas}\n</tools>\n\n"
            f"Write a call exactly as in this example, which calls {name}{with_arguments}:\n"
            f"{self.parser.write([(name, arguments)], tools)}"
        )

    def _with_tools(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        described = self.describe(tools)
        if not self.has_system:
            return _before_first_user(messages, described)
        if not messages or messages[0].get("role") != "system":
            return [{"role": "system", "content": described}, *messages]
        first = messages[0]
        return [{**first, "content": _join(first.get("content"), described, "\n\n")}, *messages[1:]]

    def _with_calls(self, message: Message, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Returns the message with its calls as text after its content."""
        made = {key: value for key, value in message.items() if key != "tool_calls"}
        asked = [call.get("function") or call for call in message.get("tool_calls") or ()]
        given = [(str(each.get("name")), each.get("arguments")) for each in asked]
        calls = [(name, arguments if isinstance(arguments, Mapping) else {}) for name, arguments in given]
        if calls:
            made["content"] = _join(made.get("content"), self.parser.write(calls, tools), "\n")
        return made


def _before_first_user(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    place = next((n for n, message in enumerate(messages) if message.get("role") == "user"), 0)
    asked = messages[place : place + 1] or [{"role": "user", "content": ""}]
    joined = {**asked[0], "content": _join(text, asked[0].get("content"), "\n\n")}
    return [*messages[:place], joined, *messages[place + 1 :]]


def _example(tools: Sequence[Mapping[str, Any]]) -> Call:
    """Makes a call of the first tool that takes arguments, or of the first."""
    functions = [tool.get("function") or tool for tool in tools]
    function = next((each for each in functions if (each.get("parameters") or {}).get("properties")), functions[0])
    parameters = dict(function.get("parameters") or {"type": "object"})
    if not parameters.get("required"):
        parameters.pop("required", None)  # all of them
    arguments = json.loads(json.dumps(example_of(parameters)))
    return function["name"], arguments if isinstance(arguments, dict) else {}


def _join(first: Any, second: Any, between: str) -> Any:
    """Joins two contents, texts or lists of parts; an empty one adds nothing."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else list(each) for each in (first, second)]
    return [*parts[0], *([{"type": "text", "text": between}] if between else []), *parts[1]]
