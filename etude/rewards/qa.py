"""Scoring of questions with short answers: exact match and F1 after SQuAD's normalisation.

Invariant: only the last `<answer>…</answer>` after `</think>` is the answer; the order of the reference answers and
duplicates among them do not change a score. Normalisation is that of SQuAD's evaluation: lower case, no punctuation, no
articles, single spaces; here the punctuation of all scripts, and full-width and decomposed letters are as typed plainly.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any

import regex

from etude.rewards.truth import reads_truth, truths_of

MAX_CHARS = 20_000  # characters at the end of a solution, where the answer is
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SQUAD = re.escape(string.punctuation + "‘’‚“”„´–—‐‑−…")  # SQuAD's, and the same marks as typeset
_OTHER = r"[\p{P}--[‰‱′-‷⁗]]"  # per mille and primes tell quantities apart
MARKS = regex.compile(rf"(?V1)[{_SQUAD}]|{_OTHER}")
_DROPPED = regex.compile(rf"(?V1)[{_SQUAD}]|(?<!\d){_OTHER}|{_OTHER}(?!\d)")  # 3、5 and 3·5 are not 35
_WIDE = re.compile("[\u3000\uff01-\uffee]+")  # full-width ASCII, half-width kana


def normalise(text: str) -> str:
    """Normalises `text` for comparison; one of articles and punctuation alone ("The The", "A") is only put in lower case."""
    lowered = fold(text)
    return " ".join(_ARTICLES.sub(" ", _DROPPED.sub("", lowered)).split()) or " ".join(lowered.split())


def fold(text: str) -> str:
    """Puts `text` in lower case, in one width, its accents composed; NFKC as a whole would make x² x2 and 5½ 51⁄2."""
    narrow = _WIDE.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    return unicodedata.normalize("NFC", narrow).lower()


def extract_answer(solution: str) -> str | None:
    """Returns the last `<answer>…</answer>` after `</think>`, or None."""
    found = _ANSWER.findall(solution[-MAX_CHARS:].rpartition("</think>")[2])
    return found[-1].strip() if found else None


def exact_match(prediction: str, answers: str | Iterable[str]) -> bool:
    """Whether `prediction`, unless blank, is one of `answers`."""
    said = normalise(prediction)
    return bool(said) and said in {normalise(answer) for answer in _each(answers)}


def f1(prediction: str, answers: str | Iterable[str]) -> float:
    """Returns the best word-level F1 (harmonic mean of precision and recall) over `answers`; 0.0 without answers."""
    said = normalise(prediction).split()
    return max((_word_f1(said, normalise(answer).split()) for answer in _each(answers)), default=0.0)


@reads_truth(truths_of)
def compute_score(solution_str: str, ground_truth: Any) -> float:
    """Returns 1.0 if the answer is exactly one of the reference answers (`{"target": …}`, a list or a text), else 0.0.

    Raises:
        DataError: there is no reference answer.
    """
    answers, answer = truths_of(ground_truth), extract_answer(solution_str)
    return float(answer is not None and exact_match(answer, answers))


def _each(answers: str | Iterable[str]) -> list[str]:
    return [answers] if isinstance(answers, str) else [str(answer) for answer in answers]


def _word_f1(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return 0.0
    shared = sum((Counter(said) & Counter(wanted)).values())
    return 2 * shared / (len(said) + len(wanted))
