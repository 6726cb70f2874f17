"""`SFTDataset`: demonstrations for supervised fine-tuning.

Invariant: an item's `messages` end with an assistant message and can be passed to a chat template; its `tools` are
OpenAI dictionaries or None; its `images`, if any, are as many as the image parts of its messages. Tokens, masks and
lengths are left to `etude.chat` and `etude.training.demonstrations`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.blobs import Blobs
from etude.data.files import Row, file_list, located_rows, without_nulls
from etude.data.images import place_images, refuse_other_media
from etude.data.messages import check_messages
from etude.errors import DataError


class SFTDataset:
    """The `messages` (and optional `tools` and `image_key`) columns of one or more files.

    `tools` is a list of OpenAI dictionaries, or that list as JSON text (a column of different schemas does not fit one
    Arrow type). Arguments of tool calls may be objects or JSON text; items have objects. Nulls are Arrow's padding and
    are dropped, except inside JSON text. Images are as in the rows of `RLDataset`; their bytes are kept in a file.

    Raises:
        DataError: a file or row is invalid; names the file and the row.
    """

    def __init__(self, files: str | Sequence[str], image_key: str | None = "images") -> None:
        self.files = file_list(files)
        if not self.files:
            raise DataError("no data file is named: set data.train_files")
        self._blobs = Blobs()
        self._rows: list[Any] = []
        self.locations: list[str] = []  # file and row of each
        for name in self.files:
            for where, row in located_rows(name):
                made = check_demonstration(row, where, image_key, Path(name).expanduser().parent)
                self._rows.append(self._blobs.store(made))
                self.locations.append(where)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        row: Row = self._blobs.restore(copy.deepcopy(self._rows[number]))
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))


def check_demonstration(row: Mapping[str, Any], where: str, image_key: str | None, folder: Path) -> Row:
    """Returns `messages`, `tools` and, if it has any, the images of a row at `where`; `folder`: base of relative paths.

    Raises:
        DataError: it is no conversation to learn from.
    """
    if "messages" not in row:
        raise DataError(f"{where}: no column 'messages' (columns: {', '.join(row)})")
    refuse_other_media(row, where)
    messages = check_messages(row["messages"], f"{where}: messages", images=True)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{where}: messages must end with an assistant message, not {messages[-1]['role']}")
    made = {"messages": messages, "tools": _check_tools(row.get("tools"), f"{where}: tools")}
    if image_key is not None:
        made[image_key] = row.get(image_key)
    place_images(made, image_key, "messages", folder, where)
    return made


def _check_tools(value: object, where: str) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is text but not valid JSON") from error
    else:
        value = without_nulls(value)
    if value is None:
        return None
    if not isinstance(value, list):
        raise DataError(f"{where} must be a list of tool schemas, got {type(value).__name__}")
    for number, schema in enumerate(value):
        function = schema.get("function") if isinstance(schema, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}[{number}] must be {{type: function, function: {{name, parameters}}}}")
    return value or None
