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
from dataclasses import replace

from etude.chat.parsers.base import Calls, ParsedResponse, ToolParser, Tools
from etude.chat.parsers.blocks import Malformed, Pieces, Thought, as_response, attempt, skip_space
from etude.chat.parsers.json_call import Unreadable, decode, function_call, json_end, to_json
from etude.chat.parsers.streaming import Kind, TurnStream, beginnings
from etude.chat.parsers.typed import names_of
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
        position, begin = 0, _first_head(text)
        while begin is not None:
            pieces.append(text[position:begin])
            message = _MESSAGE.search(text, begin)
            if message is None or message.group() != "<|message|>":
                position = len(text) if message is None else message.end()
                if "to=" in text[begin:position] or text.endswith("<|call|>", begin, position):
                    pieces.append(Malformed("it has no <|message|> with its JSON arguments"))
            else:
                found, position = _read_message(text, text[begin : message.start()], message.end(), tools)
                pieces += found
            head = _HEAD.search(text, position)
            begin = None if head is None else head.start()
        thoughts = [piece.inner for piece in pieces if isinstance(piece, Thought)]
        said = as_response([*(piece for piece in pieces if not isinstance(piece, Thought)), text[position:]])
        return replace(said, reasoning="\n".join(filter(None, thoughts)))

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{to_json(dict(arguments))}<|call|>"
            for name, arguments in calls
        )

    def stream(self, thinking: bool = False) -> TurnStream:
        return HarmonyStream()


class HarmonyStream(TurnStream):
    """Emits messages without a recipient, up to the first call or malformed message."""

    _of_tokens = beginnings(_TOKENS)

    def __init__(self) -> None:
        super().__init__()
        self._kind: Kind | None = None  # of the current message; None inside a header

    def _step(self) -> bool:
        return self._head() if self._kind is None else self._message()

    def _head(self) -> bool:
        begin = skip_space(self.text, self._position)
        head = _HEAD.match(self.text, begin)
        if head is None:
            waits = self.text[begin:] in self._of_tokens or begin == len(self.text)
            return False if waits and not self._closed else self._hold(self._position)
        message = _MESSAGE.search(self.text, begin)
        if message is None:
            return self._hold(self._position) if self._closed else False
        heading = self.text[begin : message.start()]
        if message.group() != "<|message|>" or "to=" in heading:
            return self._hold(self._position)
        self._emit("content", self.text[self._position : begin])
        self._position, self._kind = message.end(), "reasoning" if "analysis" in heading else "content"
        if self._kind == "reasoning":
            self._new_thought()
        return True

    def _message(self) -> bool:
        end = _END.search(self.text, self._position)
        position = self._clear_end(self._of_tokens) if end is None else end.start()
        assert self._kind is not None
        self._emit_until(self._kind, position)
        if end is None:
            return False
        if end.group() == "<|call|>":
            return self._hold(position)
        self._position, self._kind = end.start() if end.group() == "<|start|>" else end.end(), None
        return True


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
