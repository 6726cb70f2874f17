"""`truncate_value`: converts any value to a JSON value of limited size, for traces.

Invariant: time and result size are limited however large the value is; of objects of unknown classes only the class name is
read, so tracing has no side effects and cannot fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

MAX_CHARS = 4_000
_MAX_ITEMS = 50
_MAX_DEPTH = 5


def truncate_value(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Returns `value` with long text truncated, long containers cut and ended by a count, and other objects replaced by
    their class name."""
    if value is None or (isinstance(value, bool | int | float) and not isinstance(value, Enum)):
        return value if not isinstance(value, int) or abs(value) < 2**63 else f"<int of {value.bit_length()} bits>"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        text = value if len(value) <= MAX_CHARS else f"{value[:MAX_CHARS]}… ({len(value)} characters)"
        return text.encode("utf-8", "replace").decode("utf-8")
    if depth == 0:
        return f"<{type(value).__name__}>"
    if type(value) in (list, tuple):
        more = [f"… ({len(value)} items)"] if len(value) > _MAX_ITEMS else []
        return [truncate_value(item, depth - 1) for item in value[:_MAX_ITEMS]] + more
    pairs = _pairs(value)
    if pairs is None:
        return f"<{type(value).__name__}>"
    named = {
        str(key)[:100] if isinstance(key, str | int) else "?": truncate_value(item, depth - 1)
        for key, item in pairs[:_MAX_ITEMS]
    }
    return named | ({"…": f"{len(pairs)} entries"} if len(pairs) > _MAX_ITEMS else {})


def _pairs(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the items of a dict, or the non-empty fields of a dataclass or pydantic model; None for other values."""
    if isinstance(value, dict):
        return (
            [(key, value[key]) for key, _ in zip(value, range(_MAX_ITEMS + 1))]
            if len(value) > 10_000
            else list(value.items())
        )
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, item) for f in fields(value) if (item := getattr(value, f.name, None)) not in (None, {}, [])]
    declared = getattr(type(value), "model_fields", None)
    if isinstance(declared, Mapping):
        return [(name, item) for name in declared if (item := getattr(value, name, None)) is not None]
    return None
