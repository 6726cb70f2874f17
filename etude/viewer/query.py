"""`parse_query`: parses a search query for trajectories into a `Filter`.

Terms such as `score>0.5 stop:completed tool:search source:gsm8k step:3..5 flag:truncated split:train` are combined with
AND. The remaining words are searched for as one string, or between slashes (`/\\d+ apples/`) as a regular expression.
Values with spaces must be quoted.
"""

from __future__ import annotations

import math
import re
from typing import Any

from etude.errors import ConfigError
from etude.viewer.index import Filter

HELP = "score>0.5  step:3..5  stop:completed  tool:NAME  source:NAME  flag:truncated  split:train  words  /pattern/"
_NAMES = {"stop": "stop_reason", "tool": "tool", "source": "data_source", "flag": "flag", "split": "split"}
_TERM = re.compile(
    rf'(?<!\S)(?:(?P<number>score|step)(?P<sign>>=|<=|:|>|<)|(?P<name>{"|".join(_NAMES)}):)(?P<value>"[^"]*"|\S+)'
)


def parse_query(query: str) -> Filter:
    """Parses `query`; an empty one accepts everything.

    Raises:
        ConfigError: a range is malformed; quotes it.
    """
    wanted: dict[str, Any] = {}
    for term in _TERM.finditer(query):
        value = term["value"].strip('"')
        if term["name"]:
            wanted[_NAMES[term["name"]]] = value
        else:
            low, high = _range(term["sign"], value, term[0])
            wanted |= {f"min_{term['number']}": low} if low is not None else {}
            wanted |= {f"max_{term['number']}": high} if high is not None else {}
    text = _TERM.sub("", query).strip()
    if len(text) > 2 and text[0] == text[-1] == "/":
        return Filter(**wanted, text=text[1:-1], regex=True)
    return Filter(**wanted, text=text)


def quote_term(kind: str, value: str) -> str:
    """Returns the query term that matches `value`, such as `tool:search`."""
    return f'{kind}:"{value}"' if re.search(r"\s", value) or not value else f"{kind}:{value}"


def _range(sign: str, value: str, term: str) -> tuple[float | None, float | None]:
    """Parses `3`, `3..5`, `3..` or `..5` after a colon, or a number after a comparison, into (low, high)."""
    parts = value.split("..") if sign == ":" else [value]
    try:
        numbers = [float(part) if part else None for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or numbers == [None] * len(numbers) or any(map(_is_nan, numbers)):
        raise ConfigError(f"{term}: not a range; write {term.split(sign)[0]}:3, {term.split(sign)[0]}:3..5 or …>=3")
    low, high = numbers[0], numbers[-1]
    if sign == ":":
        return low, high
    assert low is not None
    edge = {">": math.nextafter(low, math.inf), "<": math.nextafter(low, -math.inf)}.get(sign, low)
    return (edge, None) if sign[0] == ">" else (None, edge)


def _is_nan(number: float | None) -> bool:
    return number is not None and math.isnan(number)
