"""Scoring of answers to questions as in Search-R1's `qa_em_format`: exact match, and credit for the form of the search.

    right answer   1, or 1 - structure_format_score where the form is wrong
    wrong answer   structure_format_score (+ retrieval_score if a result held an answer), or final_format_score
    no answer      structure_format_score, or 0

The form is right if the text is thoughts, searches and results in turn, `<think>`, `<search>`, `<information>`, and at last
one `<answer>`. The model's own text has no results in it: then they may be missing. With native tool calls the searches are
in `trajectory`, and the form is thoughts, if any, and one answer.

Source: Search-R1 (arXiv:2503.09516) and its follow-up on rewards (arXiv:2505.15117).
"""

from __future__ import annotations

import re
from typing import Any

from etude.rewards import qa

_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_INFORMATION = re.compile(r"<information>((?:(?!</?information>).)*)</information>", re.DOTALL)  # linear
_NEXT = {  # the tag that closed last → those that may open
    None: ("think", "search", "answer"),
    "think": ("search", "answer"),
    "search": ("information", "think", "search", "answer"),
    "information": ("think", "search", "answer"),
    "answer": (),
}


def has_form(text: str) -> bool:
    """Whether `text` is a sequence of whole tags in an allowed order that ends with `<answer>`, and nothing outside."""
    closed: str | None = None
    opened: str | None = None
    position = 0
    for match in _TAG.finditer(text):
        ends, tag = bool(match[1]), match[2]
        if opened is None:
            if ends or tag not in _NEXT[closed] or text[position : match.start()].strip():
                return False
            opened = tag
        elif ends and tag == opened:
            closed, opened = tag, None
        else:
            return False
        position = match.end()
    return closed == "answer" and opened is None and not text[position:].strip()


def compute_score(
    solution_str: str,
    ground_truth: Any,
    trajectory: Any = None,
    structure_format_score: float = 0.2,
    final_format_score: float = 0.1,
    retrieval_score: float = 0.0,
) -> dict[str, float]:
    """`score` as above, `acc` (exact match), `format` and `retrieved` (1.0 or 0.0 each).

    `retrieved`: a tool's result in `trajectory`, or without one an `<information>` of the text, holds a reference answer;
    what the model itself writes between these tags was not found. It counts only beside a right form, so that no result of
    a tool earns anything by itself.
    """
    answer = qa.extract_answer(solution_str)
    targets = qa.targets_of(ground_truth)
    formed = has_form(solution_str) if len(solution_str) <= 10 * qa.MAX_CHARS else False
    retrieved = _retrieved(solution_str, targets, trajectory)
    right = answer is not None and qa.exact_match(answer, targets)
    if right:
        score = 1.0 if formed else 1.0 - structure_format_score
    elif formed:
        score = structure_format_score + (retrieval_score if retrieved and answer is not None else 0.0)
    else:
        score = final_format_score if answer is not None else 0.0
    return {"score": score, "acc": float(right), "format": float(formed), "retrieved": float(retrieved)}


def _retrieved(text: str, targets: list[str], trajectory: Any) -> bool:
    if trajectory is not None:
        results = [call.response for call in trajectory.tool_calls]
    else:
        results = _INFORMATION.findall(text[-10 * qa.MAX_CHARS :])
    found = qa.normalise("\n".join(results)[-10 * qa.MAX_CHARS :])
    return any(bool(wanted) and wanted in found for wanted in map(qa.normalise, targets))
