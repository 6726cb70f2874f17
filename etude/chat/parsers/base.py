"""`ToolParser`: parses tool calls from a model's text.

Invariant: a malformed call is reported in `ParsedResponse.errors`, in words the model can act on; nothing that looks like a
call is dropped. A parser works on text and needs no tokenizer for that; this base class decodes ids, once.

A parser defines `parse` or, as in verl, only `async extract_tool_calls(ids)`, which may return the calls or
`(content, calls)`. Agent loops call `parse_ids`, which supports both.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from etude.chat.encoding import Decoder, structural_ids
from etude.errors import ConfigError
from etude.registry import Registry
from etude.schemas import FunctionCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Any]
Calls = Sequence[tuple[str, Mapping[str, Any]]]
"""Calls to write: name and arguments of each."""
P = TypeVar("P", bound="type[ToolParser]")


@dataclass(frozen=True)
class ParsedResponse:
    """One assistant turn: the text outside tool calls, the calls in order, and one line per malformed call.

    `reasoning` is the part of the content between reasoning tags, without the tags; `spoken` is the rest, or everything if
    the format has no such tags. `result_tag` is the tag around tool results, for formats without a tool role.
    """

    content: str
    calls: list[FunctionCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    result_tag: str | None = None
    reasoning: str = ""
    without_reasoning: str | None = None

    @property
    def spoken(self) -> str:
        return self.content if self.without_reasoning is None else self.without_reasoning

    def result_message(self, text: str, call: FunctionCall | None = None) -> dict[str, str]:
        """Returns the message with `text` as the result of `call`, or of a malformed call if None; it carries the call's id,
        if the model gave one."""
        if self.result_tag is None:
            message = {"role": "tool", "content": text}
            return message if call is None or call.id is None else {**message, "tool_call_id": call.id}
        return {"role": "user", "content": f"<{self.result_tag}>{text}</{self.result_tag}>"}


@dataclass(frozen=True)
class CallForm:
    """How a turn that only makes calls is written: `before`, calls with `between` between them (None: only one), `after`. In
    `call`, NAME and ARGUMENTS stand for the tool's name and the JSON object of its arguments."""

    call: str
    before: str = ""
    between: str | None = None
    after: str = ""


