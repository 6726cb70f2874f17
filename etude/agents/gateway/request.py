"""The supported part of the `/v1/chat/completions` request, the grammar that it demands, and the error response.

Invariant: every parameter is honoured or rejected by name. Hints (`user`, `store` …) are accepted and have no effect; an
unsupported parameter that would change the output is rejected unless its value does nothing. Two exceptions: a tool's
`strict` is only a hint unless a call is forced, since the policy is there to learn the arguments, and
`parallel_tool_calls=false` cannot be honoured if the model's format writes several calls as one list (see `turn`). An
error is one line with a status, a `type`, where it helps the `param` to change and a `code` for programs, and says whether
to retry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from etude.chat import TOOL_PARSERS, ToolParser
from etude.chat.grammar import turn_grammar
from etude.errors import GrammarError, one_line
from etude.inference import Grammar
from etude.registry import did_you_mean

TOO_LONG = "context_length_exceeded"


class GatewayError(Exception):
    """An error response with `status` and this message.

    `again`: whether a retry may succeed; if so, OpenAI's clients retry automatically. `details`: for Anthropic's client.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        again: bool = False,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.details = details
        self.status, self.code, self.param, self.again = status, code, param, again

    @property
    def headers(self) -> dict[str, str]:
        """The response headers, which tell OpenAI's clients whether to retry."""
        return {"x-should-retry": "true" if self.again else "false"}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(self.status, str(self), code=self.code, param=self.param)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Returns OpenAI's error object for a response with `status`."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


