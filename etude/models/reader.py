"""`ImageReader`: converts images to a vision model's inputs, with a cache; counts their tokens without reading pixels.

Invariant: `read` returns what `image_input` returns for that image, with as many tokens as `tokens` predicts for its size.
Equal images give the same object while it is cached, so that the rollouts of one prompt share its pixels, and a file is
opened once for all of them. The caller decides how files are opened, and which ones may be.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError, DataError, one_line
from etude.models.processor import image_input

if TYPE_CHECKING:
    from PIL.Image import Image

    from etude.schemas import ImageInput

REMEMBERED_BYTES = 512 * 2**20  # of cached pixel values
_NAMES = 4096  # cached file names, each with the key of its image
_LOCKS = 64


class ImageReader:
    """Reads images with `processor`; thread-safe."""

    def __init__(self, processor: Any, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._processor, self._limit = processor, remembered_bytes
        self._lock = threading.Lock()
        self._read: OrderedDict[bytes, ImageInput] = OrderedDict()
        self._held = 0
        self._names: OrderedDict[bytes, bytes] = OrderedDict()
        self._opening = [threading.Lock() for _ in range(_LOCKS)]

    def tokens(self, size: tuple[int, int]) -> int:
        """Number of tokens of an image of `size` (width, height).

        Raises:
            DataError: the image processor rejects this shape.
        """
        images = self._processor.image_processor
        width, height = size
        try:
            patches = images.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise DataError(f"a picture of {width} by {height} pixels: {one_line(error)}") from error
        return int(patches) // int(images.merge_size) ** 2

    def read(self, picture: Image) -> ImageInput:
        """Converts an image to the model's input.

        Raises:
            DataError: the image processor rejects the image.
            ConfigError: the image processor's number of tokens differs from its prediction.
        """
        picture = _in_rgb(picture)
        return self._keyed(_key(picture), picture)

    def read_file(self, name: bytes, opened: Callable[[], Image]) -> ImageInput:
        """Converts the image that `opened` returns; `opened` is not called if the image named `name` is cached.

        Raises:
            DataError: as `read`, or raised by `opened`.
        """
        with self._opening[hash(name) % _LOCKS]:  # of several rollouts of a prompt, only the first opens the file
            with self._lock:
                found = self._known(self._names.get(name))
            if found is not None:
                return found
            picture = _in_rgb(opened())
            key = _key(picture)
            made = self._keyed(key, picture)
            with self._lock:
                self._names[name] = key
                if len(self._names) > _NAMES:
                    self._names.popitem(last=False)
            return made

    def _known(self, key: bytes | None) -> ImageInput | None:
        if key is None or key not in self._read:
            return None
        self._read.move_to_end(key)
        return self._read[key]

    def _keyed(self, key: bytes, picture: Image) -> ImageInput:
        with self._lock:
            found = self._known(key)
        if found is not None:
            return found
        made = image_input(self._processor, picture)
        if made.tokens != (said := self.tokens(picture.size)):
            name = type(self._processor.image_processor).__name__
            raise ConfigError(f"{name} says {said} tokens of a picture and makes {made.tokens}: it cannot be used")
        with self._lock:
            if (found := self._known(key)) is not None:  # another thread was faster
                return found
            self._read[key] = made
            self._held += made.pixel_values.nbytes
            while self._held > self._limit and len(self._read) > 1:
                self._held -= self._read.popitem(last=False)[1].pixel_values.nbytes
        return made


def _in_rgb(picture: Image) -> Image:
    return picture if picture.mode == "RGB" else picture.convert("RGB")  # convert() always copies


def _key(picture: Image) -> bytes:
    return hashlib.blake2b(picture.tobytes(), digest_size=16, salt=picture.width.to_bytes(8, "big")).digest()
