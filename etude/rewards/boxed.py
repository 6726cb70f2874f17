r"""`last_boxed`: the answer in the last `\boxed{…}` of a text, in linear time."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE_STEP = {"{": 1, "}": -1}


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{…}` with balanced braces; None if it is missing or unfinished."""
    start = None
    for match in _BOXED.finditer(text):
        start = match.end()
    if start is None:
        return None
    depth, position = 1, start
    while position < len(text):
        depth += _BRACE_STEP.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
        position += 2 if text[position] == "\\" else 1  # an escaped brace is literal
    return None
