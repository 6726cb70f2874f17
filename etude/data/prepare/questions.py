"""Questions with short answers as rows for a search tool.

Invariant: the files keep their rows and order, and a row's answers are all accepted forms. The prompt says how to
reason, search and answer; the call format is the chat template's, or, with `tags`, Search-R1's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.data.prepare.sources import texts, training_row, write_each
from etude.errors import DataError

TOOLS = ("search", "web_search")
DATA_SOURCE = "searchR1_nq"
_RULES = (
    "Answer the question. Think between <think> and </think> each time you learn something. {how} Search as often as you "
    "need to. When you know the answer, give it between <answer> and </answer>, without explanation, for example "
    "<answer> Beijing </answer>."
)
_BY_TOOL = "If you lack knowledge, call the `{tool}` tool."
_BY_TAGS = (
    "If you lack knowledge, write your query between <search> and </search>; the results come between <information> and "
    "</information>."
)


def make_row(
    tool: str, data_source: str, tags: bool, example: Mapping[str, Any], where: str, split: str, index: int
) -> Row:
    """Makes one row of the RL row contract from `{"question", "answers" | "golden_answers" | "answer"}`.

    Raises:
        DataError: a field is missing or of another type; names `where`.
    """
    question = texts(example, where, "question")[0].strip()
    answers = next((example[key] for key in ("golden_answers", "answers", "answer") if example.get(key)), None)
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where}: needs 'answers', a text or a list of texts (columns: {', '.join(example)})")
    rules = _RULES.format(how=_BY_TAGS if tags else _BY_TOOL.format(tool=tool))
    return training_row(
        data_source,
        [("user", f"{rules} Question: {question}")],
        {"target": answers},
        {tool: {"question": question}},
        ability="fact-reasoning",
        extra={"split": split, "index": index, "question": question},
    )


def write(
    inputs: Sequence[str | Path],
    output_dir: str | Path,
    *,
    tool: str = TOOLS[0],
    data_source: str = DATA_SOURCE,
    tags: bool = False,
) -> dict[str, Path]:
    """Writes each of `inputs`, as `write_each` does; raises DataError also for an unknown tool."""
    if tool not in TOOLS:
        raise DataError(f"unknown search tool '{tool}' (known: {', '.join(TOOLS)})")
    return write_each(inputs, partial(make_row, tool, data_source, tags), output_dir)
