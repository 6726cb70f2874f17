"""The format of gpt-oss (harmony); a turn is a row of messages with a head each:

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
    <|constrain|>json<|message|>{"city": "Beijing"}<|call|>

`analysis` is reasoning, `final` (and `commentary` to nobody) is content, and a message to `functions.NAME` is a call,
wherever in its head the recipient stands. A message to somebody else is an error. `<|call|>` ends a turn.
"""

from __future__ import annotations

import re

from etude.chat.parsers.base import ParsedResponse, ToolParser, Tools
from etude.chat.parsers.blocks import Malformed, Pieces, as_response, attempt, skip_space
from etude.chat.parsers.json_call import Unreadable, decode, function_call, json_end
from etude.schemas import FunctionCall

_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HEAD = re.compile(r"<\|(?:start|channel)\|>")
_MESSAGE = re.compile(r"<\|(?:message|end|call|return)\|>")
_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@ToolParser.register("gpt_oss", "gpt-oss", "harmony")
class GptOssToolParser(ToolParser):
    """Parser of messages to `functions.NAME`."""

    special_tokens = _TOKENS
    stop_tokens = ("<|call|>", "<|return|>")

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        """Content (of the channels that a user sees), calls and errors of a turn."""
        pieces: Pieces = []
        position = 0
        while head := _HEAD.search(text, position):
            pieces.append(text[position : head.start()])
            message = _MESSAGE.search(text, head.end())
            if message is None or message.group() != "<|message|>":
                position = len(text) if message is None else message.end()
                if "to=" in text[head.end() : position]:
                    pieces.append(Malformed("it has no <|message|> with its JSON arguments"))
                continue
            heading, start = text[head.end() : message.start()], message.end()
            recipient = _RECIPIENT.search(heading)
            skipped = json_end(text, skip_space(text, start)) if recipient else None
            end = _END.search(text, start if skipped is None else skipped)
            body = text[start : end.start() if end else len(text)]
            if recipient:
                pieces.append(attempt(_read_call, recipient[1], body, end is not None and end.group() == "<|start|>"))
            elif "analysis" not in heading:
                pieces.append(body)
            position = len(text) if end is None else end.start() if end.group() == "<|start|>" else end.end()
        return as_response([*pieces, text[position:]])


def _read_call(recipient: str, body: str, cut_short: bool) -> FunctionCall:
    if not recipient.startswith("functions.") or recipient == "functions.":
        raise Unreadable(f"a message must go to=functions.NAME, not to={recipient[:100]}")
    if cut_short:
        raise Unreadable("it is not closed; end it with <|call|>")
    return function_call(recipient.removeprefix("functions."), decode(body) if body.strip() else {})
