"""`load_image`, `image_size`, `image_name` and `AnswerImages`: decode the images of rows and tools within limits.

Invariant: an image is decoded only after its format, its size in bytes and its size in pixels are checked; the result is
RGB, upright and independent of its file, without metadata. A file with a false header cannot exceed the size in that header.
Whatever Pillow raises for a damaged file becomes a `DataError`; system errors (no free file descriptor, a failing disk) are
not the file's fault and become infrastructure failures.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from etude.errors import DataError, InfrastructureError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_BYTES = 64_000_000
MAX_PIXELS = 50_000_000
"""Limit of an image given to a model, and of all images of one response together (200 MB in Pillow's memory); a tool has its
own limit for images that it opens itself."""
MAX_IMAGES = 32
"""Limit per tool response."""

_ORIENTATION = 0x0112  # the Exif tag
_FAULTS_OF_THE_FILE = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.EINVAL, errno.EOVERFLOW),  # the file makes Pillow seek out of range
    }
)


def load_image(source: Any, max_pixels: int) -> Image:
    """Loads the image in `source`: a PIL image, bytes, a path, a `file://` or `data:` URL, or `{"bytes"|"path": …}`; applies
    the Exif orientation of its header.

    Raises:
        DataError: `source` is none of these, or the image is broken, or has no pixels or more than `max_pixels`.
        InfrastructureError: the system cannot read the image now.
    """
    with _opened(source, max_pixels) as image:
        return _upright(image)


def load_png(data: bytes) -> Image:
    """Loads a PNG that this package wrote, in its own mode.

    Raises:
        DataError, InfrastructureError: as `load_image`; it is no PNG.
    """
    with _opened(data, MAX_PIXELS, ("PNG",)) as image:
        image.load()
        return image


def image_size(source: Any, max_pixels: int) -> tuple[int, int]:
    """Returns (width, height) of the image that `load_image` would load, from its header only: the rest may be broken.

    Raises:
        DataError, InfrastructureError: as `load_image`.
    """
    with _opened(source, max_pixels) as image:
        return image.size if _orientation(image) < 5 else (image.height, image.width)


def image_url(source: Any) -> str:
    """Returns a `data:` URL of the image in `source`: the file's bytes unchanged, or a PNG of a PIL image.

    Raises:
        DataError, InfrastructureError: as `load_image`, for errors in the header.
    """
    from PIL import Image as pillow

    source = _of_row(source)
    if isinstance(source, pillow.Image):
        stream = io.BytesIO()
        load_image(source, MAX_PIXELS).save(stream, "PNG")
        source = stream.getvalue()
    with _opened(source, MAX_PIXELS) as image:
        kind = pillow.MIME[str(image.format)]
    with _stream_of(source) as file:
        return f"data:{kind};base64,{base64.b64encode(file.read()).decode()}"


def image_name(source: Any) -> bytes | None:
    """Returns a cache key of the image in `source`: a digest of its bytes, or of its file's path, size and modification
    time; None if there is neither."""
    source = _of_row(source)
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


class AnswerImages:
    """Loads the images of one tool response, up to `MAX_IMAGES` images and `MAX_PIXELS` in total."""

    def __init__(self) -> None:
        self._count = self._pixels = 0

    def load(self, source: Any) -> Image:
        """Loads the next image.

        Raises:
            DataError: as `load_image`, or the image exceeds the limits of a response.
            InfrastructureError: as `load_image`.
        """
        self._count += 1
        if self._count > MAX_IMAGES:
            raise DataError(f"more than {MAX_IMAGES} images")
        with _opened(source, MAX_PIXELS) as image:
            pixels = self._pixels + image.width * image.height
            if pixels > MAX_PIXELS:
                raise DataError(
                    f"an image of {image.width} x {image.height} pixels, and one answer's images have at most {MAX_PIXELS} "
                    "together"
                )
            loaded = _upright(image)
        self._pixels = pixels
        return loaded


def _upright(image: Image) -> Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(_orientation(image))  # before converting: a TIFF file loses it then
    upright = image.convert("RGB")
    if turn is not None:
        upright = upright.transpose(turn)
    upright.info.clear()  # a remaining orientation would be applied again
    return upright


def _orientation(image: Image) -> int:
    """Returns the Exif orientation, 1 to 8; 1 if the header has no readable one, or Pillow applies it itself (TIFF)."""
    from PIL import Image as pillow

    if image.format == "TIFF":
        return 1
    try:
        found = pillow.Image.getexif(image).get(_ORIENTATION, 1)  # PNG's own `getexif` decodes the image
    except Exception:  # damaged metadata: the image may be intact
        return 1
    return found if found in range(1, 9) else 1


@contextmanager
def _opened(source: Any, max_pixels: int, formats: tuple[str, ...] = FORMATS) -> Iterator[Image]:
    """Opens an image. No other function may: without `formats`, Pillow runs Ghostscript on PostScript."""
    from PIL import Image as pillow

    source = _of_row(source)
    try:
        if isinstance(source, pillow.Image):
            yield _checked(source, max_pixels)
        else:
            with _stream_of(source) as stream, pillow.open(stream, formats=formats) as image:
                yield _checked(image, max_pixels)
    except DataError:
        raise
    except pillow.UnidentifiedImageError as error:  # its message contains a memory address, which differs in every run
        raise DataError(f"image {_named(source)}: cannot be read: no image of a known format") from error
    except Exception as error:  # a damaged file can make Pillow raise almost anything
        if _is_system_error(error):
            raise InfrastructureError(f"image {_named(source)}: cannot be read now: {one_line(error)}") from error
        raise DataError(f"image {_named(source)}: cannot be read: {one_line(error)}") from error


def _of_row(source: Any) -> Any:
    """Returns the image in the mapping of a data set's row; anything else unchanged."""
    if isinstance(source, Mapping):
        return source.get("bytes") or source.get("path") or source.get("image")
    return source


def _is_system_error(error: Exception) -> bool:
    """Whether the system is at fault rather than the file; the OSErrors that Pillow itself raises have no `errno`."""
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in _FAULTS_OF_THE_FILE
    return isinstance(error, MemoryError)


def _checked(image: Image, max_pixels: int) -> Image:
    width, height = image.size
    if not width * height:
        raise DataError(f"an image of {width} x {height} pixels shows nothing")
    if width * height > max_pixels:
        raise DataError(f"an image of {width} x {height} pixels is larger than the {max_pixels} that are allowed")
    return image


def _stream_of(source: Any) -> IO[bytes]:
    if isinstance(source, bytes | bytearray):
        return io.BytesIO(_check_size(bytes(source)))
    if not isinstance(source, str | Path) or not str(source):
        raise DataError(f"an image must be a path, bytes or a PIL image, not {type(source).__name__}")
    text = str(source)
    if text.startswith("data:"):
        try:
            return io.BytesIO(_check_size(base64.b64decode(text.partition(",")[2], validate=True)))
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


def _check_size(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise DataError(f"an image of {len(data)} bytes is larger than the {MAX_BYTES} that are allowed")
    return data


def _named(source: Any) -> str:
    if isinstance(source, bytes | bytearray):
        return f"of {len(source)} bytes"
    if not isinstance(source, str | Path):
        return (
            f"of {source.width} x {source.height} pixels" if hasattr(source, "width") else f"({type(source).__name__})"
        )
    text = str(source)
    return text if len(text) <= 100 else f"{text[:100]}…"