CHARACTERS_PER_TOKEN = 32
"""Requests with more characters than this per token of context are rejected before rendering: real text has 3 or 4."""
_BYTES_PER_CHARACTER = 6  # maximum in JSON, with every character escaped
_IMAGE = re.compile(rb'"(?:image_)?url"\s*:\s*"data:image/[^"\\]*"|"data"\s*:\s*"[A-Za-z0-9+/=]*"')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escape of a surrogate
_EXACT = "training needs log-probs of what was sampled from"
_ONE_TEXT = "a message is text"
_UNSUPPORTED = {
    "presence_penalty": f"{_EXACT}; send 0",
    "frequency_penalty": f"{_EXACT}; send 0",
    "logit_bias": _EXACT,
    "top_logprobs": "only the sampled tokens have log-probs",
    "modalities": _ONE_TEXT,
    "audio": _ONE_TEXT,
    "functions": "send tools",
    "function_call": "send tool_choice",
    "web_search_options": "send a tool that searches",
}
MOST_STOPS = 16
MOST_NESTED = 64
"""Maximum nesting depth of a tool's parameters."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class ChatRequest(BaseModel):
    """What a client asks for; see OpenAI's reference for the fields' meaning.

    `top_k` and `return_token_ids` are extensions that other servers have too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    response_format: dict[str, Any] | None = None

    # Unsupported (see _UNSUPPORTED): accepted only at values that do nothing.
    top_logprobs: Literal[0] | None = None
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: dict[str, Any] | None = Field(None, max_length=0)
    modalities: list[Literal["text"]] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    web_search_options: None = None

    # Hints.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None

    @field_validator("stop")
    @classmethod
    def _some_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if len(texts) > MOST_STOPS or not all(texts):
            raise ValueError(f"at most {MOST_STOPS} texts, none of them empty")
        return value

    @field_validator("tools")
    @classmethod
    def _function_tools(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for place, tool in enumerate(value or []):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
                raise ValueError(f"tool {place} is not a function: {{'type': 'function', 'function': {{'name': …}}}}")
            if not isinstance(function["name"], str):
                raise ValueError(f"tool {place}: its name must be a text")
            _check_schema(function.get("parameters"), f"tool {place}: parameters")
        return value

    @field_validator("response_format")
    @classmethod
    def _known_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        kind = "text" if value is None else value.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise ValueError("its type must be 'text', 'json_object' or 'json_schema'")
        given = (value or {}).get("json_schema")
        if kind == "json_schema" and not (isinstance(given, dict) and isinstance(given.get("schema"), dict)):
            raise ValueError("json_schema must be {'name': …, 'schema': {…}}")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _known_choice(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if value not in (None, "auto", "none", "required") and not named:
            raise ValueError("'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}")
        return value

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.forced_tools == []:
            raise ValueError("tool_choice forces a call of a tool that tools does not declare")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: set one of them")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of one choice; None if the request sets no limit."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def forced_tools(self) -> list[dict[str, Any]] | None:
        """The tools of which the turn must call one; None if it need not call any."""
        if self.tool_choice == "required":
            return self.tools or []
        if not isinstance(self.tool_choice, dict):
            return None
        name = self.tool_choice["function"]["name"]
        return [tool for tool in self.tools or () if tool["function"]["name"] == name]

    @property
    def schema_of_content(self) -> dict[str, Any] | None:
        """The JSON schema that the content must match; None for any text."""
        given = self.response_format or {}
        if given.get("type") == "json_schema":
            return dict(given["json_schema"]["schema"])
        return {"type": "object"} if given.get("type") == "json_object" else None

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls in the sampled text are parsed."""
        return bool(self.tools) and self.tool_choice != "none"


def _check_schema(schema: object, where: str, depth: int = 0) -> None:
    """Validates the parts of a tool's JSON schema that templates and parsers read.

    Raises:
        ValueError: one is invalid; names it.
    """
    if schema is None or (depth and isinstance(schema, bool)):  # a boolean is a valid schema: true allows anything
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{where} must be an object")
    if depth > MOST_NESTED:
        raise ValueError(f"a tool's parameters may be nested {MOST_NESTED} deep")
    kind = schema.get("type")
    if not (kind is None or isinstance(kind, str) or _is_string_list(kind)):
        raise ValueError(f"{where}.type must be a text or a list of texts")
    if not (schema.get("required") is None or _is_string_list(schema["required"])):
        raise ValueError(f"{where}.required must be a list of texts")
    properties = schema.get("properties")
    if not isinstance(properties, dict | None):
        raise ValueError(f"{where}.properties must be an object")
    for name, each in (properties or {}).items():
        _check_schema(each, f"{where}.properties.{name[:100]}", depth + 1)
    for key in ("anyOf", "oneOf", "enum"):
        branches = schema.get(key)
        if not isinstance(branches, list | None):
            raise ValueError(f"{where}.{key} must be a list")
        for place, each in enumerate((branches or ()) if key != "enum" else ()):
            _check_schema(each, f"{where}.{key}.{place}", depth + 1)


def _is_string_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


class TooLong(Exception):
    """The request cannot fit the context; the message is its length."""


def read_request(
    body: bytes,
    longest: int,
    translate: Callable[[dict[str, Any]], dict[str, Any]],
    names: Mapping[str, str],
) -> ChatRequest:
    """Parses a JSON body for a context of `longest` tokens; `translate` converts it to a chat completion request. Errors
    call a parameter what `names` says, if it has another name in the body's dialect.

    Everything that a template would render (messages, call arguments, tool schemas) counts towards one budget, which is
    checked before the request is validated, so that no request blocks the event loop for longer than a full context does.

    Raises:
        TooLong: it exceeds the budget.
        GatewayError: it is malformed, or asks for something unsupported; names the parameter.
    """
    budget = longest * CHARACTERS_PER_TOKEN
    if len(body) > budget * _BYTES_PER_CHARACTER:
        text = len(body) - sum(len(found.group()) for found in _IMAGE.finditer(body))
        if text > budget * _BYTES_PER_CHARACTER:
            raise TooLong(f"{text} bytes without its images")
    request = decode_body(body)
    if not isinstance(request, dict):
        raise GatewayError("the request's body must be a JSON object")
    request = translate(request)
    messages = request.get("messages")
    if isinstance(messages, list) and len(messages) > longest:
        raise TooLong(f"{len(messages)} messages")
    length = _count_characters(request)
    if length > budget:
        raise TooLong(f"{length} characters")
    return _validate(request, names)


def decode_body(body: bytes) -> Any:
    """Parses a JSON body.

    Raises:
        GatewayError: it is not valid UTF-8 or JSON, or holds a lone surrogate.
    """
    try:
        text = body.decode()
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise GatewayError(f"the request's body is not UTF-8: {one_line(error, 100)}") from error
    except UnicodeEncodeError as error:
        raise GatewayError("the request holds a lone surrogate") from error
    except (ValueError, RecursionError) as error:
        raise GatewayError(f"the request's body is not JSON: {one_line(error, 100)}") from error
    return value


def _count_characters(request: Mapping[str, Any]) -> int:
    """Counts the characters of all strings and keys in a request, except image URLs; any other value counts as one."""
    count, waiting = -sum(map(len, _image_addresses(request.get("messages")))), [request]
    while waiting:
        value: Any = waiting.pop()
        if isinstance(value, dict):
            count += 1 + sum(map(len, value))
            waiting += value.values()
        elif isinstance(value, list):
            count += 1
            waiting += value
        else:
            count += len(value) if isinstance(value, str) else 1
    return count


def _image_addresses(messages: object) -> list[str]:
    contents = (
        [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    images = [part.get("image_url") for part in parts if part.get("type") == "image_url"]
    addresses = [image.get("url") for image in images if isinstance(image, dict)]
    return [address for address in addresses if isinstance(address, str) and address.startswith("data:image/")]


def _validate(body: dict[str, Any], names: Mapping[str, str]) -> ChatRequest:
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name, *place = map(str, first["loc"] or ("",))
        param = ".".join([names.get(name, name), *place]) or None
        reason = first["msg"].removeprefix("Value error, ")
        if name in _UNSUPPORTED:
            reason = f"not supported: {_UNSUPPORTED[name]}"
        elif first["type"] == "extra_forbidden":
            reason = f"unknown parameter{did_you_mean(name, ChatRequest.model_fields)}"
        raise GatewayError(f"{param}: {reason}"[:500] if param else reason, param=param) from error


def grammar_of(request: ChatRequest, parser: ToolParser, prompt: str) -> Grammar | None:
    """Returns what `tool_choice` and `response_format` demand of the sampled turn, as a grammar for the engine; None if it
    may be any text. A turn that need not call a tool may do so even if JSON is asked for; one that must is no JSON.

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
        return Grammar("lark", turn_grammar(parser, tools=tools, several=several, schema=schema, prompt=prompt))
    except GrammarError as error:
        param, advice = ("tool_choice", "tool_choice=auto") if forced else ("response_format", "no response_format")
        able = ", ".join(name for name in TOOL_PARSERS.names() if TOOL_PARSERS.get(name).call_forms)
        reason = f"{param}: {error}: send {advice}, or use rollout.multi_turn.format with one of {able}"
        raise GatewayError(reason, param=param) from error
