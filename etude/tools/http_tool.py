"""`HttpTool`: calls an HTTP service, configured without code.

    - config: {type: http, url: "https://host/items/{id}", headers: {Authorization: "Bearer ${KEY}"}}
      tool_schema: …

Invariant: the model's arguments fill the `{name}` placeholders of the URL, each as one quoted path segment or query value;
the remaining arguments go where `send` says. Nothing the model writes can change host, method or headers. The size of a
response is limited, and redirects are not followed. A client error is returned to the model, unless it concerns what the
model does not write (key, rate limit, method, headers, an address without arguments): those, server errors, broken
connections and a web page that nobody asked for are infrastructure failures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from pydantic import Field, field_validator

from etude.errors import ConfigError, InfrastructureError, ToolError
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.serving.json_service import JsonService, Unavailable
from etude.tools.base import BaseTool, Execution
from etude.tools.options import CallPolicy, HttpUrl, ToolOptions, read_options
from etude.trace import rollout_trace_op

_PLACE = re.compile(r"\{(\w+)\}")
# key, quota, method, headers, time, protocol: none of which the model writes
_NOT_THE_MODELS_FAULT = (401, 402, 403, 405, 406, 407, 408, 411, 415, 421, 425, 426, 429)
_NO_SUCH_ADDRESS = (404, 410)
_WEB_PAGE = re.compile(r"\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.I | re.S)
_ERROR_BODY_CHARS = 1000  # of an error response's body, returned to the model


class HttpOptions(ToolOptions):
    """`config` of a tool of type `http`.

    Attributes:
        url: with `{name}` where an argument belongs.
        method: by default GET where the arguments go into the query, else POST.
        headers: sent with every request. A web page (HTML) is an infrastructure failure, as of a login or a proxy, unless
            `Accept` names `text/html`.
        send: where the remaining arguments go: the JSON body or the query.
        result: path of the result inside a JSON response, such as `items.0.text`; without it, the whole body as text.
        max_body_bytes: of a response; a longer one is an infrastructure failure.
        connections: maximum per process.
    """

    url: HttpUrl
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] | None = None
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    send: Literal["json", "query"] | None = None
    result: str | None = None
    max_body_bytes: int = Field(default=1_000_000, ge=1, le=100_000_000)
    connections: int = Field(default=100, ge=1, le=10_000)

    @field_validator("url")
    @classmethod
    def _has_a_fixed_host(cls, url: str) -> str:
        if "{" in urlsplit(url).netloc:
            raise ValueError("the host must not depend on the model's arguments")
        return url

    @field_validator("headers")
    @classmethod
    def _are_one_line(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if any(character in "\r\n\0" for character in name + value):
                raise ValueError(f"the header '{name}' holds a character that HTTP forbids")
        return headers


class HttpTool(BaseTool):
    """One operation of an HTTP service; needs a `tool_schema`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Raises ConfigError if an option is invalid, or the schema is missing or lacks an argument that the URL needs."""
        if tool_schema is None:
            raise ConfigError("a tool of type 'http' needs a tool_schema: name, description and parameters")
        super().__init__(config, tool_schema)
        self._options = options = read_options(HttpOptions, config, self.name)
        self._send = options.send or ("query" if options.method in ("GET", "DELETE") else "json")
        self._method = options.method or ("GET" if options.send == "query" else "POST")
        self._timeout = CallPolicy.from_config(config, self.name).timeout
        self._service = JsonService(
            options.url,
            connections=options.connections,
            max_body_bytes=options.max_body_bytes,
            headers={"Accept": "application/json, text/*;q=0.9, */*;q=0.1", **options.headers},
        )
        accepted = (value for name, value in options.headers.items() if name.casefold() == "accept")
        self._takes_pages = any("text/html" in value.casefold() for value in accepted)
        known = self.tool_schema.function.parameters.properties
        for name in _PLACE.findall(options.url):
            if name not in known:
                raise ConfigError(f"tool '{self.name}': config.url needs '{name}', which the schema does not have")

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Sends one request; a row's `execute_kwargs` are added to the arguments and override the model's.

        Raises:
            ToolError: an argument that the URL needs is missing, or the service rejects the request.
            InfrastructureError: the service does not respond, or its response is unreadable.
        """
        arguments = {**parameters, **execute_kwargs}
        url, rest = _fill_url(self._options.url, arguments)
        params = {name: _as_text(value) for name, value in rest.items()} if self._send == "query" else {}
        status, body, retry_after = await self._service.fetch(
            self._method,
            seconds=self._timeout,
            url=url,
            params=params or None,
            body=rest if self._send == "json" else None,
        )
        text = body.decode("utf-8", "replace")
        if status in _NO_SUCH_ADDRESS and url == self._options.url and not params:
            raise InfrastructureError(
                f"{self._service.host} answered with HTTP {status} at the address in config.url of tool '{self.name}', "
                "which holds no argument of the model's"
            )
        if 400 <= status < 500 and status not in _NOT_THE_MODELS_FAULT:
            said = " ".join(text.split())[:_ERROR_BODY_CHARS]
            raise ToolError(f"Error: HTTP {status}{': ' if said else ''}{said}")
        if not 200 <= status < 300:
            raise Unavailable(f"{self._service.host} answered with HTTP {status}", retry_after)
        return ToolResponse(text=self._read(text)), 0.0, {"status": status}

    def _read(self, text: str) -> str:
        if self._options.result is None:
            if not self._takes_pages and _WEB_PAGE.match(text):
                raise InfrastructureError(
                    f"{self._service.host} answered with a web page; if tool '{self.name}' is to return HTML, add "
                    '"Accept: text/html" to config.headers'
                )
            return text
        try:
            value = json.loads(text)
            for step in self._options.result.split("."):
                value = value[int(step)] if isinstance(value, list) else value[step]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise InfrastructureError(
                f"{self._service.host} answered without '{self._options.result}', which config.result names"
            ) from None
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fill_url(template: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Fills the placeholders of the URL; returns (URL, remaining arguments)."""
    rest = dict(arguments)
    filled_in = {}
    for name in dict.fromkeys(_PLACE.findall(template)):
        if rest.get(name) is None:
            raise ToolError(f"missing argument '{name}'")
        segment = quote(_as_text(rest.pop(name)), safe="")
        if segment.strip(".") == "":  # a server would resolve ".." as the parent folder
            raise ToolError(f"the argument '{name}' cannot be empty or consist of dots")
        filled_in[name] = segment
    return _PLACE.sub(lambda match: filled_in[match[1]], template), rest


def _as_text(value: object) -> str:
    """Returns a string unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
