"""Reads images in a client's messages, sent as `data:` URLs: first their sizes, then the pixels of those that are needed.

Invariant: no URL is fetched and no local file is opened: an image is inline in its message or rejected. Its token count is
read from its header; it is decoded, within limits and in a thread, only if the tokens fit.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.agents.base import AgentContext
from etude.agents.gateway.wire import GatewayError
from etude.agents.images import read_row
from etude.bounded import BlockingCalls
from etude.chat.placeholders import image_count, is_image
from etude.errors import DataError, one_line
from etude.tools.builtin.images import MAX_IMAGES, MAX_PIXELS, image_size, image_url

if TYPE_CHECKING:
    from etude.images import ImageInput
    from etude.models import ImageReader

_threads = BlockingCalls("etude-gateway-images", limit=4)


class ImageHeader(NamedTuple):
    """An image whose pixels have not been read: its URL, the URL's digest, and its token count."""

    address: str
    digest: bytes
    tokens: int


async def read_image_sizes(
    addresses: Sequence[Sequence[str]], roles: Sequence[str], context: AgentContext
) -> list[list[ImageHeader]]:
    """Reads the image headers of each message, given the messages' roles; there must be at least one image.

    Raises:
        GatewayError: the policy takes no images, a message has too many, or one is not an image; names the message.
        InfrastructureError: the system cannot read one now.
    """
    taken = frozenset() if context.images is None else context.chat.image_roles
    for number, (shown, role) in enumerate(zip(addresses, roles)):
        if shown and role not in taken:
            whose = " in tools' answers" if role == "tool" and taken else ""
            raise GatewayError(400, f"messages.{number}: this policy takes no images{whose}", param="messages")
    assert context.images is not None
    return await _threads.run(_read_headers, addresses, context.images)


def _read_headers(addresses: Sequence[Sequence[str]], reader: ImageReader) -> list[list[ImageHeader]]:
    def read_header(address: str) -> ImageHeader:
        digest = hashlib.blake2b(address.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return ImageHeader(address, digest, reader.tokens(image_size(address, MAX_PIXELS)))

    images = []
    for number, shown in enumerate(addresses):
        if len(shown) > MAX_IMAGES:
            raise GatewayError(400, f"messages.{number}: at most {MAX_IMAGES} images in one message", param="messages")
        try:
            images.append([read_header(address) for address in shown])
        except DataError as error:
            raise GatewayError(400, f"messages.{number}: {one_line(error)}", param="messages") from error
    return images


async def decode_images(images: Sequence[ImageHeader], context: AgentContext) -> list[ImageInput]:
    """Decodes images into the model's input format.

    Raises:
        GatewayError: one has a valid header but corrupt data.
        InfrastructureError: the system cannot read one now.
    """
    assert context.images is not None
    try:
        return await read_row(context.images, [header.address for header in images], "messages")
    except DataError as error:
        raise GatewayError(400, one_line(error), param="messages") from error


class KeptImages:
    """Reference-counted images of a session's turns and requests; equal images are stored once.

    `most_mb`: maximum MiB of pixel values; None: unlimited.
    """

    def __init__(self, most_mb: int | None) -> None:
        self._most = most_mb
        self._images: dict[int, ImageInput] = {}
        self._uses: Counter[int] = Counter()

    def take(self, images: Sequence[ImageInput]) -> tuple[ImageInput, ...]:
        """Stores these images and returns the stored ones.

        Raises:
            GatewayError: they exceed the limit; nothing is stored.
        """
        kept = tuple([self._images.setdefault(image.digest, image) for image in images])
        self._uses.update([image.digest for image in kept])
        size = sum(image.pixel_values.nbytes for image in self._images.values())
        if self._most is not None and size > self._most << 20:
            self.give_back(kept)
            raise GatewayError(400, f"this session's {self._most} MB of images are used up", param="messages")
        return kept

    def give_back(self, images: Sequence[ImageInput]) -> None:
        """Releases images that turned out not to be needed."""
        for image in images:
            self._uses[image.digest] -= 1
            if not self._uses[image.digest]:
                del self._uses[image.digest], self._images[image.digest]


async def row_for_clients(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `row` with its images inline in `raw_prompt`, in the format that clients send, so that an agent can forward
    its messages unchanged.

    Raises:
        DataError: an image cannot be read; names the row.
    """
    return dict(row) if not row.get("images") else await _threads.run(_with_inline_images, row)


def _with_inline_images(row: Mapping[str, Any]) -> dict[str, Any]:
    images, messages = row["images"], row["raw_prompt"]
    wanted = sum(map(image_count, messages))
    if wanted != len(images):
        raise DataError(f"row {row['request_id']}: {len(images)} images for the {wanted} that its messages show")
    try:
        addresses = iter([image_url(source) for source in images])
    except DataError as error:
        raise DataError(f"row {row['request_id']}: {one_line(error)}") from error

    def inline(part: Any) -> Any:
        return {"type": "image_url", "image_url": {"url": next(addresses)}} if is_image(part) else part

    inlined = [
        {**message, "content": [inline(part) for part in message["content"]]} if image_count(message) else message
        for message in messages
    ]
    return {name: value for name, value in row.items() if name != "images"} | {"raw_prompt": inlined}
