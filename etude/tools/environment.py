"""`filled`: substitutes `${…}` references in a tool configuration from the environment.

Invariant: `${VAR}`, `${oc.env:VAR}` and `${oc.env:VAR,default}` are replaced, once, and anything else in `${…}` is an
error; a variable that is not set and has no default is an error that names it. Substituted values are never logged.
"""

from __future__ import annotations

import os
import re
from typing import Any

from etude.errors import ConfigError

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_VARIABLE = re.compile(r"(?:oc\.env:)?\s*([A-Za-z_][A-Za-z0-9_]*)\s*")
_VARIABLE_WITH_DEFAULT = re.compile(r"oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*,(.*)", re.DOTALL)


def filled(value: Any, place: str, where: str) -> Any:
    """`value` with every `${…}` in its strings replaced; `place` is its path for errors, `where` its file and entry.

    Raises:
        ConfigError: a reference names no variable, or one that is not set.
    """
    if isinstance(value, dict):
        return {key: filled(item, f"{place}.{key}", where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [filled(item, f"{place}[{i}]", where) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return _REFERENCE.sub(lambda match: _variable(match[1], place, where), value)


def _variable(reference: str, place: str, where: str) -> str:
    with_default = _VARIABLE_WITH_DEFAULT.fullmatch(reference)
    match = with_default or _VARIABLE.fullmatch(reference)
    if match is None:
        raise ConfigError(f"{where}: {place}: '${{{reference}}}' names no environment variable")
    value = os.environ.get(match[1])
    if value is None and with_default:
        return with_default[2].strip()
    if value is None:
        raise ConfigError(f"{where}: {place}: the environment variable {match[1]} is not set")
    return value
