"""Strict JSON, from any value and to one, and JSON Lines files (one object per line).

Invariant: a file is either written as a whole (`write_atomically`) or appended to line by line (`JsonLines`). Each line is
one write to a file opened with O_APPEND, so that lines of concurrent tasks, threads and processes never interleave, and a
killed process loses no line that it wrote. Nothing here imports torch, so that viewers start fast; arrays and tensors are
recognized by their `tolist`.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias, TypeVar, cast

from pydantic import BaseModel

from etude.errors import ConfigError, DataError, EtudeError, one_line

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

MAX_LINE_BYTES = 256 * 2**20
_MAX_DEPTH = 48  # deeper than any message; tool metrics may hold cycles
_MAX_INT_BITS = 1024  # far below the interpreter's limit for printing an integer
_MAX_REPR = 200
V = TypeVar("V")


def json_safe(value: object, _depth: int = 0) -> JsonValue:
    """Converts `value` to plain JSON data; never raises, whatever the value.

    Non-finite numbers become None, bytes `{"base64": …}`, arrays and tensors lists, values of unknown types their truncated
    `repr`; nesting deeper than 48 levels becomes "…".
    """
    if value is None or isinstance(value, bool):
        return value
    if _depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, Enum):
        return json_safe(value.value, _depth + 1)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_INT_BITS else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return str(value)
    return _json_safe_object(value, _depth + 1)


def _json_safe_object(value: object, depth: int) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(json_safe(key)): json_safe(item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(item, depth) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
        return json_safe(dict(vars(value)), depth)
    if callable(getattr(value, "tolist", None)):  # numpy and torch, scalars included
        listed = cast(Any, value).tolist()
        return repr(value)[:_MAX_REPR] if type(listed) is type(value) else json_safe(listed, depth)
    return _short_repr(value)


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # the `__repr__` of a tool's own class may raise
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_REPR else text[: _MAX_REPR - 1] + "…"


class RepeatedKeyError(ValueError):
    """A key is given twice: which of its values is meant cannot be told."""


def decode_strictly(text: str) -> Any:
    """Decodes a JSON text by the standard: Python's decoder also takes NaN, infinities and a key that is there twice.

    Raises:
        RepeatedKeyError: a key is.
        ValueError: it is no such JSON; says why in one line.
    """
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        several = error.lineno > 1
        place = f"line {error.lineno}, column {error.colno}" if several else f"character {error.pos}"
        raise ValueError(f"{error.msg} at {place}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique_keys(pairs: Iterable[tuple[str, V]]) -> dict[str, V]:
    """Makes a dict.

    Raises:
        RepeatedKeyError: a key is there twice; names it.
    """
    made: dict[str, V] = {}
    for key, value in pairs:
        if key in made:
            raise RepeatedKeyError(f"the key '{key if len(key) <= 80 else key[:80] + '…'}' is given twice")
        made[key] = value
    return made


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # of thousands of digits
        raise ValueError(f"the number {text[:20]}… is out of range") from None


def _parse_float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text[:20]} is out of range")
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not allowed")


_DECODER = json.JSONDecoder(
    parse_constant=_refuse, parse_int=_parse_int, parse_float=_parse_float, object_pairs_hook=unique_keys
)


def json_line(record: object) -> bytes:
    """Encodes `record` as one line of UTF-8 JSON, newline included; a line with lone surrogates uses ASCII escapes."""
    safe = json_safe(record)
    try:
        return json.dumps(safe, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(safe, allow_nan=False).encode() + b"\n"


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file next to `path`; it replaces `path` when the block succeeds, and is deleted otherwise.

    Raises:
        EtudeError: the file cannot be written; names it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise EtudeError(f"cannot write {path}: {one_line(error)}; check folder and disk space") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Writes `content` as indented JSON, atomically; raises EtudeError as `write_atomically`."""
    with write_atomically(path) as file:
        file.write(json.dumps(content, indent=1).encode())


class JsonLines:
    """Appends to the JSON Lines file `path`, which is opened by the first `append` of each process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._descriptor: tuple[int, int] | None = None  # (process, file)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line; a value that JSON cannot hold is written as its `repr`.

        Raises:
            ConfigError: the file cannot be written.
        """
        data = (json.dumps(record, ensure_ascii=True, separators=(",", ":"), default=repr) + "\n").encode()
        try:
            if self._descriptor is None or self._descriptor[0] != os.getpid():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = (os.getpid(), os.open(self.path, flags, 0o644))
            written = os.write(self._descriptor[1], data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {one_line(error)}") from error

    def close(self) -> None:
        """Closes the file; a later `append` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor[0] == os.getpid():
            os.close(descriptor[1])

    def __del__(self) -> None:
        self.close()


def read_json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for every line that is not empty.

    Raises:
        DataError: the file cannot be read, or a line is no JSON object or longer than 256 MiB; names file and line.
    """
    path = Path(path).expanduser()
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if not line.strip():
                    continue
                yield number, _parse_line(line, f"{path}: line {number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{where} is longer than {MAX_LINE_BYTES // 2**20} MiB")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({one_line(error, 120)}); was it cut or edited?") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    return record
