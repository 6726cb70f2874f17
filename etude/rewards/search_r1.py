"""Scoring of answers to questions as in Search-R1's `qa_em_format`: exact match, and credit for the format of the search.

    right answer   1, or 1 - structure_format_score if the format is wrong
    wrong answer   structure_format_score (+ retrieval_score if a result contained an answer), or final_format_score
    no answer      structure_format_score, or 0

The format is right if the text consists of `<think>`, `<search>` and `<information>` blocks in an allowed order and ends
with one `<answer>`. The model's own text contains no results: `<information>` may then be missing. With native tool
calls the searches are in `trajectory`, whose turns are judged: of one that makes them only the blocks, not the calls and
words beside them.

Source: Search-R1 (arXiv:2503.09516) and its follow-up on rewards (arXiv:2505.15117).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import regex

from etude.chat.placeholders import text_of
from etude.retrieval.bm25 import UNSPACED
from etude.rewards import qa
from etude.rewards.truth import reads_truth, truths_of
from etude.rewards.view import with_opening

_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_BLOCK = re.compile(r"<(search|information)>((?:(?!</?\1>).)*)</\1>", re.DOTALL)  # linear
_BREAK = re.compile(r"(?<!\\)\\[nrt]")
_UNSPACED = regex.compile(UNSPACED)
_NEXT = {  # last closed tag → tags that may open next
    None: ("think", "search", "answer"),
    "think": ("search", "answer"),
    "search": ("information", "think", "search", "answer"),
    "information": ("think", "search", "answer"),
    "answer": (),
}


def has_form(*turns: str, calling: Collection[int] = ()) -> bool:
    """Whether `turns` are complete blocks in an allowed order that end with `<answer>`; text beside them is allowed before
    the answer in the turns `calling`, by index, and stands for a search."""
    closed: str | None = None
    for number, text in enumerate(turns):
        opened, position = None, 0
        for match in _TAG.finditer(text):
            ends, tag = bool(match[1]), match[2]
            if opened is None:
                if text[position : match.start()].strip():
                    if number not in calling or closed == "answer":
                        return False
                    closed = "search"
                if ends or tag not in _NEXT[closed]:
                    return False
                opened = tag
            elif ends and tag == opened:
                closed, opened = tag, None
            else:
                return False
            position = match.end()
        if opened is not None or (text[position:].strip() and (number not in calling or closed == "answer")):
            return False
        closed = "search" if number in calling and closed != "answer" else closed
    return closed == "answer"


def _is_formed(solution: str, trajectory: Any) -> bool:
    if len(solution) > 10 * qa.MAX_CHARS:
        return False
    calls = getattr(trajectory, "tool_calls", ())
    turns = getattr(trajectory, "turns", None) or [{"message": {"content": solution}, "tool_calls": calls}]
    texts: list[str] = []
    calling: list[int] = []
    for number, turn in enumerate(turns):
        text = text_of(turn["message"].get("content"))
        if "<search>" not in text and any(call.error != "malformed" for call in turn["tool_calls"]):
            calling.append(number)
        apart = "reasoning_content" in turn["message"]  # as a gateway's agents keep reasoning
        texts.append(text if apart else with_opening(text, trajectory, "think"))
    return has_form(*texts, calling=calling)


@reads_truth(truths_of)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    trajectory: Any = None,
    structure_format_score: float = 0.2,
    final_format_score: float = 0.1,
    retrieval_score: float = 0.0,
) -> dict[str, float]:
    """Returns `score` as above, `acc` (exact match), `format` and `retrieved` (1.0 or 0.0 each).

    `retrieved`: a tool response in `trajectory`, or without one an `<information>` block of the text, contains as whole
    words a reference answer that its own query did not name: tools repeat a query, so a guess in it would find itself.
    With a trajectory, what the model itself writes between these tags does not count. It adds to the score only if the
    format is right, so that retrieval alone earns nothing.

    Raises:
        DataError: there is no reference answer.
    """
    answer = qa.extract_answer(solution_str) or None  # a blank one is none
    targets = truths_of(ground_truth)
    formed = _is_formed(solution_str, trajectory)
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
        calls = (call for call in trajectory.tool_calls if not call.error)
        results = [(_unescaped(call.arguments), _unescaped(call.response)) for call in calls]
    else:
        query, results = "", []
        for match in _BLOCK.finditer(text[-10 * qa.MAX_CHARS :]):
            query = match[2] if match[1] == "search" else query
            results += [(query, match[2])] if match[1] == "information" else []
    wanted = [_readings(each) for each in targets]
    texts = [(_readings(asked), _readings(found[-10 * qa.MAX_CHARS :])) for asked, found in results]
    return any(_holds(found, each) and not _holds(asked, each) for asked, found in texts for each in wanted)


def _readings(text: str) -> list[str]:
    """The words between spaces, as answers are compared and with marks as spaces: `Rome's` holds `Rome`."""
    spellings = (qa.normalise(text), qa.MARKS.sub(" ", qa.fold(text)))
    return [f" {' '.join(words)} " for each in spellings if (words := _UNSPACED.sub(r" \g<0> ", each).split())]


def _holds(text: list[str], wanted: list[str]) -> bool:
    return any(words in reading for words in wanted for reading in text)


def _unescaped(text: str) -> str:
    """The keys and values of JSON, which may spell letters as escapes and a text as a list of its words. Of other text, such
    as JSON that was cut, all of it, in which an escaped line break is a space: `Title\\nRome` holds `Rome`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _BREAK.sub(" ", text)
    return " ".join(_values(found)) if isinstance(found, dict | list) else text


def _values(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for each in chain(*value.items()) if isinstance(value, dict) else value:
            yield from _values(each)
    else:
        yield str(value)
