"""`Recent`: what was rendered and encoded lately, under what it depends on.

Invariant: at most `limit` values are kept, the last ones asked for; a key stands for everything that a rendering can see.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Key = tuple[str, ...]


class Recent(Generic[T]):
    """The last `limit` values that were put or found under a key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[Key, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key | None) -> T | None:
        """The value under `key`, or None."""
        if key is None or key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: Key | None, value: T) -> None:
        """Keeps `value`; under None it is forgotten at once."""
        if key is None:
            return
        self._held[key] = value
        if len(self._held) > self._limit:
            self._held.popitem(last=False)


def rendering_key(messages: Sequence[Mapping[str, Any]], *others: str) -> Key | None:
    """What rendering `messages` depends on, beside `others`; None where a message is more than a role and a text."""
    key: list[str] = [*others]
    for message in messages:
        if len(message) != 2 or type(message.get("role")) is not str or type(message.get("content")) is not str:
            return None
        key += (message["role"], message["content"])
    return tuple(key)
