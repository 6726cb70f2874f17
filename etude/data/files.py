"""Data files: reads rows from parquet, JSON lines and JSON, and writes rows to parquet.

Invariant: rows are built-in Python types (dict, list, str, numbers, bytes, None), and each comes with its location:
`file.jsonl:17` (lines count from 1) or `file.parquet: row 17` (rows count from 0). Writes are atomic. What a row must
contain is left to `rows` and `sft`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import DataError, one_line
from etude.registry import missing_file

Row = dict[str, Any]

SUFFIXES = (".parquet", ".jsonl", ".json")
MAX_LINE_BYTES = 64 * 2**20
MAX_JSON_BYTES = 2**30
_BATCH_ROWS = 1024
_BATCH_BYTES = 64 * 2**20


def read_rows(path: str | Path) -> list[Row]:
    """Reads all rows of a .parquet, .jsonl or .json file (a JSON array, or JSON lines).

    Raises:
        DataError: the file is missing, empty, of another kind or malformed; names the file and the line or row.
    """
    return [row for _, row in located_rows(path)]


def located_rows(path: str | Path) -> Iterator[tuple[str, Row]]:
    """Yields (location, row) of a file, reading in chunks where the format allows; raises as `read_rows`."""
    path = _existing(Path(path).expanduser())
    if path.suffix == ".parquet":
        source = _parquet_rows(path)
    elif path.suffix == ".json" and _starts_with_bracket(path):
        source = _json_array_rows(path)
    else:
        source = _json_line_rows(path)
    count = 0
    for where, row in source:
        if not isinstance(row, dict):
            raise DataError(f"{where}: a row must be an object, got {type(row).__name__}")
        count += 1
        yield where, row
    if not count:
        raise DataError(f"{path}: the file holds no rows")


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file in it")
    if not path.exists():
        raise DataError(missing_file(path))
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    return path


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            size = sum(metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups))
            fitting = max(1, min(_BATCH_ROWS, _BATCH_BYTES * metadata.num_rows // max(size, 1)))
            for batch in file.iter_batches(batch_size=fitting):  # fewer rows at once if they are large
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file (after row {number}): {one_line(error)}") from error


def _json_line_rows(path: Path) -> Iterator[tuple[str, object]]:
    with _open(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{where}: the line is longer than {MAX_LINE_BYTES // 2**20} MiB")
            if line.strip():
                yield where, _decode(line, where)


def _json_array_rows(path: Path) -> Iterator[tuple[str, object]]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise DataError(f"{path}: a .json file is read whole and may have 1 GiB; use .jsonl or .parquet")
    with _open(path) as file:
        rows = _decode(file.read(), str(path))
    assert isinstance(rows, list)  # it is JSON that starts with a bracket
    for number, row in enumerate(rows):
        yield f"{path}: row {number}", row


def _starts_with_bracket(path: Path) -> bool:
    with _open(path) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def _decode(text: bytes, where: str) -> object:
    try:
        return json.loads(text.decode("utf-8-sig", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {one_line(error)}; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {one_line(error)}") from error


def plain(value: object) -> Any:
    """Converts NumPy arrays and tuples to lists, and NumPy scalars to Python numbers, at any depth."""
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    return value.item() if isinstance(value, np.generic) else value


def without_nulls(value: Any) -> Any:
    """Removes the null-valued keys of dictionaries, at any depth.

    Arrow gives every row of a file the same fields, so a missing key reads back as null.
    """
    if isinstance(value, dict):
        return {key: without_nulls(member) for key, member in value.items() if member is not None}
    return [without_nulls(member) for member in value] if isinstance(value, list) else value


def write_parquet(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Writes rows to `path` through a temporary file, so that a reader sees the whole file or none.

    Columns are the union of the rows' keys. Parquet cannot store `{}`: such a key is dropped, except a tool under
    `tools_kwargs`, whose name matters and which is written as `{create_kwargs: null}`.

    Raises:
        DataError: there are no rows, a column mixes types, or the file cannot be written; names the file.
    """
    path = Path(path).expanduser()
    if not rows:
        raise DataError(f"{path}: there are no rows to write")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _column([plain(row.get(name)) for row in rows], name, path) for name in names}
    table = pa.table({name: column for name, column in columns.items() if column is not None})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            pq.write_table(table, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be written: {one_line(error)}") from error
    return path


def _column(values: list[Any], name: str, path: Path) -> pa.Array | None:
    try:
        kind = _writable(pa.array(values).type, name)
        return None if kind is None else pa.array(values, type=kind)
    except (pa.ArrowException, OverflowError) as error:
        advice = "make its values one type, or write .jsonl"
        raise DataError(f"{path}: column '{name}' does not fit one Arrow type: {one_line(error)}; {advice}") from error


def _writable(kind: pa.DataType, name: str) -> pa.DataType | None:
    """Returns `kind`, the type of the key `name`, without empty structs; None if nothing is left."""
    if pa.types.is_list(kind):
        member = _writable(kind.value_type, name)
        return None if member is None else pa.list_(member)
    if not pa.types.is_struct(kind):
        return kind
    fields = [(field.name, _writable(field.type, field.name)) for field in kind]
    if name == "tools_kwargs":
        fields = [(tool, pa.struct([("create_kwargs", pa.null())]) if kept is None else kept) for tool, kept in fields]
    kept_fields = [(key, kept) for key, kept in fields if kept is not None]
    return pa.struct(kept_fields) if kept_fields else None


def file_list(files: str | Sequence[str]) -> tuple[str, ...]:
    """Returns one file name, several or none as a tuple."""
    if isinstance(files, str):
        return (files,) if files else ()
    return tuple(str(name) for name in files)
