"""A sampled turn as its response reports it: content, reasoning, calls, and why it ended.

Stop texts and `parallel_tool_calls=false` shorten a turn after sampling: it ends with the token that completes the stop
text or the first call, which nothing later can change. So what remains is what a policy that stops there would have
sampled. A format that writes several calls as one list or block has no such point: its turn stays whole.

Invariant: the remaining ids are a prefix of the sampled ones. A malformed call is in the content, as the model wrote it,
and in `errors`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from etude.agents.gateway.wire import ChatRequest
from etude.chat import ParsedResponse, ToolParser
from etude.inference import TokenOutput
from etude.schemas import FunctionCall

_PROBE = " ."  # stands for whatever may follow a call


@dataclass(frozen=True)
class ReadTurn:
    """One choice. `finish_reason` is OpenAI's: stop, length, tool_calls; `errors` has a line for each malformed call, and
    `unknown` the names of called tools that the request does not have."""

    output: TokenOutput
    content: str
    parsed: ParsedResponse
    reasoning: str = ""
    calls: list[FunctionCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unknown: frozenset[str] = frozenset()
    finish_reason: str = "stop"


async def read_turn(parser: ToolParser, output: TokenOutput, request: ChatRequest) -> ReadTurn:
    """`output` as the response to `request` reports it."""
    text = parser.decode(output.token_ids)
    if found := [(at, stop) for stop in request.stops if (at := text.find(stop)) >= 0]:
        at, stop = min(found)

        async def is_complete(ids: list[int]) -> bool:
            return stop in parser.decode(ids)

        kept = await _fewest(output, is_complete)
        return await _read(parser, _cut(output, kept), request, parser.decode(output.token_ids[:kept])[:at])
    turn = await _read(parser, output, request, text)
    if request.parallel_tool_calls is False and len(turn.calls) > 1:
        return await _first_call_alone(parser, turn, request)
    return turn


async def _first_call_alone(parser: ToolParser, turn: ReadTurn, request: ChatRequest) -> ReadTurn:
    """The turn up to the end of its first call; all of it if the format cannot be cut there."""
    first = turn.calls[:1]

    async def is_settled(ids: list[int]) -> bool:
        parsed = await _parsed(parser, ids, parser.decode(ids) + _PROBE, request)
        return parsed.calls[:1] == first

    kept = await _fewest(turn.output, is_settled)
    ids = turn.output.token_ids[:kept]
    alone = await _read(parser, _cut(turn.output, kept), request, parser.decode(ids))
    return alone if alone.calls == first and not alone.errors else turn


async def _fewest(output: TokenOutput, holds: Callable[[list[int]], Awaitable[bool]]) -> int:
    """The length of the shortest prefix for which `holds` is true; `holds` is monotonic and true of all ids."""
    low, high = 1, len(output.token_ids)
    while low < high:
        middle = (low + high) // 2
        if await holds(output.token_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _cut(output: TokenOutput, kept: int) -> TokenOutput:
    supports = None if output.kept_ids is None else output.kept_ids[:kept]
    versions, experts = output.weight_versions[:kept], output.routed_experts
    if experts is not None:
        experts = experts.first(len(experts) - (len(output.token_ids) - kept))
    ids, log_probs = output.token_ids[:kept], output.log_probs[:kept]
    return TokenOutput(ids, log_probs, "stop", versions, routed_experts=experts, kept_ids=supports)


async def _read(parser: ToolParser, output: TokenOutput, request: ChatRequest, text: str) -> ReadTurn:
    """`text` is the output's decoded text, or a prefix of it."""
    parsed = await _parsed(parser, output.token_ids, text, request)
    turn = ReadTurn(output, parsed.spoken, parsed, parsed.reasoning, finish_reason=_finish(output))
    if not (parsed.calls or parsed.errors):
        return turn
    if not request.reads_calls:
        return replace(turn, content=text.strip(), reasoning="")
    if parsed.errors:
        turn = replace(turn, content=text.strip(), reasoning="", errors=parsed.errors)
    ends_with_calls = bool(parsed.calls) and turn.finish_reason == "stop"
    known = {tool["function"]["name"] for tool in request.tools or ()}
    return replace(
        turn,
        calls=parsed.calls,
        unknown=frozenset(call.name for call in parsed.calls) - known,
        finish_reason="tool_calls" if ends_with_calls else turn.finish_reason,
    )


async def _parsed(parser: ToolParser, ids: list[int], text: str, request: ChatRequest) -> ParsedResponse:
    """`text` is that of the ids, a prefix of it, or more: a parser that reads only ids does not get it."""
    return parser.parse(text, request.tools) if parser.reads_text() else await parser.parse_ids(ids, request.tools)


def _finish(output: TokenOutput) -> str:
    return "stop" if output.stop_reason == "stop" else "length"
