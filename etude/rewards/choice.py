"""Scoring of multiple-choice questions: the letter of the chosen option.

Invariant: the answer is taken from what follows `</think>`, and there from the last `<answer>…</answer>` if there is one. A
stated answer ("the answer is C", "C is correct") goes before an option that is merely mentioned, and a letter that starts a
sentence ("A man walks in") is never taken for a choice, unless nothing follows it.
"""

from __future__ import annotations

import re
from typing import Any

from etude.rewards.boxed import last_boxes
from etude.rewards.truth import reads_truth, truths_of

MAX_CHARS = 20_000  # characters at the end of a solution, where the answer is
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_BOXED = re.compile(  # "(A)", "\text{A. Paris}"
    r"\\boxed\{\s{0,9}(?:\\(?:text(?:bf|it|rm)?|math(?:rm|bf))\{)?\s{0,9}\(?([A-Za-z])"
    r"(?:\)?\.?|[).:](?![^{}]{0,200}\b(?:[B-Z]\b|A\b(?!\s[a-z])))[^{}]{1,200})\s{0,9}\}"
    r"(?!(?:[\s,/&(]|\\text\{|\}|or\b|and\b){0,9}[A-Z]\)?\s{0,9}\})"  # "\text{A} or B"
)
_FONT = r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf))\{\s{0,9}"
_DRESSED = re.compile(  # $A$, \(A\), \textbf{(A) }, {A}, “A”; not a formula such as $A = 2$
    rf"(?:\$|\\\()\s{{0,9}}(?:{_FONT})?(\(?[A-Z]\)?[.:]?)\s{{0,9}}\}}?\s{{0,9}}(?:\$|\\\))"
    rf"|(?<!\\boxed\{{){_FONT}(\(?[A-Za-z]\)?[.:]?\s{{0,9}})\}}"
    r"|(?<![\w}])[\"'“”‘’`{]([A-Za-z])[\"'“”‘’`}](?!\w)"
)
_NOT_ANOTHER = (  # "A or B" and "A, B" choose none
    r"(?![)\]*\"'`]{0,3}[ \t]{0,9}(?:[,;/|&+、，；~(\[]|or\b|and\b|vs\b|或者?|和|还是)"
    r"(?:[ \t]{0,9}(?:or|and|maybe|perhaps)\b|[ \t,(\[*&\"'`]){0,9}[A-Z](?![A-Za-z'’]|[ \t]+(?!(?:or|and)\b)[a-z]))"
    r"(?![).:]{1,2}[ \t]+[Oo]r[ \t]+\(?[A-Z][).:])"  # "C. Or A."
    r"(?![).:]{1,2}[ \t][^\n<]{0,80}?(?<!\b[A-Z])(?<!\b[A-Z]\))"  # "C. Paris or A. Rome", not "C. It is not A or B. So"
    r"[ \t][Oo]r[ \t]+\(?[A-Z][).:]{1,2}[ \t]+\w)"
)
_OPENING = r"[:：=]?[\s*]{0,9}(?:[*(（\[{\"'`$“]|\\\(){0,3}"
_CHOSEN = r"([A-Z])(?!['’]?[A-Za-z])" + _NOT_ANOTHER
_STATED = re.compile(
    r"\b(?i:answer|(?:correct|right|best)\s(?:option|choice)"
    r"|I(?:\swould|\swill|['’](?:d|ll))?\s(?:choose|pick|select|go\swith))\b\*{0,2}\s{0,9}"
    r"(?i:(?:is|(?:must|should|would)\sbe)\b)?\s{0,9}[:*]{0,3}\s{0,9}(?i:(?:option|choice)\b)?\s{0,9}"
    + _OPENING
    + _CHOSEN
)
_APPROVED = re.compile(
    r"(?:\A|[.:?!\n]\s{0,9}|(?i:\b(?:so|thus|hence|therefore),?\s)|(?i:\b(?:option|choice)\s))[*(]{0,3}"
    + _CHOSEN
    + r"(?:[).:]\s[^.\n]{1,80}?)?[*)]{0,3}\sis\s(?:clearly\s|therefore\s|thus\s)?"
    + r"(?:the\s)?(?:(?:correct|right|best)\b|(?:final\s)?answer[.!*]{0,4}[ \t]*(?:\n|\Z))"
)
_MENTIONED = re.compile(
    r"\b(?i:option|choice)\b\*{0,2}\s{0,9}(?i:is\b)?\s{0,9}"
    + _OPENING
    + _CHOSEN
    + r"(?![*).]{0,3}\s(?:is\s|was\s|can\s?)?(?:n['’]t|not|incorrect|wrong|false)\b)"
)
_ALONE = re.compile(r"\b[Ii]t(?:['’]s|\sis|\smust\sbe)\s" + _OPENING + _CHOSEN + r"[*)\]\"'`]{0,3}\s*(?:[.,;!]|\Z)")
_STATED_CHINESE = re.compile(r"(?:答案|正确选项|(?<!不)选择?)\s{0,9}[是为选]?\s{0,9}" + _OPENING + _CHOSEN)
_LEADING = re.compile(
    r"\s*[*(\[`]{0,3}([A-Za-z])"
    + _NOT_ANOTHER
    + r"(?![.:)\s–—-]{1,5}[A-HJ-Z](?:[.:)]|\s+(?![a-z](?!.{0,200}\b[A-Z][.:)]))|\s*\Z))"
    r"(?:[*)\]`]{1,3}|[.:,;。：、]|[ \t]+[-–—][ \t]|\s*$|\s*\n)"
)
_LETTER = re.compile(r"[A-Z]", re.IGNORECASE)


def extract_choice(text: str) -> str | None:
    """Returns the chosen letter in upper case; None if there is none."""
    text = _DRESSED.sub(lambda found: next(filter(None, found.groups())), _said(text))
    boxed = (_BOXED.match(f"\\boxed{{{box}}}") for box in last_boxes(text))
    if len({one[1].upper() for one in boxed if one}) > 1:
        return None
    for pattern in (_BOXED, _STATED, _STATED_CHINESE, _APPROVED, _MENTIONED):
        found = pattern.findall(text)
        if found:
            return found[-1].upper()
    if leading := _LEADING.match(text):
        return leading.group(1).upper()
    return next(reversed(_ALONE.findall(text)), None)


def extract_answer(text: str, ground_truth: Any) -> str | None:
    """Returns what `compute_score` compares: the chosen letter or, if no reference is a letter, the answer as text; None if
    there is none."""
    if any(_LETTER.fullmatch(_letter(truth)) for truth in truths_of(ground_truth)):
        return extract_choice(text)
    return _folded(_said(text)) or None


@reads_truth(truths_of)
def compute_score(solution_str: str, ground_truth: Any) -> float:
    """1.0 for the reference choice, else 0.0; a reference of more than a letter is compared as text, ignoring case.

    Raises:
        DataError: there is no reference.
    """
    return float(any(_is_choice(solution_str, truth.strip()) for truth in truths_of(ground_truth)))


def _is_choice(solution_str: str, reference: str) -> bool:
    letter = _letter(reference)
    if _LETTER.fullmatch(letter):
        return extract_choice(solution_str) == letter.upper()
    return _folded(_said(solution_str)) == _folded(reference)


def _letter(reference: str) -> str:
    return reference.strip(" ().")


def _said(solution_str: str) -> str:
    """The last marked answer after the reasoning, or else all that follows it."""
    text = solution_str[-MAX_CHARS:].rpartition("</think>")[2]
    return next(reversed(_ANSWER.findall(text)), text)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
