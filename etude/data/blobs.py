"""`Blobs`: keeps the bytes of a dataset's rows in a file instead of in memory.

Invariant: `restore(store(value))` equals `value`; equal bytes are stored once. The file is temporary and unnamed, so
that it disappears with the process, however that ends.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from dataclasses import dataclass, field
from typing import IO, Any

from etude.errors import DataError, one_line

SMALLEST = 1024  # bytes: smaller values are cheaper to keep in memory


@dataclass(frozen=True)
class BlobReference:
    """Position of the bytes in the file, their digest, and whether they were a string. Equal bytes have equal `repr`s."""

    start: int = field(repr=False)
    size: int
    digest: str
    text: bool = False


class Blobs:
    """Stores bytes and `data:` URLs of rows; the file is created on first use."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[bytes, BlobReference] = {}

    def store(self, value: Any) -> Any:
        """Returns `value` with large bytes and URLs moved to the file, at any depth.

        Raises:
            DataError: the file cannot be written.
        """
        if isinstance(value, dict):
            return {key: self.store(member) for key, member in value.items()}
        if isinstance(value, list):
            return [self.store(member) for member in value]
        if isinstance(value, bytes) and len(value) >= SMALLEST:
            return self._keep(value, text=False)
        if isinstance(value, str) and len(value) >= SMALLEST and value.startswith("data:"):
            return self._keep(value.encode("utf-8", "surrogatepass"), text=True)
        return value

    def restore(self, value: Any) -> Any:
        """Returns `value` with the stored bytes and URLs put back.

        Raises:
            DataError: the file cannot be read.
        """
        if self._file is None:
            return value
        if isinstance(value, dict):
            return {key: self.restore(member) for key, member in value.items()}
        if isinstance(value, list):
            return [self.restore(member) for member in value]
        if isinstance(value, BlobReference):
            data = os.pread(self._file.fileno(), value.size, value.start)
            if len(data) < value.size:
                raise DataError("the file that keeps the rows' images was cut")
            return data.decode("utf-8", "surrogatepass") if value.text else data
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Raises TypeError if there is a file: a copy would share a file descriptor that it does not own."""
        if self._file is not None:
            raise TypeError("a Blobs with a file cannot be copied or pickled: the file belongs to this object alone")
        return type(self), ()

    def _keep(self, data: bytes, *, text: bool) -> BlobReference:
        key = hashlib.blake2b(data, digest_size=16, person=b"text" if text else b"bytes").digest()
        if key not in self._places:
            try:
                if self._file is None:
                    self._file = tempfile.TemporaryFile(prefix="etude-rows-")  # noqa: SIM115
                    weakref.finalize(self, self._file.close)
                start = self._file.seek(0, os.SEEK_END)
                self._file.write(data)
                self._file.flush()
            except OSError as error:
                raise DataError(
                    f"cannot keep the rows' images in {tempfile.gettempdir()}: {one_line(error)}"
                ) from error
            self._places[key] = BlobReference(start, len(data), key.hex(), text)
        return self._places[key]
