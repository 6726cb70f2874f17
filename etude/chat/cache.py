"""`LRUCache`, and the cache key of rendered messages."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LRUCache(Generic[T]):
    """Holds the `limit` most recently used values."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str | None) -> T | None:
        """Returns the value under `key` and marks it as used; None if there is none."""
        if key is None or key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: str | None, value: T) -> None:
        """Stores `value` and evicts the least recently used one if full; does nothing if the key is None."""
        if key is None:
            return
        self._held[key] = value
        if len(self._held) > self._limit:
            self._held.popitem(last=False)


def rendering_key(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str | None:
    """Returns a cache key of messages and tools; None if they are not JSON-serializable."""
    try:
        return json.dumps([messages, tools])
    except (TypeError, ValueError, RecursionError):
        return None
