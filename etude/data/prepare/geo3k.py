r"""Geometry3K for training with a tool: turns the public parquet files into rows whose tool checks the answer.

Invariant: the files keep their rows, their order and their images (`index` is the row's number). Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.data.prepare.sources import find_split_files, make_tables, texts, training_row, write_tables
from etude.errors import DataError

DATA_SOURCE = "hiyouga/geometry3k"
TOOL = "calc_geo3k_reward"
SPLITS = ("train", "validation", "test")
SYSTEM = (
    "You solve geometry problems. Think step by step between <think> and </think>. When you have a result, check it with "
    f"the `{TOOL}` tool before you give it; if it was wrong, work the problem out again."
)
INSTRUCTION = "Put the final answer in \\boxed{}."

_FOLDERS = ("", "data")
_ENDINGS = (".parquet", "-00000-of-00001.parquet", ".jsonl")


def make_row(example: Mapping[str, Any], where: str, split: str, index: int) -> Row:
    """Makes one row of the RL row contract from `{"problem", "answer", "images"}`.

    Raises:
        DataError: a field is missing or of another type; names `where`.
    """
    (problem, answer), images = texts(example, where, "problem", "answer"), example.get("images")
    if not isinstance(images, list) or not images:
        raise DataError(f"{where}: needs 'images', a list with at least one image")
    return training_row(
        DATA_SOURCE,
        [("system", SYSTEM), ("user", f"{problem} {INSTRUCTION}")],
        answer,
        {TOOL: {"ground_truth": answer}},
        ability="math",
        extra={"split": split, "index": index, "answer": answer, "question": problem},
        images=images,
    )


def write(inputs: Sequence[str | Path], output_dir: str | Path) -> dict[str, Path]:
    """Writes `<split>.parquet` for each split found in `inputs`; returns the paths by split. Raises DataError."""
    files = find_split_files(inputs, SPLITS, folders=_FOLDERS, endings=_ENDINGS)
    return write_tables(make_tables(files, make_row), output_dir)
