"""Questions with short answers as rows for a search tool.

Invariant: the files keep their rows and order, and a row's answers are all accepted forms. The prompt says how to reason,
search and answer; the call format is the chat template's, or, with `tags`, Search-R1's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import Row, located_rows, write_parquet
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
    example: Mapping[str, Any], where: str, split: str, index: int, *, tool: str, data_source: str, tags: bool
) -> Row:
    """One row of the RL row contract from `{"question", "answers" | "golden_answers" | "answer"}`.

    Raises:
        DataError: a field is missing or of another type; names `where`.
    """
    question = example.get("question")
    answers = next((example[key] for key in ("golden_answers", "answers", "answer") if example.get(key)), None)
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: needs 'question' as text (columns: {', '.join(example)})")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where}: needs 'answers', a text or a list of texts (columns: {', '.join(example)})")
    rules = _RULES.format(how=_BY_TAGS if tags else _BY_TOOL.format(tool=tool))
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{rules} Question: {question.strip()}"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question.strip(),
            "need_tools_kwargs": True,
            "tools_kwargs": {tool: {"create_kwargs": {"question": question.strip()}}},
        },
    }


def write(
    input_file: str | Path,
    output_file: str | Path,
    *,
    tool: str = TOOLS[0],
    data_source: str = DATA_SOURCE,
    tags: bool = False,
) -> Path:
    """Writes the rows of one file; the split is the output's name. Returns the path.

    Raises:
        DataError: the tool is unknown, or a file or row is wrong.
    """
    if tool not in TOOLS:
        raise DataError(f"unknown search tool '{tool}' (known: {', '.join(TOOLS)})")
    output = Path(output_file).expanduser()
    rows = [
        make_row(example, where, output.stem, index, tool=tool, data_source=data_source, tags=tags)
        for index, (where, example) in enumerate(located_rows(input_file))
    ]
    return write_parquet(rows, output)


def write_all(inputs: Sequence[str | Path], output_dir: str | Path, **options: Any) -> dict[str, Path]:
    """Writes each of `inputs` under its own name; returns the paths by name. Raises DataError as `write`."""
    sources = {Path(source).expanduser().stem: source for source in inputs}
    if len(sources) < len(inputs):
        raise DataError("two input files have the same name: rename one, since it names the file that is written")
    folder = Path(output_dir).expanduser()
    return {name: write(source, folder / f"{name}.parquet", **options) for name, source in sources.items()}
