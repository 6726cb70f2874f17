"""`format: auto`: detects the tool-call format from a model's chat template; tests whether a parser parses the calls that a
template writes.

Invariant: the format is inferred from the tags that the template writes around calls, never from a model's name; a template
that no rule matches is an error that lists the formats. Rules are tried in order, more specific ones first. The result is
then tested: a parser is rejected for a call that was actually rendered and that it cannot parse; a template that renders no
calls proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

from etude.chat.encoding import Encoder, common_beginning
from etude.chat.parsers.base import TOOL_PARSERS, Calls, ParsedResponse, ToolParser, Tools
from etude.chat.rendering import PROBE_TOOL, STAND_IN, Renderer
from etude.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("tool▁call▁begin", "```json")),
    ("deepseek_v31", ("tool▁call▁begin",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm4_moe", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<tool_call>")),
    ("gemma", ("<|tool_call>",)),
    ("gemma", ("<start_function_call>",)),
    ("gemma", ("```tool_code",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("cohere", ("directly_answer",)),
    ("internlm2", ("<|action_start|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|start_of_role|>",)),
    ("granite", ("<function_call>",)),
    ("phi4", ("functools[",)),
    ("phi4", ("<|/tool|>",)),
    ("xlam", ('"tool_call_name"',)),
    ("gigachat3", ("function call", "<|role_sep|>")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('"parameters":', "<|start_header_id|>")),
)
"""(format, texts that must all be in the template)."""


def format_of(template: str) -> str:
    """Returns the name of the format in which a chat template writes calls.

    Raises:
        ConfigError: no rule matches.
    """
    for name, marks in _RULES:
        if all(mark in template for mark in marks):
            return name
    raise ConfigError(
        "multi_turn.format=auto: the chat template shows no known tool-call format; set one of "
        f"{', '.join(name for name in TOOL_PARSERS.names() if name != 'auto')}"
    )


def find_other_format(text: str, chosen: ToolParser, tools: Iterable[str]) -> str | None:
    """Returns the name of a format, not that of `chosen`, in which `text` calls one of `tools`; None if there is none.

    Only the formats of this package are tried: a parser of the user's own may read a call into any text.
    """
    mentioned = {name for name in tools if name in text}
    if not mentioned:
        return None
    kind = type(chosen.parser) if isinstance(chosen, AutoToolParser) else type(chosen)
    usual_first = sorted(TOOL_PARSERS.names(), key=lambda name: name not in ("hermes", "pythonic"))
    for name in usual_first:
        parser = TOOL_PARSERS.get(name)
        if name == "auto" or parser is kind or not parser.__module__.startswith(f"{__package__}."):
            continue
        with suppress(Exception):  # a format that needs a tokenizer
            if any(call.name in mentioned for call in ToolParser.get_tool_parser(name).parse(text).calls):
                return name
    return None


@ToolParser.register("auto")
class AutoToolParser(ToolParser):
    """Delegates to `parser`, which is detected from the tokenizer's chat template; `name` is its format."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Detects the parser.

        Raises:
            ConfigError: there is no tokenizer, it has no template, no rule matches the template, or the parser cannot parse
                the calls that the template writes.
        """
        super().__init__(tokenizer)
        template = None if tokenizer is None else tokenizer.chat_template
        if not template:
            raise ConfigError("multi_turn.format=auto needs a tokenizer with a chat template; name the format instead")
        source = template if isinstance(template, str) else template.get("tool_use", "\n".join(template.values()))
        self.name = format_of(source)
        self.parser = ToolParser.get_tool_parser(self.name, tokenizer)
        assert tokenizer is not None
        if (unread := unread_call(self.parser, tokenizer)) is not None:
            raise ConfigError(
                f"multi_turn.format=auto: the chat template looks like '{self.name}', but writes a call which that "
                f"format does not read ({unread!r}); name the format, or a parser of your own"
            )
        self.special_tokens = self.parser.special_tokens
        self.stop_tokens = self.parser.stop_tokens
        self.result_tag = self.parser.result_tag

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        return self.parser.parse(text, tools)

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        return self.parser.write(calls, tools)

    def opens_reasoning(self, prompt: str) -> bool:
        return self.parser.opens_reasoning(prompt)

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str, str]:
        return self.parser.split_reasoning(text, opened)


_ARGUMENTS = {"city": "Saint-Malo", "days": 3}
_QUESTION = "What will it be like?"


def unread_call(parser: ToolParser, tokenizer: PreTrainedTokenizerBase, **options: Any) -> str | None:
    """Renders a call with the tokenizer's chat template and `options`; returns the beginning of the turn if `parser` cannot
    parse it. Returns None if it can, if the template renders no calls, or if the parser cannot be tested."""
    if not parser.reads_text() or type(parser).parse_ids is not ToolParser.parse_ids:
        return None
    encoder, unread = Encoder(tokenizer), None
    for turn, starts in _render_calls(Renderer(tokenizer, options), [PROBE_TOOL], STAND_IN, _ARGUMENTS):
        try:
            read = [parser.parse(parser.decode(encoder.ids(turn[start:])), [PROBE_TOOL]).calls for start in starts]
            if any(
                (each.name, json.loads(each.arguments)) == (STAND_IN, _ARGUMENTS) for calls in read for each in calls
            ):
                return None
        except Exception:  # in a user's parser; the first turn of a rollout will raise it
            return None
        unread = unread or turn[starts[0] :].strip()[:120]
    return unread


async def write_call(
    parser: ToolParser,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    name: str,
    arguments: Mapping[str, Any],
    **options: Any,
) -> list[int] | None:
    """Returns the ids of a turn that calls the tool `name` of `tools`, written by the chat template or in a its own
    or a well-known format, that `parser` parses to exactly this call; None if there is none."""
    encoder, renderer = Encoder(tokenizer), Renderer(tokenizer, options)
    texts = [turn[start:] for turn, starts in _render_calls(renderer, tools, name, arguments) for start in starts]
    with suppress(ConfigError):  # a user's parser need not write calls
        texts.append(parser.write([(name, arguments)], tools))
    texts.append(f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>")
    texts += [f"<search>{value}</search>" for value in arguments.values() if isinstance(value, str)]
    for text in texts:
        ids = encoder.ids(text)
        try:
            parsed = await parser.parse_ids(ids, list(tools))
            read = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
        except Exception:  # a user's parser may raise anything
            continue
        if read == [(name, dict(arguments))] and not parsed.errors:
            return ids
    return None


def _render_calls(
    renderer: Renderer, tools: Sequence[dict[str, Any]], name: str, arguments: Mapping[str, Any]
) -> list[tuple[str, list[int]]]:
    """Renders conversations that end with a call; returns each with the indices at which the turn may begin: where the text
    diverges from the generation prompt, or after the question."""
    question: dict[str, Any] = {"role": "user", "content": _QUESTION}
    rendered = []
    # Some templates write calls only if there is no content, some take arguments as JSON strings.
    for content, given in product(("", None), (dict(arguments), json.dumps(dict(arguments)))):
        asked = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": given}}
        call: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [asked]}
        try:
            prompt = renderer.text_as_given([question], tools, generate=True)
            text = renderer.text_as_given([question, call], tools, generate=False)
        except Exception:  # a template raises whatever its expressions raise
            continue
        if text.count(name) > prompt.count(name):
            rendered.append((text, [common_beginning(prompt, text), text.rfind(_QUESTION) + len(_QUESTION)]))
    return rendered
