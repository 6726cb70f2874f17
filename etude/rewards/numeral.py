r"""Numbers as people and models write them: `1,000`, `1.234,5`, `0,5`, `1\frac{1}{2}`, `0.1\overline{6}`, `1.5\times10^8`.

Invariant: exact arithmetic on a bounded number of digits, so nothing here takes noticeable time. Text that is not
exactly one number parses to None; where the notation is ambiguous ("1,5" may also be a list) the caller decides, from
the other answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MIN_ROUNDED_PLACES = 6
"""A decimal with at least this many places may be rounded: 0.333333 matches 1/3, 0.33 does not."""
MIN_ROUNDED_DIGITS = 5
_MAX_EXPONENT = 300

MAGNITUDES = {
    "hundred": 2,
    "thousand": 3,
    "lakh": 5,
    "million": 6,
    "crore": 7,
    "billion": 9,
    "trillion": 12,
    "quadrillion": 15,
}
"""Words after a number, and the power of ten that each multiplies it by."""
_COUNT = (
    r"(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)"
)
CONTINUATION = (
    rf"(?i:[ \t]+(?:(?:(?:divided[ \t]+by|multiplied[ \t]+by|added[ \t]+to|to[ \t]+the|[a-z]+)[ \t]+)?{_COUNT}"
    r"|(?:plus|minus|times|over|by|to|mod|point)[ \t]+(?:zero|one)|doubled|tripled|halved)\b"
    r"|[$*]{0,3}[ \t]+(?:(?:[a-z]+[ \t]+)?and[ \t]+(?:a|one)[ \t]+(?:half|third|quarter)"
    r"|(?:feet|foot|ft|yards?|hours?|hrs?|minutes?|mins?|weeks?|days?|years?|pounds?|lbs?|dollars?)[ \t]+\d+[ \t]+[a-z]+)\b"
    r"|[$*]{0,3}[ \t]*(?:and[ \t]+)?[½⅓⅔¼¾])"
)
"""What follows a number and makes another one of it, as a pattern: "5 plus six", "5 feet 6 inches", "5 and a half"."""
_FILL = r"(?:[ \t$*^`(){}\[\]\\]|\\(?:text(?:bf)?|boxed)(?![a-z]))"
_OR = r"(?<![a-z])(?:or|and|but|maybe|perhaps|possibly|vs\.?|versus|to|otherwise|alternatively|else|either|wait|no)(?![a-z])"
ALTERNATIVE = (
    rf"(?i:{_FILL}{{0,9}}(?:(?:[a-z]{{2,20}}(?![a-z]){_FILL}{{0,9}}){{0,2}}"
    rf"(?:,(?={_FILL})|[;|&∨、或?]|\\\\|\\(?:lor|vee|pm)(?![a-z])|(?:\.{_FILL}{{1,9}})?{_OR})"
    rf"|(?<=[$)\]])\s?[-/–]|[-/–]\s?(?=\$|\\[(\[]))(?:{_FILL}|,|{_OR}){{0,9}}[-−]?\d)"
)
"""What follows a number if the text names another one beside it, as a pattern: "7 apples, or maybe 5"."""
_CHINESE_DIGITS = "零一二三四五六七八九"
_CHINESE = re.compile(rf"([{_CHINESE_DIGITS[1:]}])?(十)?(?:(?<=十)([{_CHINESE_DIGITS[1:]}]))?([百千万亿])?")
_CHINESE_POWERS = {"百": 2, "千": 3, "万": 4, "亿": 8}

_D = r"\d{1,200}"
_INTEGER = re.compile(_D)
_DECIMAL = re.compile(rf"({_D})\.(\d{{0,200}})|\.({_D})")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?=\.|\Z)|\d{1,3}(?: \d{3})+(?=[.,]|\Z)|\d{1,3}(?:'\d{3})+(?=[.,]|\Z)")
_CONTINENTAL = re.compile(r"(\d{1,3}(?:\.\d{3})+)(?:,(\d{1,200}))?")  # 1.234,5 and 1.234.567
_DECIMAL_COMMA = re.compile(r"(\d{1,200}),(\d{1,2}|\d{4,200}|(?<=\A0,)\d{3})")
_FRACTION = re.compile(rf"({_D})/({_D})|\\[dt]?frac(?:\{{([+-]?{_D})\}}|(\d))(?:\{{({_D})\}}|(\d))")
_MIXED = re.compile(rf"({_D})(?: +(?=\d+/)| *(?=\\[dt]?frac))(.+)")
_REPEATING = re.compile(r"(\d{0,200})\.(\d{0,100})\\(?:overline|bar|dot)\{(\d{1,100})\}")
_SCIENTIFIC = re.compile(r"(.+?)(?:(?:\\times|\\cdot|\*) ?10\^(?:\{([+-]?\d{1,4})\}|(\d{1,4}))|[eE]([+-]?\d{1,4}))")


@dataclass(frozen=True)
class Numeral:
    """A number and its notation: `places` after the decimal point (None: an integer or a fraction), its significant
    `digits`, and whether a percent sign followed (`value` is the number before it)."""

    value: Fraction
    places: int | None = None
    digits: int = 0
    percent: bool = False

    def equals(self, other: Numeral) -> bool:
        """Whether both are the same number; a percentage matches its number or a hundredth of it."""
        if self.percent == other.percent:
            return self._close(other)
        part, whole = (self, other) if self.percent else (other, self)
        hundredth = Numeral(part.value / 100, None if part.places is None else part.places + 2, part.digits)
        return part._close(whole) or hundredth._close(whole)

    def _close(self, other: Numeral) -> bool:
        if self.value == other.value:
            return True
        places = [each.places for each in (self, other) if each.places is not None]
        rounded = bool(places) and min(places) >= MIN_ROUNDED_PLACES
        precise = all(each.places is None or each.digits >= MIN_ROUNDED_DIGITS for each in (self, other))
        return rounded and precise and abs(self.value - other.value) <= Fraction(1, 2 * 10 ** min(places))


def read_numeral(text: str) -> Numeral | None:
    """Parses `text` as a number in any of the notations above; None if it is not exactly one."""
    body = text.strip()
    percent = re.search(r"(?:\\?%|(?i:percent|per cent))\Z", body)
    if percent:
        body = body[: percent.start()].rstrip()
    sign = -1 if body.startswith("-") else 1
    body = body[1:].lstrip() if body[:1] in ("+", "-") else body
    found = _unsigned(body)
    if found is None:
        return None
    return Numeral(sign * found.value, found.places, found.digits, percent is not None)


def _chinese(body: str) -> int | None:
    """Reads 零, 二, 十二, 三百 or 二十万; longer numbers, whose short forms are ambiguous (一百五), are not read."""
    body = body.replace("两", "二").replace("〇", "零")
    found = _CHINESE.fullmatch(body)
    if body == "零" or found is None or not (found[1] or found[2]):
        return 0 if body == "零" else None
    first, last = (_CHINESE_DIGITS.index(each or "零") for each in (found[1], found[3]))
    count = 10 * (first or 1) + last if found[2] else first
    return int(count * 10 ** _CHINESE_POWERS.get(found[4], 0))


def _unsigned(body: str) -> Numeral | None:
    if len(body) > 500:
        return None
    if (number := _chinese(body)) is not None:
        return Numeral(Fraction(number))
    if (found := _decimal(_plain_notation(body))) is not None:
        return found
    if (fraction := _fraction(body)) is not None:
        return Numeral(fraction)
    if match := _MIXED.fullmatch(body):
        part = _fraction(match[2])
        return None if part is None or part < 0 else Numeral(int(match[1]) + part)
    if match := _REPEATING.fullmatch(body):
        whole, head, tail = match[1] or "0", match[2], match[3]
        repeated = Fraction(int(tail), 10 ** len(head) * (10 ** len(tail) - 1))
        return Numeral(Fraction(int(whole + head), 10 ** len(head)) + repeated)
    if match := _SCIENTIFIC.fullmatch(body):
        exponent = int(match[2] or match[3] or match[4])
        mantissa = _decimal(_plain_notation(match[1].strip()))
        if mantissa is not None and abs(exponent) <= _MAX_EXPONENT:
            return Numeral(mantissa.value * Fraction(10) ** exponent)
    return None


def _plain_notation(body: str) -> str:
    """Rewrites `body` with a decimal point and without thousands separators."""
    match = _CONTINENTAL.fullmatch(body)
    if match and (match[2] is not None or body.count(".") > 1):  # "1.234" alone is a decimal
        return match[1].replace(".", "") + ("." + match[2] if match[2] else "")
    if match := _DECIMAL_COMMA.fullmatch(body):
        return f"{match[1]}.{match[2]}"
    if match := _THOUSANDS.match(body):
        rest = body[match.end() :]
        return re.sub(r"[, ']", "", match[0]) + (rest.replace(",", ".") if rest.count(",") == 1 else rest)
    return body


def _decimal(body: str) -> Numeral | None:
    if _INTEGER.fullmatch(body):
        return Numeral(Fraction(int(body)))
    match = _DECIMAL.fullmatch(body)
    if match is None:
        return None
    whole, after = match[1] or "0", (match[2] if match[3] is None else match[3])
    digits = (whole + after).lstrip("0")
    return Numeral(Fraction(int(whole + after), 10 ** len(after)), len(after), len(digits))


def _fraction(body: str) -> Fraction | None:
    match = _FRACTION.fullmatch(body)
    if match is None:
        return None
    top, bottom = match[1] or match[3] or match[4], match[2] or match[5] or match[6]
    return Fraction(int(top), int(bottom)) if int(bottom) else None
