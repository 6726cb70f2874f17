"""What a row's answer is compared with: `reward_model.ground_truth` as reference answers.

Invariant: no scorer compares with a ground truth that is not there: `truths_of` raises instead. 0, False and the text "0"
are there; None, NaN, blank text, and lists or objects with nothing else in them are not. A built-in scorer declares how it
reads its ground truth (`@reads_truth`), so that a row without one is refused when its file is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from etude.errors import DataError

F = TypeVar("F", bound=Callable[..., Any])
_SPOKEN = {"True": "yes", "False": "no"}


def is_missing(value: object) -> bool:
    """Whether `value` is None, NaN, blank text, or a list, array or mapping whose entries are all missing."""
    if isinstance(value, str | bytes):
        return not value.strip()
    if isinstance(value, Mapping):
        return all(map(is_missing, value.values()))
    if isinstance(value, Iterable):
        return all(map(is_missing, value))
    return value is None or value != value  # NaN is not itself


def require_truth(ground_truth: Any) -> Any:
    """Returns `ground_truth`; raises DataError if it is missing."""
    if is_missing(ground_truth):
        raise DataError(
            "reward_model.ground_truth is missing or empty, and the row's scorer compares the answer with it",
            fix="set custom_reward_function.path to a scorer that needs none, or reward_model.enable=false, or leave the "
            "row out",
        )
    return ground_truth


def truths_of(ground_truth: Any) -> list[str]:
    """Returns the reference answers, any of which is right, in a text, a number, a list of them, or `{"target": …}` of
    these; missing ones are left out. True is also `yes`, and False `no`.

    Raises:
        DataError: there is none, or one is neither text nor a number.
    """
    given = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    entries = list(given) if several else [given]  # type: ignore[arg-type]
    require_truth(entries)
    return [text for entry in entries if not is_missing(entry) for text in _texts(entry)]


def _texts(entry: Any) -> list[str]:
    text = _as_text(entry)
    return [text] if isinstance(entry, str) or text not in _SPOKEN else [text, _SPOKEN[text]]


def _as_text(entry: Any) -> str:
    if isinstance(entry, bytes | Iterable) and not isinstance(entry, str):  # no answer would ever equal its spelling
        raise DataError(
            f"reward_model.ground_truth must be text or a number, or a list of these; {str(entry)[:80]!r} is a "
            f"{type(entry).__name__}"
        )
    if isinstance(entry, float) and not entry.is_integer():
        return f"{entry:.15g}"  # 0.1 + 0.2 is 0.3
    return str(int(entry) if isinstance(entry, float) else entry)


def reads_truth(reader: Callable[[Any], Any]) -> Callable[[F], F]:
    """Declares that the decorated scorer compares answers with the ground truth, which it reads by `reader`."""

    def mark(scorer: F) -> F:
        scorer.truth_reader = reader  # type: ignore[attr-defined]
        return scorer

    return mark
