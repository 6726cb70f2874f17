"""The one message format between host, supervisor and program: length-prefixed JSON, and a payload of raw bytes.

A frame is two big-endian 32-bit lengths, a JSON object in UTF-8, and a payload of raw bytes. Invariant: nothing is read
beyond the announced lengths, and no length beyond the reader's limit is ever allocated; nothing is unpickled, evaluated
or looked up by name. Readers must still check each field that a program sends: the frame only says where it ends.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

HEADER = struct.Struct("!II")
MAX_JSON = 32 << 20
MAX_PAYLOAD = 128 << 20


class FrameError(ValueError):
    """The data is not a frame, or one that is too long."""


def encode(message: dict[str, Any], payload: bytes = b"") -> bytes:
    """The bytes of a frame.

    Raises:
        FrameError: it is longer than any reader accepts.
    """
    text = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_JSON or len(payload) > MAX_PAYLOAD:
        raise FrameError(f"a message of {len(text)} + {len(payload)} bytes is too long")
    return HEADER.pack(len(text), len(payload)) + text + payload


def lengths(header: bytes, max_json: int = MAX_JSON, max_payload: int = MAX_PAYLOAD) -> tuple[int, int]:
    """The two lengths a header announces.

    Raises:
        FrameError: one is above its limit.
    """
    text, payload = HEADER.unpack(header)
    if text > max_json or payload > max_payload:
        raise FrameError(f"a message of {text} + {payload} bytes is too long")
    return text, payload


def decode(text: bytes) -> dict[str, Any]:
    """The JSON object of a frame.

    Raises:
        FrameError: it is not one.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError("not JSON") from error
    if not isinstance(message, dict):
        raise FrameError("not a JSON object")
    return message


def send(fd: int, message: dict[str, Any], payload: bytes = b"") -> None:
    """Writes a frame to a blocking descriptor."""
    data = memoryview(encode(message, payload))
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> tuple[dict[str, Any], bytes] | None:
    """Reads a frame from a blocking descriptor; None at its end.

    Raises:
        FrameError: the data is not a frame, or ends in the middle of one.
    """
    header = _read(fd, HEADER.size)
    if not header:
        return None
    if len(header) < HEADER.size:
        raise FrameError("the connection ended within a message")
    text, payload = lengths(header)
    body = _read(fd, text + payload)
    if len(body) < text + payload:
        raise FrameError("the connection ended within a message")
    return decode(body[:text]), body[text:]


def _read(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
