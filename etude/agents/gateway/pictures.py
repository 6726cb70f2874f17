"""Images of a client's messages, as `data:` addresses: their sizes first, their pixels once their place is certain.

Invariant: what a client names is never fetched and no file of this machine is opened: an image is in its message or refused.
How many tokens it has is read from its header; it is decoded, within limits and in a thread, only where these have room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etude.agents.base import AgentContext
from etude.agents.gateway.errors import GatewayError
from etude.agents.pictures import read_row
from etude.bounded import BlockingCalls
from etude.chat.placeholders import image_count, is_image
from etude.errors import DataError, one_line
from etude.tools.builtin.images import MAX_IMAGES, MAX_PIXELS, image_size, image_url

if TYPE_CHECKING:
    from etude.images import ImageInput
    from etude.models import ImageReader

_threads = BlockingCalls("etude-gateway-pictures", limit=4)


async def image_tokens(pictures: Sequence[Sequence[str]], context: AgentContext) -> list[list[int]]:
    """For each message how many tokens each of its images has; `pictures` are their addresses.

    Raises:
        GatewayError: the policy is shown no images, there are too many, or one is no image; names the message.
        InfrastructureError: the system cannot read one now.
    """
    if not any(pictures):
        return [[] for _ in pictures]
    reader = context.images if "user" in context.chat.image_roles else None
    if reader is None:
        first = next(number for number, shown in enumerate(pictures) if shown)
        raise GatewayError(400, f"messages.{first}: this policy is shown no images", param="messages")
    return await _threads.run(_tokens, pictures, reader)


def _tokens(pictures: Sequence[Sequence[str]], reader: ImageReader) -> list[list[int]]:
    found = []
    for number, shown in enumerate(pictures):
        if len(shown) > MAX_IMAGES:
            raise GatewayError(400, f"messages.{number}: at most {MAX_IMAGES} images in one message", param="messages")
        try:
            found.append([reader.tokens(image_size(address, MAX_PIXELS)) for address in shown])
        except DataError as error:
            raise GatewayError(400, f"messages.{number}: {one_line(error)}", param="messages") from error
    return found


async def read_pictures(addresses: Sequence[str], context: AgentContext) -> list[ImageInput]:
    """The images as the model reads them.

    Raises:
        GatewayError: one is broken behind its header.
        InfrastructureError: the system cannot read one now.
    """
    if not addresses:
        return []
    assert context.images is not None
    try:
        return await read_row(context.images, addresses, "messages")
    except DataError as error:
        raise GatewayError(400, one_line(error), param="messages") from error


async def row_for_clients(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row`, its images in its `raw_prompt`, in the form that clients send: an agent can ask with these messages at once.

    Raises:
        DataError: one cannot be read; names the row.
    """
    return dict(row) if not row.get("images") else await _threads.run(_with_addresses, row)


def _with_addresses(row: Mapping[str, Any]) -> dict[str, Any]:
    images, messages = row["images"], row["raw_prompt"]
    wanted = sum(map(image_count, messages))
    if wanted != len(images):
        raise DataError(f"row {row['request_id']}: {len(images)} images for the {wanted} that its messages show")
    try:
        addresses = iter([image_url(source) for source in images])
    except DataError as error:
        raise DataError(f"row {row['request_id']}: {one_line(error)}") from error

    def told(part: Any) -> Any:
        return {"type": "image_url", "image_url": {"url": next(addresses)}} if is_image(part) else part

    told_messages = [
        {**message, "content": [told(part) for part in message["content"]]} if image_count(message) else message
        for message in messages
    ]
    return {name: value for name, value in row.items() if name != "images"} | {"raw_prompt": told_messages}
