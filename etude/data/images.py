"""The images of a row, and their positions in its prompt.

A row's images are in a separate column (`data.image_key`), a list of paths, bytes or `{"bytes"|"path": …}`, as in verl's
files and Hugging Face's image feature. Each `<image>` in the prompt's text is the position of the next one. A row
without that column may have its images inline in the prompt, as parts `{type: image, image: …}`.

Invariant: a row that `place_images` returned has as many image parts in its prompt as images in its column, in the same
order; relative paths are relative to the data file's folder. Images are opened only for their size: pixels are read when
a trajectory starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.chat.placeholders import image_count
from etude.data.files import Row
from etude.data.messages import Message
from etude.errors import DataError, InfrastructureError, one_line
from etude.tools.builtin.images import MAX_PIXELS, image_size, image_url

if TYPE_CHECKING:
    from etude.models import ImageReader

MARKER = "<image>"
NO_IMAGES = "take a vision-language model"
_OTHER_MEDIA = ("videos", "audios")
_ADDRESSES = ("data:", "file://", "http://", "https://")


def refuse_other_media(row: Mapping[str, Any], where: str) -> None:
    """Raises DataError for a row with videos or audio, which no model here takes."""
    for key in _OTHER_MEDIA:
        if row.get(key):
            raise DataError(
                f"{where}: the column '{key}' is not supported: a model is shown images only (rename a column that only "
                "your tools read)"
            )


def place_images(row: Row, key: str | None, prompt_key: str, folder: Path, where: str) -> list[Any]:
    """Moves the images of `row` to the column `images`, replaces each `<image>` in its prompt with an image part, and
    returns the images.

    Args:
        row: as `check_row` returned it; modified in place.
        key: the image column; None: no row has images.
        prompt_key: the messages' column.
        folder: base of relative paths.
        where: location for error messages.

    Raises:
        DataError: the column is not a list of images, or the prompt has positions for more or fewer.
    """
    column = None if key is None else row.pop(key, None)
    contents = [message["content"] for message in row[prompt_key] if isinstance(message["content"], list)]
    parts = (part for content in contents for part in content)
    inline = [part.pop("image") for part in parts if part["type"] == "image" and "image" in part]
    if inline and column:
        raise DataError(
            f"{where}: image parts of the prompt name pictures, and so does {key}", fix="give them in one place"
        )
    column, named = (inline, "image part") if inline else (column, key)
    if column is not None and not isinstance(column, list):
        raise DataError(f"{where}: {key} must be a list of images, got {type(column).__name__}")
    pictures = [_source(each, folder, f"{where}: {named}[{n}]") for n, each in enumerate(column or ())]
    messages = row[prompt_key]
    if column is not None:
        messages = [_split_markers(message) for message in messages]
    places = sum(map(image_count, messages))
    if places != len(pictures):
        held = "its image parts name" if inline else f"{key or 'data.image_key=null'} holds"
        raise DataError(f"{where}: the prompt has places for {places} images ('{MARKER}'), and {held} {len(pictures)}")
    if pictures:
        row[prompt_key], row["images"] = messages, pictures
    return pictures


def image_tokens(reader: ImageReader | None, pictures: Sequence[Any], where: str) -> tuple[int, ...]:
    """Returns the number of tokens of each image of a row; `reader` is None for a text-only model.

    Raises:
        DataError: the model takes no images; an image cannot be opened, is too large, or has a shape that the model
            rejects.
    """
    if not pictures:
        return ()
    if reader is None:
        raise DataError(
            f"{where}: the row has images, and the model reads text only",
            fix=f"{NO_IMAGES}, or set data.image_key=null",
        )
    try:
        return tuple(reader.tokens(image_size(picture, MAX_PIXELS)) for picture in pictures)
    except (DataError, InfrastructureError) as error:  # at load time there is nothing to retry
        raise DataError(f"{where}: {one_line(error)}") from error


def _source(value: Any, folder: Path, where: str) -> Any:
    """Normalises an image reference to a form that `load_image` takes."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "image") if value.get(key)), None)
    if isinstance(value, str) and value and not value.startswith(_ADDRESSES):
        return {"path": str((folder / Path(value).expanduser()).absolute())}
    if isinstance(value, str | bytes) and value:
        return value
    if hasattr(value, "size") and hasattr(value, "convert"):  # a Pillow image, whose repr differs between processes
        return image_url(value)
    raise DataError(f"{where} must be a path, bytes, or an object with one of them, got {type(value).__name__}")


def _split_markers(message: Message) -> Message:
    """Replaces the markers in `message` with image parts."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": list(_parts(content))} if MARKER in content else message
    parts: list[Any] = []
    for part in content:
        parts += _parts(part["text"]) if part["type"] == "text" and MARKER in part["text"] else [part]
    return {**message, "content": parts}


def _parts(text: str) -> Iterator[dict[str, Any]]:
    for number, piece in enumerate(text.split(MARKER)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}
