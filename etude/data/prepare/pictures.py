"""Questions about one image as rows for `image_zoom_in_tool`.

Invariant: the tool gets the image that the model sees. Paths in a file are relative to that file and written as absolute
ones; a missing image is an error that names its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import Row, located_rows, write_parquet
from etude.errors import DataError

DATA_SOURCE = "etude/pictures"
TOOL = "image_zoom_in_tool"
SYSTEM = (
    "You answer questions on pictures. If a detail is too small to see, look closer with the "
    f"`{TOOL}` tool. End with your answer between <answer> and </answer>."
)


def make_row(example: Mapping[str, Any], where: str, folder: Path, split: str, index: int, data_source: str) -> Row:
    """One row of the RL row contract from `{"question", "answer", "image"}`; `image` is a path, bytes, or both.

    Raises:
        DataError: a field is missing or of another type, or the image does not exist; names `where`.
    """
    question, answer = example.get("question"), example.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise DataError(f"{where}: needs 'question' and 'answer' as text (columns: {', '.join(example)})")
    image = _image(example.get("image"), where, folder)
    return {
        "data_source": data_source,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question if "<image>" in question else f"<image>\n{question}"},
        ],
        "images": [image],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {TOOL: {"create_kwargs": {"image": image}}},
        },
    }


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
    folder, paths = Path(output_dir).expanduser(), {}
    for source in (Path(name).expanduser() for name in inputs):
        rows = [
            make_row(example, where, source.parent, source.stem, index, data_source)
            for index, (where, example) in enumerate(located_rows(source))
        ]
        if source.stem in paths:
            raise DataError(f"{source}: another input is named {source.stem}, too; rename one")
        paths[source.stem] = write_parquet(rows, folder / f"{source.stem}.parquet")
    return paths
