"""Decodes the arguments that a model wrote.

Invariant: the result is a JSON object of bounded depth with finite numbers and encodable text that could be
read in one way only (no duplicate keys). Anything else raises a one-line `ArgumentError`. A whole arguments
object inside a JSON string is accepted: models write that too. Checking it against the schema is left to
`argument_check`.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from etude.errors import one_line

MAX_DEPTH = 100
MAX_SHOWN_CHARS = 80
_BRACKETS = re.compile(r"[\[{]")


class ArgumentError(ValueError):
    """The arguments of a call are invalid; the text is for the model, `word` for the record."""

    def __init__(self, text: str, word: str = "malformed") -> None:
        super().__init__(text)
        self.word = word


def decode_arguments(text: str) -> dict[str, Any]:
    """The JSON object in `text`, or in the JSON string in `text`.

    Raises:
        ArgumentError: there is none.
    """
    arguments = decode_json(text)
    if isinstance(arguments, str):
        arguments = decode_json(arguments)
    if not isinstance(arguments, dict):
        raise ArgumentError('the arguments must be a JSON object such as {"name": "value"}')
    return arguments


def decode_json(text: str) -> Any:
    """The JSON value in `text`; raises ArgumentError as `decode_arguments` does."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ArgumentError("the arguments are nested too deeply") from None
    except ArgumentError:
        raise
    except ValueError as error:
        raise ArgumentError(f"the arguments are not valid JSON ({one_line(error)})") from None
    if len(_BRACKETS.findall(text)) > MAX_DEPTH and _is_deep(value):
        raise ArgumentError(f"the arguments are nested deeper than {MAX_DEPTH} levels")
    if not text.isascii() or "\\u" in text:
        _check_text(value)
    return value


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the arguments hold {error.object[error.start]!a}, which is no character") from None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> None:
    raise ArgumentError(f"the arguments hold {name}, which is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ArgumentError(f"the number {shortened(text)} is out of range")
    return number


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ArgumentError(f"the key {shortened(twice)!r} appears twice in the arguments")
    return keys


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_duplicates)


def shortened(text: str) -> str:
    """At most `MAX_SHOWN_CHARS` characters of `text`, for a message."""
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
