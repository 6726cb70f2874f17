"""`load_image`, `image_size` and `image_name`: the images that rows and tools name, decoded within limits.

Invariant: nothing is decoded before its kind, its size in bytes and its size in pixels are known to be allowed; an image
from here is RGB and independent of its file. A file that lies about its size cannot exceed what its header says.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from etude.errors import DataError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_BYTES = 64_000_000
MAX_PIXELS = 50_000_000
"""Of an image that a model is shown; what a tool opens for itself has the tool's own limit."""


def load_image(source: Any, max_pixels: int) -> Image:
    """The image in `source`: a PIL image, bytes, a path, a `file://` or `data:` address, or `{"bytes"|"path": …}`.

    Raises:
        DataError: it is none of these, cannot be read, or has more than `max_pixels` pixels.
    """
    with _opened(source, max_pixels) as image:
        return image.convert("RGB")


def image_size(source: Any, max_pixels: int) -> tuple[int, int]:
    """(width, height) of the same, from the image's header: what follows may still turn out to be broken.

    Raises:
        DataError: as `load_image`.
    """
    with _opened(source, max_pixels) as image:
        return image.size


def image_name(source: Any) -> bytes | None:
    """What stands for the image in `source` as long as it stays the same: a digest of its bytes, or of its file's path,
    size and time. None for what has neither."""
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path") or source.get("image")
    if isinstance(source, bytes | bytearray):
        return hashlib.blake2b(source, digest_size=16, person=b"bytes").digest()
    if not isinstance(source, str | Path) or not str(source):
        return None
    text = str(source)
    if not text.startswith("data:"):
        try:
            state = _path(text).stat()
        except (OSError, ValueError):
            return None
        text = f"{text}\n{state.st_size}\n{state.st_mtime_ns}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, person=b"path").digest()


@contextmanager
def _opened(source: Any, max_pixels: int) -> Iterator[Image]:
    from PIL import Image as pillow

    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path") or source.get("image")
    if isinstance(source, pillow.Image):
        yield _checked(source, max_pixels)
        return
    try:
        with _stream_of(source) as stream, pillow.open(stream, formats=FORMATS) as image:
            yield _checked(image, max_pixels)
    except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
        raise DataError(f"image {_named(source)}: cannot be read: {one_line(error)}") from error


def _checked(image: Image, max_pixels: int) -> Image:
    width, height = image.size
    if width * height > max_pixels:
        raise DataError(f"an image of {width} x {height} pixels is larger than the {max_pixels} that are allowed")
    return image


def _stream_of(source: Any) -> IO[bytes]:
    if isinstance(source, bytes | bytearray):
        return io.BytesIO(_limited(bytes(source), "image"))
    if not isinstance(source, str | Path) or not str(source):
        raise DataError(f"an image must be a path, bytes or a PIL image, not {type(source).__name__}")
    text = str(source)
    if text.startswith("data:"):
        try:
            return io.BytesIO(_limited(base64.b64decode(text.partition(",")[2], validate=True), "image"))
        except binascii.Error as error:
            raise DataError(f"image {_named(source)}: not valid base64") from error
    if text.startswith(("http://", "https://")):
        raise DataError(f"image {_named(source)}: images are not downloaded; name a file")
    path = _path(text)
    if not path.is_file():
        raise DataError(f"image not found: {path}")
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"image {path}: larger than {MAX_BYTES} bytes")
    return path.open("rb")


def _path(text: str) -> Path:
    return Path(unquote(urlsplit(text).path) if text.startswith("file://") else text).expanduser()


def _limited(data: bytes, what: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise DataError(f"an {what} of {len(data)} bytes is larger than the {MAX_BYTES} that are allowed")
    return data


def _named(source: Any) -> str:
    if isinstance(source, bytes | bytearray):
        return f"of {len(source)} bytes"
    text = str(source)
    return text if len(text) <= 100 else f"{text[:100]}…"
