"""Grammars of whole turns, as text in llguidance's dialect of Lark: tool calls in a parser's format, JSON of a schema.

Invariant: what a grammar of `turn_grammar` describes, the parser reads as valid calls of the given tools, or as content
that is valid JSON of the schema (numbers beyond a float's range are JSON, but no parser takes them). A control token is
written by its id, and only where the format has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etude.chat.control import control_ids
from etude.chat.parsers.base import CallForm, ToolParser
from etude.errors import GrammarError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WHITE_SPACE = r"[ \n\r\t]{1,16}"  # between tokens of JSON; without a limit a model may sample white space for ever


def json_schema_text(schema: Any) -> str:
    """Returns a JSON schema as the text that a grammar has.

    Raises:
        GrammarError: it is not an object or true.
    """
    if not isinstance(schema, dict) and schema is not True:
        raise GrammarError("a JSON schema that a text can match is an object")
    options = {"whitespace_pattern": _WHITE_SPACE}
    return json.dumps({**({} if schema is True else schema), "x-guidance": options})


def turn_grammar(
    parser: ToolParser,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    several: bool = False,
    schema: Any = None,
    prompt: str = "",
) -> str:
    """Returns the grammar of a turn that calls some of `tools` (OpenAI's form) or is JSON of `schema`. A block of reasoning
    may come first, if the tokenizer has tokens for its tags; it must end if the prompt has opened it.

    Args:
        several: whether the turn may make several calls, if the format has a way to write them.
        prompt: the end of the prompt's text, which may open a reasoning block.

    Raises:
        GrammarError: the parser's format has no such turns, or the parser has no tokenizer.
    """
    parser = getattr(parser, "parser", parser)  # the detected one of `auto`
    tokenizer = parser.tokenizer
    if tokenizer is None:
        raise GrammarError(f"tool parser {type(parser).__name__} was made without a tokenizer")
    rules: list[str] = []
    choices: list[str] = []
    if tools:
        rules += _call_rules(parser, tokenizer, tools, several)
        choices.append("calls")
    if schema is not None:
        if not parser.plain_content:
            raise GrammarError(f"{type(parser).__name__} reads turns in which content is never plain JSON")
        rules.append(f"json: %json {json_schema_text(schema)}")
        choices.append("json")
    thought = _thought(parser, tokenizer, prompt)
    return "\n".join([f"start: {thought[0]} ({' | '.join(choices)})", *thought[1:], *rules])


def _call_rules(
    parser: ToolParser, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], several: bool
) -> list[str]:
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}

    def fits(form: CallForm) -> bool:
        text = form.before + form.call + form.after
        return all(tag in known for tag in parser.special_tokens if tag in text)

    if not parser.call_forms:
        raise GrammarError(f"the format of {type(parser).__name__} has no grammar of calls")
    form = next(filter(fits, parser.call_forms), parser.call_forms[-1])
    before, after = _literal(tokenizer, form.before), _literal(tokenizer, form.after)
    more = "" if form.between is None or not several else f"({_literal(tokenizer, form.between)} call)*"
    rules = [f"calls: {before} call {more} {after}", "call: " + " | ".join(f"call_{n}" for n in range(len(tools)))]
    for number, tool in enumerate(tools):
        function = tool["function"]
        head, tail = form.call.split("ARGUMENTS")
        head = head.replace("NAME", json.dumps(function["name"], ensure_ascii=False)[1:-1])
        given = function.get("parameters") or {}
        closed = {"additionalProperties": False} if not given or "properties" in given else {}  # they are a function's
        schema = {"type": "object", **closed, **given}
        arguments = f"%json {json_schema_text(schema)}"
        rules.append(f"call_{number}: {_literal(tokenizer, head)} {arguments} {_literal(tokenizer, tail)}")
    return rules


def _thought(parser: ToolParser, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[str]:
    """Returns what stands before calls or JSON in the start rule, and the rules for it."""
    control = _control(tokenizer)
    pairs: Sequence[tuple[str, str]] = getattr(parser, "reasoning_tags", ())
    text, space = "/(?s:.*)/", "space: /[ \\n]{0,2}/"
    for opening, closing in pairs:
        if prompt.rstrip().endswith(opening):
            if closing in control:
                return ["thought space", f"thought: {text} <[{control[closing]}]>", space]
            return ["thought space", f"thought[suffix={json.dumps(closing)}]: {text}", space]
    tokens = [
        (control[opening], control[closing]) for opening, closing in pairs if {opening, closing} <= control.keys()
    ]
    if not tokens:
        return [""]
    blocks = " | ".join(f"<[{opening}]> {text} <[{closing}]>" for opening, closing in tokens)
    return ["(thought space)?", f"thought: {blocks}", space]


def _literal(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Returns the Lark terms that match `text`, in which control tokens are matched by their ids."""
    control = _control(tokenizer)
    longest_first = sorted(control, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})", text)
    return " ".join(f"<[{control[p]}]>" if p in control else json.dumps(p, ensure_ascii=False) for p in parts if p)


def _control(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {str(tokenizer.convert_ids_to_tokens(number)): number for number in sorted(control_ids(tokenizer))}
