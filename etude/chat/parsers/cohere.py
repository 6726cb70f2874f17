"""The format of Cohere's Command models, with thoughts in `<|START_THINKING|>`:

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Beijing"}}
    ]<|END_ACTION|>

Command R's older `Action: ```json […] ``` ` is read, too; its `directly-answer` is no call.
"""

from __future__ import annotations

from etude.chat.parsers.base import ToolParser
from etude.chat.parsers.blocks import Found, JsonBlockParser
from etude.schemas import FunctionCall

_NO_TOOL = ("directly-answer", "directly_answer")


@ToolParser.register("cohere", "command", "cohere_command4")
class CohereToolParser(JsonBlockParser):
    """Parser of a list of JSON actions."""

    opening = ("<|START_ACTION|>", "Action: ```json", "Action:```json")
    closing = ("<|END_ACTION|>", "```")
    glue = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    thoughts = (("<|START_THINKING|>", "<|END_THINKING|>"),)
    names = ("tool_name", "name")
    arguments = ("parameters", "arguments")
    special_tokens = ("<|START_ACTION|>", "<|END_ACTION|>", *glue, "<|START_THINKING|>", "<|END_THINKING|>")

    def read_calls(self, body: str) -> Found:
        """The actions of one block that name a tool."""
        found = super().read_calls(body)
        return [each for each in found if not (isinstance(each, FunctionCall) and each.name in _NO_TOOL)]
