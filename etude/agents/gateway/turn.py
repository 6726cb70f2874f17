"""Parses a sampled turn for its response: content, reasoning, tool calls, and finish reason.

Stop strings and `parallel_tool_calls=false` truncate a turn after sampling: it ends with the token that completes the stop
string or the first call. Later tokens cannot change that point, so what remains is what a policy that stops there would
have sampled. A format that writes several calls as one list or block has no such point: its turn is not truncated.

Invariant: a turn is parsed once, streamed or not; only a truncated one is parsed again. The remaining ids are a
prefix of the sampled ones. A malformed call stays in the content, as the model wrote it, and is reported in `errors`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from etude.agents.gateway.request import ChatRequest
from etude.chat import ParsedResponse, ToolParser
from etude.inference import TokenOutput
from etude.schemas import FunctionCall

PROBE = " ."
"""Arbitrary text after a call: shows that the call is complete."""


@dataclass(frozen=True)
class ParsedTurn:
    """One choice, parsed. `finish_reason` is OpenAI's: stop, length or tool_calls; `errors` has a line per malformed call;
    `unknown` holds the names of called tools that the request does not declare; `stop` is the stop string that cut it."""

    output: TokenOutput
    content: str
    response: ParsedResponse
    reasoning: str = ""
    calls: list[FunctionCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unknown: frozenset[str] = frozenset()
    finish_reason: str = "stop"
    stop: str | None = None


async def parse_turn(
    parser: ToolParser, output: TokenOutput, request: ChatRequest, thinking: bool = False
) -> ParsedTurn:
    """Parses `output` as the response to `request`; `thinking`: whether the prompt ends inside a reasoning block."""
    text = parser.decode(output.token_ids)
    if matches := [(at, stop) for stop in request.stops if (at := text.find(stop)) >= 0]:
        at, stop = min(matches)

        async def is_complete(ids: list[int]) -> bool:
            return stop in parser.decode(ids)

        kept = await _shortest_prefix(output, is_complete)
        text = parser.decode(output.token_ids[:kept])[:at]
        return replace(await _parse(parser, _truncate(output, kept), request, text, thinking), stop=stop)
    turn = await _parse(parser, output, request, text, thinking)
    if request.parallel_tool_calls is False and len(turn.calls) > 1:
        return await _truncate_after_first_call(parser, turn, request, thinking)
    return turn


async def _truncate_after_first_call(
    parser: ToolParser, turn: ParsedTurn, request: ChatRequest, thinking: bool
) -> ParsedTurn:
    """Truncates the turn after its first call; returns it whole if the format cannot be cut there."""
    first = turn.calls[:1]

    async def is_settled(ids: list[int]) -> bool:
        text = parser.decode(ids) + PROBE
        return (await _read(parser, ids, text, request)).calls[:1] == first

    kept = await _shortest_prefix(turn.output, is_settled)
    text = parser.decode(turn.output.token_ids[:kept])
    alone = await _parse(parser, _truncate(turn.output, kept), request, text, thinking)
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


async def _parse(
    parser: ToolParser, output: TokenOutput, request: ChatRequest, text: str, thinking: bool
) -> ParsedTurn:
    """Parses `text`, which is the output's decoded text or a prefix of it. Calls that the request does not ask for, and
    those of a turn with a malformed one, stay in the content as the model wrote them."""
    parsed = await _read(parser, output.token_ids, text, request)
    reasoning, content = parsed.reasoning, parsed.spoken
    if parsed.errors or (parsed.calls and not request.reads_calls):
        reasoning, content = parser.split_reasoning(text, thinking)
    elif thinking and parsed.spoken == parsed.content:  # the block that the prompt opened was not closed
        reasoning, content = parsed.content, ""
    finish = "stop" if output.stop_reason == "stop" else "length"
    if not request.reads_calls or not (parsed.calls or parsed.errors):
        return ParsedTurn(output, content, parsed, reasoning, finish_reason=finish)
    known = {tool["function"]["name"] for tool in request.tools or ()}
    unknown = frozenset(call.name for call in parsed.calls) - known
    finish = "tool_calls" if parsed.calls and finish == "stop" else finish
    return ParsedTurn(output, content, parsed, reasoning, parsed.calls, parsed.errors, unknown, finish)


async def _read(parser: ToolParser, ids: list[int], text: str, request: ChatRequest) -> ParsedResponse:
    """Parses `text` (the ids' text, a prefix of it, or an extension), or the ids themselves if the parser needs those."""
    return parser.parse(text, request.tools) if parser.reads_text() else await parser.parse_ids(ids, request.tools)
