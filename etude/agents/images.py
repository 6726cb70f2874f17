"""Images on their way to the model: those of a row's prompt, and those in tool responses.

Invariant: an image is decoded within limits, in a thread; its patches are computed only once its position in the context is
certain. Media that cannot be shown are replaced by a short note, which counts as part of the answer, and the trajectory goes
on: a corrupt image is the tool's fault. One that the system cannot read at the moment is an infrastructure failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from etude.bounded import BlockingCalls
from etude.chat.placeholders import content_of
from etude.errors import DataError, one_line
from etude.schemas import ToolResponse
from etude.tools import TokenLimit
from etude.tools.builtin.images import MAX_IMAGES, MAX_PIXELS, AnswerImages, image_name, load_image
from etude.tools.truncation import bound_text

if TYPE_CHECKING:
    from PIL.Image import Image

    from etude.images import ImageInput
    from etude.models import ImageReader

_VIDEO = "(a video, which cannot be shown)"
_MEDIA = "(the tool returned media that a text model cannot see)"

_threads = BlockingCalls("etude-images", limit=4)


@dataclass(frozen=True)
class ShownResponse:
    """A tool's response as the model sees it: images, the tokens of each, and text."""

    text: str
    images: tuple[Image, ...] = ()
    tokens: tuple[int, ...] = ()

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """`message`, whose content is the text, with the images in front."""
        return {**message, "content": content_of(message["content"], len(self.images))} if self.images else message


async def read_row(reader: ImageReader, sources: Sequence[Any], where: str) -> list[ImageInput]:
    """The images of a row, each as `read_image` does, in a thread."""
    return [
        await _threads.run(read_image, reader, source, f"{where}: image {number}")
        for number, source in enumerate(sources)
    ]


def read_image(reader: ImageReader, source: Any, where: str) -> ImageInput:
    """An image of a row, as `load_image` takes it.

    Raises:
        DataError: it cannot be decoded; named as `where`.
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
    """Decoded images as the model reads them."""
    return [await _threads.run(reader.read, image) for image in images]


async def answer_of(response: ToolResponse, reader: ImageReader, limit: TokenLimit | None = None) -> ShownResponse:
    """`response` as a vision model sees it; the session has cut its text to `limit`.

    Raises:
        InfrastructureError: the system cannot read an image now.
    """
    given, limited = response.image or [], AnswerImages()
    shown: list[tuple[Image, int]] = []
    faults: list[DataError] = []
    for source in given[:MAX_IMAGES]:
        try:
            image = await _threads.run(limited.load, source)
            shown.append((image, reader.tokens(image.size)))
        except DataError as error:
            faults.append(error)
    notes = [_VIDEO] if response.video else []
    if faults:
        notes.append(f"(an image that cannot be shown: {one_line(faults[0], 200)})")
    if len(faults) > 1:
        notes.append(f"({len(faults) - 1} more images that cannot be shown)")
    if len(given) > MAX_IMAGES:
        notes.append(f"(only the first {MAX_IMAGES} images are shown)")
    images, tokens = zip(*shown) if shown else ((), ())
    return ShownResponse(append_notes(response.text, notes, limit), images, tokens)


def shown_text(response: ToolResponse, limit: TokenLimit | None = None) -> str:
    """`response` as a text-only model sees it; the session has cut its text to `limit`."""
    return append_notes(response.text, [_MEDIA], limit) if response.image or response.video else response.text or ""


def append_notes(text: str | None, notes: Sequence[str], limit: TokenLimit | None) -> str:
    """`text` with a line for each note; if both are too long, the text is cut, and the notes only if they must be."""
    told = "\n".join(notes).encode("utf-8", "replace").decode()
    whole = "\n".join(part for part in (text, told) if part)
    if not told or limit is None or (cut := _bounded(whole, limit)) == whole:
        return whole
    tokens, chars = limit.max_tokens, limit.max_chars
    rest = replace(
        limit,
        max_tokens=None if tokens is None else tokens - limit.count(f"\n{told}"),
        max_chars=None if chars is None else chars - len(told) - 1,
    )
    if not text or min((left for left in (rest.max_tokens, rest.max_chars) if left is not None), default=-1) < 0:
        return cut
    return _bounded(f"{_bounded(text, rest)}\n{told}", limit)


def _bounded(text: str, limit: TokenLimit) -> str:
    return bound_text(text, limit, len(text))
