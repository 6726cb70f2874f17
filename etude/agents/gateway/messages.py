"""A client's messages: validated, converted to the form that chat templates read, and their images, sent as `data:` URLs.

Invariant: no URL is fetched and no local file is opened: an image is inline in its message or rejected. Its token count is
read from its header; it is decoded, within limits and in a thread, only if the tokens fit.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.agents.base import AgentContext
from etude.agents.gateway.request import GatewayError
from etude.agents.images import read_row
from etude.chat.placeholders import image_count, is_image
from etude.errors import DataError, one_line
from etude.timeouts import BlockingCalls
from etude.tools.builtin.images import MAX_IMAGES, MAX_PIXELS, image_size, image_url

if TYPE_CHECKING:
    from etude.models import ImageReader
    from etude.schemas import ImageInput

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_threads = BlockingCalls("etude-gateway-images", limit=4)
Message = dict[str, Any]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[list[str]]]:
    """Returns (messages without empty keys, whose content is a string or, with images, a list of parts; the `data:` URLs of
    each message's images).

    Raises:
        GatewayError: a message is malformed, has a part that is neither text nor image, or has images in a role other than
            user or tool; names the message.
    """
    read = [_plain(message, f"messages.{place}") for place, message in enumerate(messages)]
    return [message for message, _ in read], [images for _, images in read]


def _plain(message: Mapping[str, Any], where: str) -> tuple[Message, list[str]]:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise GatewayError(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    content, images = _content(message.get("content"), f"{where}.content")
    if images and role not in ("user", "tool"):
        raise GatewayError(f"{where}.content: only messages of users and tools show images", param=f"{where}.content")
    plain: Message = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str) and message[name]:
            plain[name] = message[name]
    if message.get("function_call"):
        raise GatewayError(f"{where}.function_call: use tool_calls", param=f"{where}.function_call")
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise GatewayError(f"{where}.tool_calls must be an assistant's list", param=f"{where}.tool_calls")
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls.{n}") for n, call in enumerate(calls)]
    return plain, images


def _content(content: object, where: str) -> tuple[str | list[Message], list[str]]:
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        raise GatewayError(f"{where} must be a text or a list of parts", param=where)
    parts: list[Message] = []
    images: list[str] = []
    for place, part in enumerate(content):
        given: Mapping[str, Any] = part if isinstance(part, Mapping) else {}
        text = given.get("text")
        if given.get("type") == "image_url":
            images.append(_address(given.get("image_url"), f"{where}.{place}"))
            parts.append({"type": "image"})
        elif given.get("type") == "text" and isinstance(text, str):
            if parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += text
            elif text:
                parts.append({"type": "text", "text": text})
        else:
            raise GatewayError(f"{where}.{place}: only parts of type 'text' and 'image_url' are read", param=where)
    return parts if images else "".join(part["text"] for part in parts), images


def _address(image: object, where: str) -> str:
    address = image.get("url") if isinstance(image, Mapping) else None
    if not isinstance(address, str) or not address.startswith("data:image/"):
        raise GatewayError(f"{where}: an image is given as a 'data:image/' address; nothing is fetched", param=where)
    return address


def _call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise GatewayError(f"{where} must have a function with a name", param=where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        raise GatewayError(f"{where}.function.arguments must be a text of JSON", param=where)
    made: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    assert isinstance(call, Mapping)
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def match_answers(messages: Sequence[Message]) -> list[int | None]:
    """Returns, for each message, the index of the tool call it answers among those of the preceding assistant message.

    Calls are matched by their ids in the messages themselves; calls that share an id are answered in order. None for a
    message that is not a tool's, or that names no such call.
    """
    places: list[int | None] = []
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    for message in messages:
        if message["role"] == "assistant":
            waiting = defaultdict(list)
            for place, call in enumerate(message.get("tool_calls", ())):
                waiting[call.get("id", "")].append(place)
        named = message.get("tool_call_id") if message["role"] == "tool" else None
        calls = waiting.get(named, []) if named else []
        places.append(calls.pop(0) if len(calls) > 1 else next(iter(calls), None))
    return places


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
            raise GatewayError(f"messages.{number}: this policy takes no images{whose}", param="messages")
    assert context.images is not None
    return await _threads.run(_read_headers, addresses, context.images)


def _read_headers(addresses: Sequence[Sequence[str]], reader: ImageReader) -> list[list[ImageHeader]]:
    def read_header(address: str) -> ImageHeader:
        digest = hashlib.blake2b(address.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return ImageHeader(address, digest, reader.tokens(image_size(address, MAX_PIXELS)))

    images = []
    for number, shown in enumerate(addresses):
        if len(shown) > MAX_IMAGES:
            raise GatewayError(f"messages.{number}: at most {MAX_IMAGES} images in one message", param="messages")
        try:
            images.append([read_header(address) for address in shown])
        except DataError as error:
            raise GatewayError(f"messages.{number}: {one_line(error)}", param="messages") from error
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
        raise GatewayError(one_line(error), param="messages") from error


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
