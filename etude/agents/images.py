"""Reads images for the model: those of a row's prompt, and those in tool responses.

Invariant: an image is decoded within limits, in a thread; a tool image's patches are computed only once the response is in
the context. Media that the model cannot take are replaced by a short note, which counts towards the response's length, and
the trajectory goes on: a corrupt image is the tool's fault. A temporary failure to read one is an infrastructure failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from etude.errors import DataError, one_line
from etude.schemas import ToolResponse
from etude.timeouts import BlockingCalls
from etude.tools import TokenLimit
from etude.tools.builtin.images import MAX_IMAGES, MAX_PIXELS, AnswerImages, image_name, load_image
from etude.tools.truncation import bound_text

if TYPE_CHECKING:
    from PIL.Image import Image

    from etude.models import ImageReader
    from etude.schemas import ImageInput

_VIDEO = "(a video, which cannot be shown)"
_MEDIA = "(the tool returned media that a text model cannot see)"

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


async def render_response(
    response: ToolResponse, reader: ImageReader, limit: TokenLimit | None = None
) -> tuple[str, Sequence[Image], Sequence[int]]:
    """Prepares a tool response for a vision model: its text, already truncated to `limit`, images, and the number of tokens
    of each.

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
    return append_notes(response.text, notes, limit), images, tokens


def response_text(response: ToolResponse, limit: TokenLimit | None = None) -> str:
    """Returns a tool response's text for a text-only model, with a note for media; it is already truncated to `limit`."""
    return append_notes(response.text, [_MEDIA], limit) if response.image or response.video else response.text or ""


def append_notes(text: str | None, notes: Sequence[str], limit: TokenLimit | None) -> str:
    """Appends a line per note; if the result is too long, truncates the text first, and the notes only if necessary."""
    lines = "\n".join(notes).encode("utf-8", "replace").decode()
    whole = "\n".join(part for part in (text, lines) if part)
    if not lines or limit is None or (cut := _truncate(whole, limit)) == whole:
        return whole
    tokens, chars = limit.max_tokens, limit.max_chars
    rest = replace(
        limit,
        max_tokens=None if tokens is None else tokens - limit.count(f"\n{lines}"),
        max_chars=None if chars is None else chars - len(lines) - 1,
    )
    if not text or min((left for left in (rest.max_tokens, rest.max_chars) if left is not None), default=-1) < 0:
        return cut
    return _truncate(f"{_truncate(text, rest)}\n{lines}", limit)


def _truncate(text: str, limit: TokenLimit) -> str:
    return bound_text(text, limit, len(text))
