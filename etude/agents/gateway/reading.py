"""Parses a sampled turn for its response: content, reasoning, tool calls, and finish reason.

Stop strings and `parallel_tool_calls=false` truncate a turn after sampling: it ends with the token that completes the stop
string or the first call. Later tokens cannot change that point, so what remains is what a policy that stops there would
have sampled. A format that writes several calls as one list or block has no such point: its turn is not truncated.

Invariant: the remaining ids are a prefix of the sampled ones. A malformed call stays in the content, as the model wrote it,
and is reported in `errors`. Reasoning and content begin with what `TurnStream` emits for the text, so a turn is the same
whether streamed or not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from etude.agents.gateway.wire import ChatRequest
from etude.chat import ParsedResponse, ToolParser
from etude.chat.parsers.streaming import TurnStream
from etude.inference import TokenOutput
from etude.schemas import FunctionCall

_PROBE = " ."  # arbitrary text after a call: shows that the call is complete


@dataclass(frozen=True)
class ReadTurn:
    """One choice, parsed. `finish_reason` is OpenAI's: stop, length or tool_calls; `errors` has a line per malformed call;
    `unknown` holds the names of called tools that the request does not declare."""

    output: TokenOutput
    content: str
    parsed: ParsedResponse
    reasoning: str = ""
    calls: list[FunctionCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unknown: frozenset[str] = frozenset()
    finish_reason: str = "stop"


async def read_turn(parser: ToolParser, output: TokenOutput, request: ChatRequest, thinking: bool = False) -> ReadTurn:
    """Parses `output` as the response to `request`; `thinking`: whether the prompt ends inside a reasoning block."""
    text = parser.decode(output.token_ids)
    if matches := [(at, stop) for stop in request.stops if (at := text.find(stop)) >= 0]:
        at, stop = min(matches)

        async def is_complete(ids: list[int]) -> bool:
            return stop in parser.decode(ids)

        kept = await _shortest_prefix(output, is_complete)
        text = parser.decode(output.token_ids[:kept])[:at]
        return await _read(parser, _truncate(output, kept), request, text, thinking)
    turn = await _read(parser, output, request, text, thinking)
    if request.parallel_tool_calls is False and len(turn.calls) > 1:
        return await _truncate_after_first_call(parser, turn, request, thinking)
    return turn


async def _truncate_after_first_call(
    parser: ToolParser, turn: ReadTurn, request: ChatRequest, thinking: bool
) -> ReadTurn:
    """Truncates the turn after its first call; returns it whole if the format cannot be cut there."""
    first = turn.calls[:1]

    async def is_settled(ids: list[int]) -> bool:
        parsed = await _parse(parser, ids, parser.decode(ids) + _PROBE, request)
        return parsed.calls[:1] == first

    kept = await _shortest_prefix(turn.output, is_settled)
    ids = turn.output.token_ids[:kept]
    alone = await _read(parser, _truncate(turn.output, kept), request, parser.decode(ids), thinking)
    return alone if alone.calls == first and not alone.errors else turn


async def _shortest_prefix(output: TokenOutput, holds: Callable[[list[int]], Awaitable[bool]]) -> int:
    """Binary search for the length of the shortest prefix for which `holds` is true; `holds` must be monotonic, and true
    of all ids."""
    low, high = 1, len(output.token_ids)
    while low < high:
        middle = (low + high) // 2
        if await holds(output.token_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _truncate(output: TokenOutput, kept: int) -> TokenOutput:
    supports = None if output.kept_ids is None else output.kept_ids[:kept]
    versions, experts = output.weight_versions[:kept], output.routed_experts
    if experts is not None:
        experts = experts.first(len(experts) - (len(output.token_ids) - kept))
    ids, log_probs = output.token_ids[:kept], output.log_probs[:kept]
    return TokenOutput(ids, log_probs, "stop", versions, routed_experts=experts, kept_ids=supports)


async def _read(parser: ToolParser, output: TokenOutput, request: ChatRequest, text: str, thinking: bool) -> ReadTurn:
    """Parses `text`, which is the output's decoded text or a prefix of it."""
    parsed = await _parse(parser, output.token_ids, text, request)
    found = parsed.calls or parsed.errors
    as_written = bool(parsed.errors) or bool(found and not request.reads_calls)
    reasoning, content = _reasoning_and_content(parser, parsed, text, as_written, thinking)
    turn = ReadTurn(output, content, parsed, reasoning, finish_reason=_finish(output))
    if not (found and request.reads_calls):
        return turn
    ends_with_calls = bool(parsed.calls) and turn.finish_reason == "stop"
    known = {tool["function"]["name"] for tool in request.tools or ()}
    return replace(
        turn,
        calls=parsed.calls,
        errors=parsed.errors,
        unknown=frozenset(call.name for call in parsed.calls) - known,
        finish_reason="tool_calls" if ends_with_calls else turn.finish_reason,
    )


def _reasoning_and_content(
    parser: ToolParser, parsed: ParsedResponse, text: str, as_written: bool, thinking: bool
) -> tuple[str, str]:
    """Returns (reasoning, content) of a turn: the parser's, if they extend what `TurnStream` emits, else what it emits plus
    the rest of the text. With `as_written`, calls stay in the content as the model wrote them."""
    stream = parser.stream(thinking) if parser.reads_text() else TurnStream()
    stream.feed(text)
    stream.close()
    thoughts, words, rest = stream.emitted["reasoning"], stream.emitted["content"], stream.rest
    agrees = parsed.reasoning.startswith(thoughts) and parsed.spoken.startswith(words)
    if agrees and not as_written:
        return parsed.reasoning, parsed.spoken
    if not as_written and parsed.calls:
        rest = parser.parse(rest).spoken
    return thoughts, (words + rest).strip()


async def _parse(parser: ToolParser, ids: list[int], text: str, request: ChatRequest) -> ParsedResponse:
    """Parses `text` (the ids' text, a prefix of it, or an extension), or the ids themselves if the parser needs those."""
    return parser.parse(text, request.tools) if parser.reads_text() else await parser.parse_ids(ids, request.tools)


def _finish(output: TokenOutput) -> str:
    return "stop" if output.stop_reason == "stop" else "length"
