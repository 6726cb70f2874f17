"""Messages between host, supervisor and program: a JSON object, and named parts of raw bytes.

A message consists of two big-endian 32-bit lengths, the JSON object, and the concatenated parts; the object's `parts` are
their names and sizes. Invariant: nothing is read beyond the announced lengths, and nothing beyond the reader's limit is
ever allocated; nothing is unpickled, evaluated or looked up by name. Readers must still validate each field that a program
sends: the format only delimits.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from typing import Any

HEADER = struct.Struct("!II")
MAX_JSON = 32 << 20
MAX_PAYLOAD = 128 << 20

Parts = list[tuple[str, bytes]]
"""(name, content), in order."""


class MessageError(ValueError):
    """The data is not a valid message, or is too long."""


def encode(message: dict[str, Any], parts: Sequence[tuple[str, bytes]] = ()) -> bytes:
    """Encodes a message.

    Raises:
        MessageError: the message exceeds the maximum length.
    """
    sizes = [[name, len(content)] for name, content in parts]
    text = json.dumps({**message, "parts": sizes}, separators=(",", ":")).encode("ascii")
    payload = b"".join(content for _, content in parts)
    if len(text) > MAX_JSON or len(payload) > MAX_PAYLOAD:
        raise MessageError(f"a message of {len(text)} + {len(payload)} bytes is too long")
    return HEADER.pack(len(text), len(payload)) + text + payload


def lengths(header: bytes, max_json: int = MAX_JSON, max_payload: int = MAX_PAYLOAD) -> tuple[int, int]:
    """Returns the two lengths in a header.

    Raises:
        MessageError: a length exceeds its limit.
    """
    text, payload = HEADER.unpack(header)
    if text > max_json or payload > max_payload:
        raise MessageError(f"a message of {text} + {payload} bytes is too long")
    return text, payload


def decode(text: bytes, payload: bytes = b"") -> tuple[dict[str, Any], Parts]:
    """Decodes the object and the parts of a message.

    Raises:
        MessageError: the text is not a JSON object, or does not describe the payload.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError("not JSON") from error
    sizes = message.pop("parts", None) if isinstance(message, dict) else None
    if not isinstance(sizes, list):
        raise MessageError("not a JSON object with parts")
    parts, start = [], 0
    for size in sizes:
        if not (isinstance(size, list) and [type(field) for field in size] == [str, int] and size[1] >= 0):
            raise MessageError("a part is not [name, bytes]")
        parts.append((size[0], payload[start : start + size[1]]))
        start += size[1]
    if start != len(payload):
        raise MessageError("the parts do not add up to the message's length")
    return message, parts


def send(fd: int, message: dict[str, Any], parts: Sequence[tuple[str, bytes]] = ()) -> None:
    """Writes a message to a blocking descriptor."""
    data = memoryview(encode(message, parts))
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> tuple[dict[str, Any], Parts] | None:
    """Reads a message from a blocking descriptor; returns None at end of file.

    Raises:
        MessageError: the data is not a valid message, or ends in the middle of one.
    """
    header = _read(fd, HEADER.size)
    if not header:
        return None
    text, payload = lengths(header) if len(header) == HEADER.size else (0, 1)
    body = _read(fd, text + payload)
    if len(body) < text + payload:
        raise MessageError("the connection ended within a message")
    return decode(body[:text], body[text:])


def _read(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
