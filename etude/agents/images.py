"""Reads images for the model: those of a row's prompt, and those in tool responses.

Invariant: an image is decoded within limits, in a thread; a tool image's patches are computed only once the response is in
the context. A temporary failure to read one is an infrastructure failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etude.errors import DataError, one_line
from etude.timeouts import BlockingCalls
from etude.tools.builtin.images import MAX_PIXELS, AnswerImages, image_name, load_image

if TYPE_CHECKING:
    from PIL.Image import Image

    from etude.models import ImageReader
    from etude.schemas import ImageInput

_threads = BlockingCalls("etude-images", limit=4)


async def read_row(reader: ImageReader, sources: Sequence[Any], where: str) -> list[ImageInput]:
    """Reads a row's images with `read_image`, in a thread."""
    return [
        await _threads.run(read_image, reader, source, f"{where}: image {number}")
        for number, source in enumerate(sources)
    ]


def read_image(reader: ImageReader, source: Any, where: str) -> ImageInput:
    """Reads one image of a row; `source` is anything that `load_image` accepts.

    Raises:
        DataError: it cannot be decoded; the message begins with `where`.
        InfrastructureError: the system cannot read it now.
    """
    try:
        name = image_name(source)
        if name is None:
            return reader.read(load_image(source, MAX_PIXELS))
        return reader.read_file(name, lambda: load_image(source, MAX_PIXELS))
    except DataError as error:
        raise DataError(f"{where}: {one_line(error)}") from error


async def read_all(reader: ImageReader, images: Sequence[Image]) -> list[ImageInput]:
    """Converts decoded images to model inputs, in a thread."""
    return [await _threads.run(reader.read, image) for image in images]


async def decode_all(reader: ImageReader, sources: Sequence[Any]) -> tuple[list[tuple[Image, int]], list[DataError]]:
    """Decodes the images of a tool response, in a thread; returns them, each with its number of tokens, and what is wrong
    with the others.

    Raises:
        InfrastructureError: the system cannot read an image now.
    """
    shown: list[tuple[Image, int]] = []
    limited, faults = AnswerImages(), list[DataError]()
    for source in sources:
        try:
            image = await _threads.run(limited.load, source)
            shown.append((image, reader.tokens(image.size)))
        except DataError as error:
            faults.append(error)
    return shown, faults
