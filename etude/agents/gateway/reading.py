"""What a client is told of a sampled turn: content, reasoning, calls, and why it ended.

Stop texts and `parallel_tool_calls=false` shorten a turn after it was sampled: it ends with the token that completes the
stop text, or the first call. Where a turn is cut depends on nothing behind the cut, so what is left is what a policy that
stops there would have sampled.

Invariant: the ids that are left begin the sampled ones. A call that cannot be read is in the content, as the model wrote
it, and in `errors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from etude.agents.gateway.wire import ChatRequest
from etude.chat import ParsedResponse, ToolParser
from etude.inference import TokenOutput
from etude.schemas import FunctionCall


@dataclass(frozen=True)
class ReadTurn:
    """One choice. `finish_reason` is OpenAI's: stop, length, tool_calls; `errors` has a line for each unreadable call."""

    output: TokenOutput
    content: str
    parsed: ParsedResponse
    reasoning: str = ""
    calls: list[FunctionCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    finish_reason: str = "stop"


async def read_turn(parser: ToolParser, output: TokenOutput, request: ChatRequest) -> ReadTurn:
    """What a client that made `request` is told of `output`."""
    text = parser.decode(output.token_ids)
    if found := [(at, stop) for stop in request.stops if (at := text.find(stop)) >= 0]:
        at, stop = min(found)
        kept = _fewest(output, lambda ids: stop in parser.decode(ids))
        return await _read(parser, _cut(output, kept), request, parser.decode(output.token_ids[:kept])[:at])
    turn = await _read(parser, output, request, text)
    if request.parallel_tool_calls is False and len(turn.calls) > 1:
        for kept in range(1, len(output.token_ids)):
            ids = output.token_ids[:kept]
            alone = await _read(parser, _cut(output, kept), request, parser.decode(ids))
            if alone.calls == turn.calls[:1] and not alone.errors:
                return alone
    return turn


def _fewest(output: TokenOutput, holds: Callable[[list[int]], bool]) -> int:
    """The least number of first ids of which `holds` is true; it is of all of them, and stays so once it is."""
    low, high = 1, len(output.token_ids)
    while low < high:
        middle = (low + high) // 2
        if holds(output.token_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _cut(output: TokenOutput, kept: int) -> TokenOutput:
    return TokenOutput(output.token_ids[:kept], output.log_probs[:kept], "stop", output.weight_versions[:kept])


async def _read(parser: ToolParser, output: TokenOutput, request: ChatRequest, text: str) -> ReadTurn:
    """`text` is that of the output's ids, or its beginning."""
    ids_only = type(parser).parse is ToolParser.parse
    tools = request.tools
    parsed = await parser.parse_ids(output.token_ids, tools) if ids_only else parser.parse(text, tools)
    turn = ReadTurn(output, parsed.spoken, parsed, parsed.reasoning, finish_reason=_finish(output))
    if not (parsed.calls or parsed.errors):
        return turn
    if not request.reads_calls:
        return replace(turn, content=text.strip(), reasoning="")
    if parsed.errors:
        turn = replace(turn, content=text.strip(), reasoning="", errors=parsed.errors)
    ends_with_calls = bool(parsed.calls) and turn.finish_reason == "stop"
    return replace(turn, calls=parsed.calls, finish_reason="tool_calls" if ends_with_calls else turn.finish_reason)


def _finish(output: TokenOutput) -> str:
    return "stop" if output.stop_reason == "stop" else "length"
