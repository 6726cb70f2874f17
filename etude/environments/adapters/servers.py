"""What adapters of servers share: a question before the run, and tools and results as MCP's and OpenAI's JSON say them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from etude.errors import ConfigError, InfrastructureError, describe_error, one_line
from etude.tools.base import function_schema

_PATIENCE = 10.0  # seconds


def fetch_json(package: str, url: str) -> dict[str, Any]:
    """The JSON object at `url` of a server of `package`.

    Raises:
        ConfigError: no such server answers.
    """
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE) as answer:
            return json_object(url, answer.read())
    except (OSError, InfrastructureError) as error:
        line = f"{package}: no such server answers at {url}: {one_line(error)}"
        raise ConfigError(line, fix="start it first") from error


def json_object(url: str, text: str | bytes) -> dict[str, Any]:
    """The JSON object that the server at `url` answered.

    Raises:
        InfrastructureError: it is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InfrastructureError(f"{url}: the answer is not JSON: {one_line(error, 80)}") from error
    if not isinstance(found, dict):
        raise InfrastructureError(f"{url}: the answer is JSON, but no object: {text[:80]!r}")
    return found


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Within it, an answer that lacks what is read, or has another type, is an InfrastructureError of `url`."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise InfrastructureError(f"{url}: unreadable answer: {describe_error(error)}") from error


def openai_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAI schema of a tool that MCP, or the Responses API, describes."""
    keys = ("inputSchema", "input_schema", "parameters")
    made = function_schema(tool["name"], tool.get("description") or "")
    made["function"]["parameters"] = next((tool[key] for key in keys if tool.get(key)), {"type": "object"})
    return made


def as_text(result: Any) -> str:
    """What a tool returned, as text: MCP's content, or the value itself."""
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        return "\n".join(str(each.get("text", each.get("type"))) for each in result["content"])
    return result if isinstance(result, str) else json.dumps(result)