class ToolParser:
    """Base class of all parsers; `tokenizer` may be None if only text is parsed."""

    tokenizer: PreTrainedTokenizerBase | None = None
    special_tokens: tuple[str, ...] = ()
    """Special tokens that belong to the format: `decode` keeps them in the text."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a turn of this format, besides the template's, if the tokenizer has them."""
    stop_strings: tuple[str, ...] = ()
    """Stop strings of this format, used if `rollout.stop` is null: the model must not continue after them."""
    call_forms: tuple[CallForm, ...] = ()
    """How the format's models write calls, for `tool_choice=required`; the first whose special tokens the tokenizer has is
    used, or else the last. Empty: calls cannot be forced."""
    plain_content: bool = True
    """Whether a turn without calls is its content as it stands, so that it can be constrained to JSON."""
    result_tag: str | None = None
    """Tag around tool results in a user message, for formats that do not need a chat template with tools."""
    _decoder: Decoder | None = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.tokenizer = tokenizer

    @staticmethod
    def register(*names: str) -> Callable[[P], P]:
        """Class decorator: registers a parser under `names`, for `rollout.multi_turn.format`.

        Raises:
            ConfigError: a name is taken, or the class defines neither `parse` nor `extract_tool_calls`.
        """

        def enter(parser: P) -> P:
            if parser.parse is ToolParser.parse and parser.extract_tool_calls is ToolParser.extract_tool_calls:
                raise ConfigError(f"tool parser {parser.__name__} defines neither parse nor extract_tool_calls")
            TOOL_PARSERS.register(*names)(parser)
            return parser

        return enter

    @staticmethod
    def get_tool_parser(name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> ToolParser:
        """Creates a parser of the class registered as `name`.

        Raises:
            ConfigError: no parser has that name.
        """
        parser = TOOL_PARSERS.get(name)(tokenizer)
        if parser.tokenizer is None:  # a subclass may forget to call super().__init__
            parser.tokenizer = tokenizer
        return parser

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of this format, besides the template's."""
        if self.tokenizer is None or not self.stop_tokens:
            return ()
        known = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        return tuple(known[token] for token in self.stop_tokens if token in known)

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        """Parses a turn; `tools` are the available tools' schemas, for formats whose arguments have no types.

        Raises:
            NotImplementedError: this parser works on ids only.
        """
        raise NotImplementedError(f"{type(self).__name__} reads token ids only")

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        """Writes calls as a model of this format does, so that `parse` reads exactly them; shows a model the format
        (`multi_turn.tools_in_system`).

        Raises:
            ConfigError: a parser of the user's does not define it.
        """
        raise ConfigError(
            f"tool parser {type(self).__name__} cannot write a call, so a prompt cannot show its format: define "
            "write(self, calls, tools=None) -> str, where a call is (name, arguments)"
        )

    async def extract_tool_calls(
        self, response_ids: list[int], tools: Tools | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Returns (content, calls) of a turn given as ids; only `parse_ids` reports malformed calls."""
        parsed = self.parse(self.decode(response_ids), tools)
        return parsed.content, parsed.calls

    async def parse_ids(self, response_ids: list[int], tools: Tools | None = None) -> ParsedResponse:
        """Parses an assistant turn given as ids.

        Raises:
            ConfigError: a user's parser did not return a list of calls.
        """
        if self.reads_text():
            return self.parse(self.decode(response_ids), tools)
        extract: Callable[..., Any] = self.extract_tool_calls
        returned = extract(response_ids, tools) if _takes_tools(extract) else extract(response_ids)
        if inspect.isawaitable(returned):
            returned = await returned
        if isinstance(returned, tuple) and len(returned) == 2:
            content, calls = returned
        else:
            content, calls = self.decode(response_ids), returned
        if not isinstance(calls, list | tuple | None):
            raise ConfigError(
                f"tool parser {type(self).__name__} must return a list of calls, not {type(calls).__name__}"
            )
        return ParsedResponse(str(content or ""), [self._as_call(call) for call in calls or ()])

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str, str]:
        """Returns (reasoning, the rest of the turn with its calls as the model wrote them), for a turn whose calls are not
        wanted or malformed; `opened`: whether the prompt ends inside a reasoning block."""
        return "", text.strip()

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends with a tag that opens a reasoning block."""
        return False

    @classmethod
    @functools.cache
    def reads_text(cls) -> bool:
        """Whether the parser works on text: the first class in the MRO that defines `parse` or `extract_tool_calls` defines
        `parse`."""
        owner = next(base for base in cls.__mro__ if {"parse", "extract_tool_calls"} & vars(base).keys())
        return "parse" in vars(owner)

    def decode(self, response_ids: Sequence[int]) -> str:
        """Decodes `response_ids`, keeping tool tags and dropping end-of-turn tokens.

        Raises:
            ConfigError: the parser was created without a tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError(f"tool parser {type(self).__name__} was made without a tokenizer and can only parse text")
        if self._decoder is None or self._decoder.tokenizer is not self.tokenizer:
            self._decoder = Decoder(self.tokenizer, structural_ids(self.tokenizer, self.special_tokens))
        return self._decoder.decode(response_ids)

    def _as_call(self, call: Any) -> FunctionCall:
        """Converts a call from a user's parser: a FunctionCall, a mapping, or an object with `name` and `arguments`."""
        if isinstance(call, FunctionCall):
            return call
        fields = call if isinstance(call, Mapping) else getattr(call, "__dict__", {})
        name, arguments = fields.get("name"), fields.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise ConfigError(f"tool parser {type(self).__name__} returned a call without a name or arguments")
        return FunctionCall(name=name, arguments=arguments)


TOOL_PARSERS: Registry[type[ToolParser]] = Registry("tool parser")


def _takes_tools(extract: Callable[..., Any]) -> bool:
    try:
        inspect.signature(extract).bind([], None)
    except TypeError:
        return False
    return True
