"""`format: auto`: detects the tool-call format from a model's chat template.

Invariant: the format is inferred from the tags that the template writes around calls, never from a model's name; a template
that no rule matches is an error that lists the formats. Rules are tried in order, more specific ones first. The result is
then tested: a parser that cannot parse a call rendered by the template itself is rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.chat.parsers.base import TOOL_PARSERS, Calls, ParsedResponse, ToolParser, Tools
from etude.chat.parsers.trial import unread_call
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
