"""Redaction: replaces secrets in settings and command lines before they are logged, recorded or displayed.

Invariant: it redacts too much rather than too little; keys that a configuration declares, and names of environment
variables, are not secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"
_SECRET = re.compile(
    r"(?:(?:[_-]|api|access|secret|private|signing)key|token|secret|password|passwd|passphrase|pwd|credentials?|authorization|cookie|bearer)$",
    re.IGNORECASE,
)
_COLUMNS = ("prompt_key", "image_key")  # declared keys: their values name columns
_URL_USER = re.compile(r"(?<=://)[^/\s?#]+(?=@)")
_QUERY = re.compile(
    r"([?&][^=&#\s]*(?:key|token|secret|pass|pwd|sig|auth|cred|session|code)[^=&#\s]*=)[^&#\s]+", re.IGNORECASE
)
_BEARER = re.compile(r"(\bBearer\s+)\S{8,}")
_OPTION = re.compile(r"((?:^|\s)--?[\w-]*(?:key|token|secret|password|passwd|pwd)[= ])\S+", re.IGNORECASE)
_BRACES = re.compile(r"key|token|secret|passw|env_vars", re.IGNORECASE)


def redact(value: Any, name: str = "") -> Any:
    """Replaces secrets in `value`: strings whose key ends in `_key`, `-key`, `apiKey` or the like, `token`, `secret` or
    `password`; everything under `env_vars`; the user part of URLs; query parameters with such names (also plain `key`); and
    values of such `--option`s. A key that is just `key`, or another word with that ending (`monkey`), is not redacted."""
    if isinstance(value, Mapping):
        inside = name if name == "env_vars" else ""
        return {key: redact(item, inside or str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        after = ["", *(each if _is_option(each) else "" for each in value)]
        return [redact(item, option or name) for option, item in zip(after, value)]
    if not isinstance(value, str) or not value:
        return value
    if name == "env_vars" or (_SECRET.search(name) and name not in _COLUMNS):
        return REDACTED
    for pattern, kept in ((_URL_USER, ""), (_QUERY, r"\1"), (_BEARER, r"\1"), (_OPTION, r"\1")):
        value = pattern.sub(f"{kept}{REDACTED}", value)
    return value


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Redacts the arguments of a command, including `key=value` ones; a nested value (in braces) with a secret key is
    replaced as a whole."""
    redacted, option = [], ""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and "://" not in key:
            nested = re.search(r"\{|env_vars", argument) and _BRACES.search(argument)
            kept = REDACTED if nested else redact(value, key.rpartition(".")[2])
            redacted.append(f"{key}={kept}")
        else:
            redacted.append(redact(argument, option))
        option = argument if _is_option(argument) else ""
    return redacted


def _is_option(argument: object) -> bool:
    """Whether `argument` is an option whose value is the next argument."""
    return isinstance(argument, str) and argument.startswith("-") and "=" not in argument
