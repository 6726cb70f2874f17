"""JSON serialization of results and arguments, for the files of the cache and of recordings.

Invariant: `result_from_json` returns what `result_to_json` was given, images included; a value that JSON and
PNG cannot represent raises `TypeError`. `canonical` returns equal texts for equal values.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

from etude.errors import DataError, InfrastructureError, one_line
from etude.rewards.finite import as_reward
from etude.schemas import ToolResponse
from etude.tools.call import Source, ToolResult
from etude.tools.contract import small_metrics

_MEDIA = ("image", "video")


def canonical(value: Any) -> str:
    """Returns the JSON text of `value`: sorted keys, no spaces, numpy arrays as lists, other objects as their `repr`."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_jsonable)
    except (TypeError, ValueError, RecursionError):  # keys of mixed types, or a cycle
        return json.dumps(repr(value))


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        return dict(value)
    return repr(value)


def digest(*parts: Any) -> str:
    """Returns a hash of `parts`, equal for equal `parts` in any process."""
    return hashlib.blake2b(canonical(parts).encode(), digest_size=16).hexdigest()


def result_to_json(answer: ToolResult) -> dict[str, Any]:
    """Converts a result to a mapping for `json.dumps`.

    Raises:
        TypeError: an image, video or metric cannot be represented.
    """
    response: dict[str, Any] = {} if answer.response.text is None else {"text": answer.response.text}
    for kind in _MEDIA:
        media = getattr(answer.response, kind)
        if media is not None:
            response[kind] = [_medium_to_json(medium) for medium in media]
    record = {
        "response": response,
        "reward": answer.reward,
        "metrics": dict(answer.metrics),
        "error": answer.error,
    }
    return {key: value for key, value in record.items() if value not in (None, {})}


def result_from_json(record: Mapping[str, Any], source: Source) -> ToolResult:
    """Reads the result in `record`.

    Raises:
        KeyError, TypeError, ValueError: `record` is not a result, or its reward is not finite.
    """
    error, response = record.get("error"), record.get("response", {})
    try:
        reward = as_reward(record.get("reward", 0.0), "the record")
    except InfrastructureError as invalid:
        raise ValueError(one_line(invalid)) from invalid
    media = {kind: [_medium_from_json(each) for each in response[kind]] for kind in _MEDIA if kind in response}
    return ToolResult(
        ToolResponse(text=response.get("text"), **media),
        reward,
        small_metrics(dict(record.get("metrics", {}))),
        None if error is None else str(error),
        source,
    )


def _medium_to_json(medium: Any) -> dict[str, Any]:
    if isinstance(medium, bytes):
        return {"bytes": base64.b64encode(medium).decode()}
    if hasattr(medium, "save") and hasattr(medium, "mode"):  # a Pillow image, without importing Pillow
        stream = io.BytesIO()
        medium.save(stream, "PNG")
        return {"png": base64.b64encode(stream.getvalue()).decode()}
    json.dumps(medium)
    return {"value": medium}


def _medium_from_json(record: Mapping[str, Any]) -> Any:
    if "bytes" in record:
        return base64.b64decode(record["bytes"])
    if "png" in record:
        from etude.tools.builtin.images import load_png

        try:
            return load_png(base64.b64decode(record["png"]))
        except (DataError, InfrastructureError) as error:
            raise ValueError(one_line(error)) from error
    return record["value"]
