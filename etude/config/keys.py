"""Which keys exist.

Invariant: the keys of the package's own YAML, which `generate` writes from their declarations, are all there are. A key
whose default is `{}` is free-form: its section takes anything. Leaves reading files to `layers`, and values to `checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from etude.config.layers import Layer, ancestors, flatten, plain
from etude.options.types import shown


class KeyTable:
    """The keys of one root: built from the package's layers."""

    def __init__(self, package_layers: Iterable[Layer]) -> None:
        self._defaults: dict[str, Any] = {}
        self._free: set[str] = set()
        for layer in package_layers:
            for key, value in flatten(plain(layer)):
                if value == {}:
                    self._free.add(key)
                elif self.free_form(key) is None:
                    self._defaults[key] = value
        self._sections = {section for key in self for section in ancestors(key)}

    def __iter__(self) -> Iterator[str]:
        return iter([*self._defaults, *self._free])

    def free_form(self, key: str) -> str | None:
        """The free-form section that `key` is or lies in, if any."""
        return next((free for free in self._free if key == free or key.startswith(free + ".")), None)

    def knows(self, key: str) -> bool:
        """Whether `key` is one of ours: a key, a section, or within a free-form section."""
        return key in self._defaults or key in self._sections or self.free_form(key) is not None

    def faults(self, layer: Layer) -> dict[str, str]:
        """Keys of `layer` that do not exist, or hold a value where a section belongs, each with its line."""
        found = ((key, self._fault(key, value)) for key, value in flatten(plain(layer)))
        return {key: f"{fault[0]} ({layer.source}){fault[1]}" for key, fault in found if fault}

    def _fault(self, key: str, value: Any) -> tuple[str, str] | None:
        """(what is wrong with a key that was set to `value`, what follows the place where it was), if anything."""
        if key in self._sections or key in self._free:
            return (
                None
                if isinstance(value, Mapping)
                else (f"{key} must be a section of key: value, got {shown(value)}", "")
            )
        if self.knows(key):
            return None
        leaf = next((part for part in ancestors(key) if part in self._defaults), None)
        if leaf:
            return f"{leaf} is one value, not a section", ""
        return f"unknown key {self._unknown_part(key)}", self._nearest(key)

    def _unknown_part(self, key: str) -> str:
        """`key` up to and including its first name that does not exist."""
        return next((part for part in ancestors(key) if part not in self._sections), key)

    def _nearest(self, key: str) -> str:
        """`"; did you mean …?"`: the key of the same section whose name is spelled most alike, else of another one."""
        parent, _, name = self._unknown_part(key).rpartition(".")

        def likeness(known: str) -> tuple[bool, float]:
            known_parent, _, known_name = known.rpartition(".")
            ratio, is_near = SequenceMatcher(None, name, known_name).ratio(), known_parent == parent
            return (is_near, ratio) if ratio >= (0.75 if is_near else 0.85) else (False, 0.0)

        best = max(sorted([*self, *self._sections]), key=likeness)
        return f"; did you mean {best}?" if likeness(best)[1] else "; `etude config` lists the keys"
