"""Questions about one image as rows for `image_zoom_in_tool`.

Invariant: the tool gets the image that the model sees. Paths in a file are relative to that file and written as absolute
paths; a missing image is an error that names its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.data.prepare.sources import files_by_name, make_tables, texts, training_row, write_tables
from etude.errors import DataError

DATA_SOURCE = "etude/pictures"
TOOL = "image_zoom_in_tool"
SYSTEM = (
    "You answer questions on pictures. If a detail is too small to see, look closer with the "
    f"`{TOOL}` tool. End with your answer between <answer> and </answer>."
)


def make_row(folder: Path, data_source: str, example: Mapping[str, Any], where: str, split: str, index: int) -> Row:
    """Makes one row of the RL row contract from `{"question", "answer", "image"}`; `image` is a path, bytes, or both.

    Raises:
        DataError: a field is missing or of another type, or the image does not exist; names `where`.
    """
    question, answer = texts(example, where, "question", "answer")
    image = _image(example.get("image"), where, folder)
    return training_row(
        data_source,
        [("system", SYSTEM), ("user", question if "<image>" in question else f"<image>\n{question}")],
        answer,
        {TOOL: {"image": image}},
        ability="vision",
        extra={"split": split, "index": index, "question": question},
        images=[image],
    )


def _image(given: Any, where: str, folder: Path) -> dict[str, Any]:
    held = given if isinstance(given, Mapping) else {"bytes" if isinstance(given, bytes) else "path": given}
    if isinstance(held.get("bytes"), bytes):
        return {"bytes": held["bytes"]}
    if not isinstance(held.get("path"), str):
        raise DataError(f"{where}: needs 'image', a path or the bytes of an image")
    path = folder / Path(held["path"]).expanduser()
    if not path.is_file():
        raise DataError(f"{where}: there is no image {path}")
    return {"path": str(path.resolve())}


def write(inputs: Sequence[str | Path], output_dir: str | Path, data_source: str = DATA_SOURCE) -> dict[str, Path]:
    """Writes each of `inputs` as `<name>.parquet`; returns the paths by name. Raises DataError."""
    tables: dict[str, list[Row]] = {}
    for name, path in files_by_name(inputs).items():
        tables |= make_tables({name: path}, partial(make_row, path.parent, data_source))
    return write_tables(tables, output_dir)
