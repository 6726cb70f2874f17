"""Pictures on their way to the model: those of a row's prompt, and those that tools answer with.

Invariant: a picture is decoded within limits, in a thread; it is read, patch by patch, only when its place in the context
is certain. What cannot be shown is said in words, and the trajectory goes on: a tool's broken picture is the tool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.bounded import BlockingCalls
from etude.chat.placeholders import content_of
from etude.errors import DataError, one_line
from etude.schemas import ToolResponse
from etude.tools.builtin.images import MAX_PIXELS, image_name, load_image

if TYPE_CHECKING:
    from PIL.Image import Image

    from etude.images import ImageInput
    from etude.models import ImageReader

MAX_IMAGES = 32  # of one answer of a tool
_FEWER = f"(only the first {MAX_IMAGES} images are shown)"
_VIDEO = "(a video, which cannot be shown)"

_threads = BlockingCalls("etude-pictures", limit=4)


@dataclass(frozen=True)
class Answer:
    """What the model is shown of a tool's response: pictures, how many tokens each stands for, and words."""

    text: str
    pictures: tuple[Image, ...] = ()
    tokens: tuple[int, ...] = ()

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """`message`, whose content is the text, with the pictures in front."""
        return {**message, "content": content_of(message["content"], len(self.pictures))} if self.pictures else message


async def read_row(reader: ImageReader, sources: Sequence[Any], where: str) -> list[ImageInput]:
    """The pictures of a row, as `load_image` takes them.

    Raises:
        DataError: one cannot be decoded; names it after `where`.
    """

    def read(number: int, source: Any) -> ImageInput:
        try:
            name = image_name(source)
            if name is None:
                return reader.read(load_image(source, MAX_PIXELS))
            return reader.read_file(name, lambda: load_image(source, MAX_PIXELS))
        except DataError as error:
            raise DataError(f"{where}: image {number}: {one_line(error)}") from error

    return [await _threads.run(read, number, source) for number, source in enumerate(sources)]


async def read_all(reader: ImageReader, pictures: Sequence[Image]) -> list[ImageInput]:
    """Decoded pictures as the model reads them."""
    return [await _threads.run(reader.read, picture) for picture in pictures]


async def answer_of(response: ToolResponse, reader: ImageReader) -> Answer:
    """What a model that sees images is shown of `response`."""
    pictures, notes = [], [_VIDEO] if response.video else []
    for number, source in enumerate(response.image or ()):
        if number == MAX_IMAGES:
            notes.append(_FEWER)
            break
        try:
            picture = await _threads.run(load_image, source, MAX_PIXELS)
            pictures.append((picture, reader.tokens(picture.size)))
        except DataError as error:
            notes.append(f"(an image that cannot be shown: {one_line(error, 200)})")
    text = "\n".join(part for part in (response.text, *notes) if part)
    return Answer(text, tuple(picture for picture, _ in pictures), tuple(tokens for _, tokens in pictures))
