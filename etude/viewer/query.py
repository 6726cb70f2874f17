"""`Filter`: which trajectories to list, and `parse_query`, which reads one from a line of text.

Terms such as `score>0.5 stop:completed tool:search source:gsm8k step:3..5 flag:truncated split:train` are combined with
AND. The remaining words are searched for as one string, or between slashes (`/\\d+ apples/`) as a regular expression.
Values with spaces must be quoted. Patterns are bounded in length and time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etude.errors import ConfigError, one_line
from etude.viewer.rows import Row

HELP = "score>0.5  step:3..5  stop:completed  tool:NAME  source:NAME  flag:truncated  split:train  words  /pattern/"
TERMS = {"stop": "stop_reason", "tool": "tool", "source": "data_source", "flag": "flag", "split": "split"}
"""Name of a term → the field of `Filter` that it sets."""
MAX_PATTERN = 500  # characters
_PATTERN_SECONDS = 0.5  # regex timeout per text; a slower pattern is rejected
_TERM = re.compile(
    rf'(?<!\S)(?:(?P<number>score|step)(?P<sign>>=|<=|:|>|<)|(?P<name>{"|".join(TERMS)}):)(?P<value>"[^"]*"|\S+)'
)


@dataclass(frozen=True)
class Filter:
    """Conditions on rows; None and "" mean no restriction. Ranges are inclusive; a row without a score fails a score range.

    `text` is matched against prompts and responses, ignoring case; with `regex` it is a regular expression, case-sensitive.
    """

    min_score: float | None = None
    max_score: float | None = None
    min_step: int | None = None
    max_step: int | None = None
    split: str | None = None
    stop_reason: str | None = None
    tool: str | None = None
    data_source: str | None = None
    flag: str | None = None
    text: str = ""
    regex: bool = False

    def accepts(self, row: Row) -> bool:
        return (
            _within(row.score, self.min_score, self.max_score)
            and _within(row.step, self.min_step, self.max_step)
            and self.split in (None, row.split)
            and self.stop_reason in (None, row.stop_reason)
            and (self.tool is None or self.tool in row.tools)
            and self.data_source in (None, row.data_source)
            and (self.flag is None or self.flag in row.flags)
        )

    def text_matcher(self) -> Callable[[str], bool]:
        """Returns the test of one text against `text`.

        Raises:
            ConfigError: the pattern is malformed or too long; the test raises it if the pattern is too slow.
        """
        if len(self.text) > MAX_PATTERN:
            raise ConfigError(f"search text is {len(self.text)} characters long; at most {MAX_PATTERN}")
        if not self.regex:
            folded = self.text.casefold()
            return lambda other: folded in other.casefold()
        import regex  # unlike `re`, it supports timeouts

        try:
            pattern = regex.compile(self.text)
        except (regex.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"search pattern {self.text!r}: {one_line(error)}") from error

        def matches(other: str) -> bool:
            try:
                return pattern.search(other, timeout=_PATTERN_SECONDS) is not None
            except TimeoutError as error:
                raise ConfigError(
                    f"search pattern {self.text!r} is too slow; make it simpler, or search for plain text"
                ) from error

        return matches


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def parse_query(query: str) -> Filter:
    """Parses `query`; an empty one accepts everything.

    Raises:
        ConfigError: a range is malformed; quotes it.
    """
    wanted: dict[str, Any] = {}
    for term in _TERM.finditer(query):
        value = term["value"].strip('"')
        if term["name"]:
            wanted[TERMS[term["name"]]] = value
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
    given = [number for number in numbers if number is not None]
    if not 1 <= len(numbers) <= 2 or not given or any(map(math.isnan, given)):
        raise ConfigError(f"{term}: not a range; write {term.split(sign)[0]}:3, {term.split(sign)[0]}:3..5 or …>=3")
    if sign == ":":
        return numbers[0], numbers[-1]
    edge = {">": math.nextafter(given[0], math.inf), "<": math.nextafter(given[0], -math.inf)}.get(sign, given[0])
    return (edge, None) if sign[0] == ">" else (None, edge)
