"""GSM8K for training with a tool: turns the public JSON lines into rows whose tool checks the answer.

Invariant: the files keep their rows and order (`index` is the row's index), and a row without a final `#### answer` is
an error that names its line. Nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.data.prepare.sources import find_split_files, make_tables, texts, training_row, write_tables
from etude.errors import DataError

DATA_SOURCE = "openai/gsm8k"
TOOL = "calc_gsm8k_reward"
SPLITS = ("train", "test")
SYSTEM = (
    "You solve grade-school maths problems. Think step by step. When you have a result, check it with the "
    f"`{TOOL}` tool before you give it; if it was wrong, work the problem out again. End with your result in the "
    "form `#### <answer>`."
)
INTERPRETER = "code_interpreter"
SYSTEM_WITH_CODE = (
    "You solve grade-school maths problems. Think step by step, and calculate with Python code in the "
    f"`{INTERPRETER}` tool: print what you want to see. End with your result in the form `#### <answer>`."
)
INSTRUCTION = "Think step by step and put the final answer after `####`."

_FOLDERS = ("", "main", "grade_school_math/data")  # where copies of the dataset keep their files
_ENDINGS = (".jsonl", ".parquet", "-00000-of-00001.parquet")
_FINAL = re.compile(r"####[ \t]*(-?\$?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+)")
_GOES_ON = re.compile(r"[ \t]*[/:^][ \t]*[0-9]|[ \t]+[0-9]|[eE][-+]?[0-9]")  # 3/4, 10:30, 10^3, 2 1/2, 1e6


def final_answer(solution: str) -> str | None:
    """Returns the number after the last `####`, without dollar sign and thousands commas; None if there is none, or if it is
    the beginning of something else: a fraction, a time, a power."""
    *_, found = [None, *_FINAL.finditer(solution)]
    return None if found is None or _GOES_ON.match(solution, found.end()) else re.sub(r"[$,]", "", found[1])


def make_row(example: Mapping[str, Any], where: str, split: str, index: int, *, tool: str = TOOL) -> Row:
    """Makes one row of the RL row contract from `{"question", "answer"}`, for `tool`: `TOOL` or `INTERPRETER`.

    Raises:
        DataError: a field is missing or the answer has no `#### number`; names `where`.
    """
    question, answer = texts(example, where, "question", "answer")
    ground_truth = final_answer(answer)
    if ground_truth is None:
        raise DataError(f"{where}: the answer has no '#### number' line")
    return training_row(
        DATA_SOURCE,
        [("system", SYSTEM if tool == TOOL else SYSTEM_WITH_CODE), ("user", f"{question} {INSTRUCTION}")],
        ground_truth,
        {tool: {"ground_truth": ground_truth}},
        ability="math",
        extra={"split": split, "index": index, "answer": answer, "question": question},
    )


def write(inputs: Sequence[str | Path], output_dir: str | Path, *, tool: str = TOOL) -> dict[str, Path]:
    """Writes `<split>.parquet` for each split found in `inputs`; returns the paths by split. Raises DataError."""
    files = find_split_files(inputs, SPLITS, folders=_FOLDERS, endings=_ENDINGS)
    return write_tables(make_tables(files, partial(make_row, tool=tool)), output_dir)
