r"""Geometry3K for training with a tool: the public parquet files into rows whose tool checks the answer.

Invariant: the files keep their rows, their order and their images (`index` is the row's number). Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import Row, located_rows, write_parquet
from etude.data.prepare.splits import find_split_files
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
    """One row of the RL row contract from `{"problem", "answer", "images"}`.

    Raises:
        DataError: a field is missing or of another type; names `where`.
    """
    problem, answer, images = example.get("problem"), example.get("answer"), example.get("images")
    if not isinstance(problem, str) or not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{where}: needs 'problem' and 'answer' as text (columns: {', '.join(example)})")
    if not isinstance(images, list) or not images:
        raise DataError(f"{where}: needs 'images', a list with at least one image")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{problem} {INSTRUCTION}"},
        ],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": answer,
            "question": problem,
            "need_tools_kwargs": True,
            "tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": answer}}},
        },
    }


def make_rows(path: str | Path, split: str) -> list[Row]:
    """The rows of one file; raises DataError as `read_rows` and `make_row`."""
    return [make_row(example, where, split, index) for index, (where, example) in enumerate(located_rows(path))]


def write(inputs: Sequence[str | Path], output_dir: str | Path) -> dict[str, Path]:
    """Writes `<split>.parquet` for each split found in `inputs`; returns the paths by split. Raises DataError."""
    folder = Path(output_dir).expanduser()
    files = find_split_files(inputs, SPLITS, folders=_FOLDERS, endings=_ENDINGS)
    tables = {split: make_rows(path, split) for split, path in files.items()}
    return {split: write_parquet(rows, folder / f"{split}.parquet") for split, rows in tables.items()}
