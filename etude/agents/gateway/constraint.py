"""What a request's `tool_choice` and `response_format` demand of the sampled turn, as a grammar for the engine."""

from __future__ import annotations

from etude.agents.gateway.wire import ChatRequest, GatewayError
from etude.chat import ToolParser
from etude.chat.grammar import turn_grammar
from etude.chat.parsers.base import TOOL_PARSERS
from etude.errors import GrammarError
from etude.inference import Grammar


def grammar_of(request: ChatRequest, parser: ToolParser, prompt: str) -> Grammar | None:
    """Returns the grammar of the turn that answers `request`; None if it may be any text. A turn that need not call a tool
    may do so even if JSON is asked for; one that must is no JSON.

    Args:
        prompt: the end of the prompt's text, which may open a reasoning block.

    Raises:
        GatewayError: the format cannot be constrained, or the grammar is too long; names the parameter.
    """
    forced = request.forced_tools
    if not forced and request.schema_of_content is None:
        return None
    tools = forced or (request.tools if request.reads_calls else None) or ()
    several = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, dict)
    schema = None if forced else request.schema_of_content
    try:
        text = turn_grammar(parser, tools=tools, several=several, schema=schema, prompt=prompt)
        return Grammar("lark", text)
    except GrammarError as error:
        param, advice = ("tool_choice", "tool_choice=auto") if forced else ("response_format", "no response_format")
        able = ", ".join(name for name in TOOL_PARSERS.names() if TOOL_PARSERS.get(name).call_forms)
        reason = f"{param}: {error}: send {advice}, or use rollout.multi_turn.format with one of {able}"
        raise GatewayError(400, reason, param=param) from error
