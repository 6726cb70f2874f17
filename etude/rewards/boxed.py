r"""`last_boxed`: the answer in the last `\boxed{…}` of a text, in linear time.

Boxes joined by a comma, "and" or "or" are one answer of several values: `\boxed{1} and \boxed{-2}` is "1, -2". So a second
guess in a box of its own makes an answer as wrong as one inside the box. A box alone on a later line corrects it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\\\(?!boxed|fbox)|\\[{}]|(?P<open>\{)|(?P<close>\})")
_LINK = r"[,;&]|\\q?quad|(?:\\text\s?\{\s?)?\b(?:and|or)\b(?:\s?\})?"
_LINKED = re.compile(_LINK)
_BETWEEN = re.compile(rf"(?:{_LINK}|[\s$.]|\\[()\[\],;:! ]|[a-z](?:_\{{?\w{{1,9}}\}}?)?\s?=)*")
_COMMAND = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")


@dataclass
class _Box:
    command: int
    """Where `\boxed{` begins."""
    start: int
    end: int | None = None
    """Where its closing brace is; None: unfinished."""
    outer: _Box | None = None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{…}` with balanced braces, after those of the boxes joined to it; None if it
    is missing or unfinished. A box within a box is read as its content."""
    boxes = last_boxes(text)
    return ", ".join(dict.fromkeys(boxes)) if boxes else None


def last_boxes(text: str) -> list[str]:
    """Returns the contents of which `last_boxed` makes one answer."""
    boxes = _boxes(text)
    if not boxes or boxes[-1].end is None:
        return []
    answers: list[str] = []
    after: _Box | None = None
    for box in reversed(boxes):
        if after is not None and box.start >= after.start:
            continue  # within the box before
        read = box  # the innermost with all that the outermost says
        while box.end is not None and box.outer is not None and box.outer.end is not None:
            says_more = text[box.outer.start : box.command].strip() or text[box.end + 1 : box.outer.end].strip()
            box = box.outer
            read = box if says_more else read
        if box.end is None:
            break
        between = "" if after is None else text[box.end + 1 : after.command]
        if not _BETWEEN.fullmatch(between) or ("\n" in between and not _LINKED.search(between)):
            break  # they are not joined
        answers.append(_COMMAND.sub("", text[read.start : read.end]).strip())
        after = box
    return answers[::-1]


def _boxes(text: str) -> list[_Box]:
    """Returns all boxes, in the order in which they begin."""
    boxes: list[_Box] = []
    opened: list[_Box | None] = []  # None: a brace of another kind
    around: list[_Box] = []
    for token in _TOKEN.finditer(text):
        if token["box"]:
            box = _Box(token.start(), token.end(), outer=around[-1] if around else None)
            boxes.append(box)
            opened.append(box)
            around.append(box)
        elif token["open"]:
            opened.append(None)
        elif token["close"] and opened and (closed := opened.pop()):
            closed.end = token.start()
            around.pop()
    return boxes
