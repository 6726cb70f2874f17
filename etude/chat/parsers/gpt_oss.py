"""Parser of gpt-oss's format, harmony: a turn is a sequence of messages, each with a header:

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
    <|constrain|>json<|message|>{"city": "Beijing"}<|call|>

`analysis` is reasoning, `final` (and `commentary` without a recipient) is content, and a message to `functions.NAME` is a
call, wherever in its header the recipient is. The prompt ends with `<|start|>assistant`, so a turn may begin inside a
header, as the chat template writes calls: ` to=functions.get_weather<|channel|>commentary json<|message|>{...}<|call|>`.

A message to an available tool is a call even without `functions.`. A message to any other recipient is an error, and so is
one without a recipient that ends with `<|call|>`. `<|call|>` ends a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from etude.chat.parsers.arguments import Unreadable, decode, function_call, json_end, names_of, to_json
from etude.chat.parsers.base import Calls, ParsedResponse, ToolParser, Tools
from etude.chat.parsers.blocks import Malformed, Pieces, Thought, as_response, attempt, skip_space
from etude.schemas import FunctionCall

_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_TOKEN = re.compile("|".join(map(re.escape, _TOKENS)))
_HEAD = re.compile(r"<\|(?:start|channel)\|>")
_MESSAGE = re.compile(r"<\|(?:message|end|call|return)\|>")
_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ADDRESSED = re.compile(r"(?<!\S)to=[^\s<]+\s*\Z")


@ToolParser.register("gpt_oss", "gpt-oss", "harmony")
class GptOssToolParser(ToolParser):
    """Parser of messages to `functions.NAME`."""

    special_tokens = _TOKENS
    stop_tokens = ("<|call|>", "<|return|>")
    plain_content = False

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        """Parses a turn; the content is that of the channels that a user sees."""
        pieces: Pieces = []
        position = 0
        for begin, found, end in _messages(text, tools):
            pieces += [text[position:begin], *found]
            position = end
        thoughts = [piece.inner for piece in pieces if isinstance(piece, Thought)]
        said = as_response([*(piece for piece in pieces if not isinstance(piece, Thought)), text[position:]])
        return replace(said, reasoning="\n".join(filter(None, thoughts)))

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str, str]:
        """See `ToolParser.split_reasoning`; from the first call on, the rest is as the model wrote it."""
        words: list[str] = []
        thoughts: list[str] = []
        position = 0
        for begin, found, end in _messages(text, None):
            texts = [piece for piece in found if isinstance(piece, str)]
            if len(texts) < len(found):
                break
            thoughts += [piece.inner for piece in texts if isinstance(piece, Thought)]
            words += [text[position:begin], *(piece for piece in texts if not isinstance(piece, Thought))]
            position = end
        return "\n".join(filter(None, thoughts)), "".join([*words, text[position:]]).strip()

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{to_json(dict(arguments))}<|call|>"
            for name, arguments in calls
        )


def _messages(text: str, tools: Tools | None) -> Iterator[tuple[int, Pieces, int]]:
    """Yields (beginning of the header, pieces, end) of each message of a turn."""
    begin = _first_head(text)
    while begin is not None:
        message = _MESSAGE.search(text, begin)
        found: Pieces = []
        if message is None or message.group() != "<|message|>":
            end = len(text) if message is None else message.end()
            if "to=" in text[begin:end] or text.endswith("<|call|>", begin, end):
                found = [Malformed("it has no <|message|> with its JSON arguments")]
        else:
            found, end = _read_message(text, text[begin : message.start()], message.end(), tools)
        yield begin, found, end
        head = _HEAD.search(text, end)
        begin = None if head is None else head.start()


def _first_head(text: str) -> int | None:
    """Returns where the first message's header begins; it may lack its first tokens, which are in the prompt."""
    token = _TOKEN.search(text)
    if token is None:
        return None
    addressed = _ADDRESSED.search(text[: token.start()])
    if addressed is not None:
        return addressed.start()
    if _HEAD.match(token.group()) or not text[: token.start()].strip():
        return token.start()
    head = _HEAD.search(text, token.end())
    return None if head is None else head.start()


def _read_message(text: str, heading: str, start: int, tools: Tools | None) -> tuple[Pieces, int]:
    """Parses the message whose body begins at `start`; returns its pieces and where parsing continues."""
    recipient = _RECIPIENT.search(heading)
    skipped = json_end(text, skip_space(text, start)) if recipient else None
    end = _END.search(text, start if skipped is None else skipped)
    body, closing = text[start : end.start() if end else len(text)], end.group() if end else ""
    position = len(text) if end is None else end.start() if closing == "<|start|>" else end.end()
    if recipient:
        cut_short = closing == "<|start|>" or not (closing or body.strip())
        is_tool = recipient[1] in names_of(tools)
        name = recipient[1] if is_tool else recipient[1].removeprefix("functions.")
        known = is_tool or recipient[1].startswith("functions.")
        return [attempt(_read_call, name, known, body, cut_short)], position
    pieces: Pieces = [Thought.of(body)] if "analysis" in heading else [body]
    if closing == "<|call|>":
        pieces.append(Malformed("it is addressed to nobody; write to=functions.NAME before <|message|>"))
    return pieces, position


def _read_call(name: str, known: bool, body: str, cut_short: bool) -> FunctionCall:
    if not known or not name:
        raise Unreadable(f"a message must go to=functions.NAME, not to={name[:100] or 'functions.'}")
    if cut_short:
        raise Unreadable("it is not closed; end it with <|call|>")
    return function_call(name, decode(body) if body.strip() else {})
