"""Reads what a user set for another framework: other names, keys without an effect, and keys that must change.

Invariant: every fault of the user's keys is found at once and has its line; nothing is left out in
silence. What the keys are called and why is the business of `other_frameworks`; types and ranges are checked later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import OmegaConf

from etude.config.keys import KeyTable
from etude.config.layers import Layer, flatten, plain
from etude.config.other_frameworks import ALIASES, IN_PROCESS_VLLM, INERT, REFUSED_VALUES, REPLACED

_Rule = str | tuple[str, tuple[object, ...]]
"""Why a key has no effect; or what to do about it, and the values with which that need not be done."""
_RULES: dict[str, _Rule] = {**REPLACED, **INERT}

_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass
class Translation:
    """The user's layers in keys of ours. `inert`: key → why it has no effect; `faults`: a line each."""

    layers: list[Layer] = field(default_factory=list)
    inert: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def inert_line(self) -> str:
        """`inert` as one line, the keys gathered by reason."""
        reasons: dict[str, list[str]] = {}
        for key, why in self.inert.items():
            reasons.setdefault(why, []).append(key)
        return "no effect here: " + "; ".join(f"{', '.join(keys)} ({why})" for why, keys in reasons.items())


def translate(layers: Sequence[Layer], table: KeyTable, base: Sequence[Layer]) -> Translation:
    """`layers`, the user's own, with the keys of other frameworks renamed or left out; `base` lies under them. Keys that do
    not exist or must change are left out, too, and have a line with what to do in `faults`."""
    found = Translation()
    settings = {key: value for layer in (*base, *layers) for key, value in flatten(plain(layer))}
    local_vllm = settings.get(f"{_ROLLOUT}.name") == "vllm" and not settings.get(f"{_ROLLOUT}.server_urls")
    for layer in layers:
        translated = layer if layer.is_package else _translate_layer(layer, table, found, local_vllm)
        unknown = table.faults(translated)
        found.faults += dict.fromkeys(unknown.values())  # a section's keys share a line
        found.layers.append(_without(translated, unknown))
    return found


def _without(layer: Layer, keys: Collection[str]) -> Layer:
    if not keys:
        return layer
    values = plain(layer)
    for key in keys:
        _remove(values, key)
    return replace(layer, values=OmegaConf.create(values))


def _translate_layer(layer: Layer, table: KeyTable, found: Translation, local_vllm: bool) -> Layer:
    """`layer` without the keys that are not ours; what became of them goes to `found`."""
    values = plain(layer)
    given = dict(flatten(values))
    for key, value in given.items():
        refusal = REFUSED_VALUES.get(key, {}).get(value) if isinstance(value, str | int) else None
        if refusal:
            found.faults.append(f"{key}={value} cannot be taken here ({layer.source}): {refusal}")
            _remove(values, key)
        if table.knows(key):
            continue
        ours, rule = _our_name(key), _rule(key)
        advice = _what_to_do(key, value, rule, local_vllm)
        if ours and value is not None and given.get(ours) not in (None, value):
            found.faults.append(f"{key} and {ours} mean the same but are set to different values ({layer.source})")
        elif ours and value is not None:
            _set(values, ours, value)
        elif advice:
            found.faults.append(f"{key} does not exist here ({layer.source}): {advice}")
        elif ours or rule:
            found.inert[key] = rule if isinstance(rule, str) else "so it is here anyway"
        else:
            continue
        _remove(values, key)
    return replace(layer, values=OmegaConf.create(values)) if dict(flatten(values)) != given else layer


def _what_to_do(key: str, value: Any, rule: _Rule | None, local_vllm: bool) -> str | None:
    """What to write instead of a key that is not ours; None where nothing need be done, or nothing is known."""
    name = key.removeprefix(f"{_ROLLOUT}.")
    if local_vllm and name in IN_PROCESS_VLLM:
        argument, preset = IN_PROCESS_VLLM[name]
        return None if value == preset else f"write {_ROLLOUT}.engine_kwargs.vllm.{argument}={value}"
    if rule is None or isinstance(rule, str):
        return None
    advice, harmless = rule
    is_filled_in = isinstance(value, str) and value.startswith("${") and bool(harmless)  # a default, copied from a file
    return None if is_filled_in or value in harmless else advice


def _our_name(key: str) -> str | None:
    """What a key is called here, if it or a section that it lies in has another name."""
    for theirs, ours in ALIASES.items():
        if key == theirs or key.startswith(f"{theirs}."):
            return ours + key.removeprefix(theirs)
    return None


def _rule(key: str) -> _Rule | None:
    """What the tables say of `key`, or of the innermost section that it lies in."""
    names = key.split(".")
    for part in (".".join(names[:depth]) for depth in range(len(names), 0, -1)):
        for pattern, rule in _RULES.items():
            if fnmatchcase(part, pattern):
                return rule
    return None


def _remove(values: dict[str, Any], key: str) -> None:
    """Takes `key` out, and the sections that are empty without it."""
    first, _, rest = key.partition(".")
    if rest and isinstance(values.get(first), dict):
        _remove(values[first], rest)
    if not rest or not values.get(first):
        values.pop(first, None)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value
