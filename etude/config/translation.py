"""Translates the user's keys: renames those of other frameworks, and finds unknown keys, keys without effect, and keys that
must change.

Invariant: all faults in the user's keys are reported together, one line each; nothing is dropped silently. The tables of
names and reasons are in `foreign_keys`; types and ranges are checked later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Any

from etude.config.foreign_keys import (
    ALIASES,
    IN_PROCESS_VLLM,
    INERT,
    READ_WITH,
    REFUSED_VALUES,
    REPLACED,
    SWITCHES,
    TRL_NAMES,
)
from etude.config.layers import Layer, ancestors
from etude.errors import ConfigError
from etude.options import declarations
from etude.options.types import format_value
from etude.options.validate import flatten

_Rule = str | tuple[str, tuple[object, ...]]
"""Either why a key has no effect, or (what to do about it, the values for which nothing needs to be done)."""
_RULES: dict[str, _Rule] = {**REPLACED, **INERT}

_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass
class Translation:
    """What translating the user's layers has found. `inert`: key → why it has no effect; `faults`: one error each."""

    inert: dict[str, str] = field(default_factory=dict)
    faults: list[ConfigError] = field(default_factory=list)

    def inert_line(self) -> str:
        """Formats `inert` as one line, keys grouped by reason."""
        reasons: dict[str, list[str]] = {}
        for key, why in self.inert.items():
            reasons.setdefault(why, []).append(key)
        return "no effect here: " + "; ".join(f"{', '.join(keys)} ({why})" for why, keys in reasons.items())


def translate(layers: Sequence[Layer], tree: type, base: Sequence[Layer]) -> Translation:
    """Renames or removes, in place, the keys of other frameworks in the user's `layers`, which lie on top of `base` with the
    keys of `tree`. Unknown keys and keys that must change are removed too; `faults` has a line for each that says what to
    do."""
    translation, table = Translation(), KeyTable(tree)
    settings = {key: value for layer in (*base, *layers) for key, value in flatten(layer.values)}
    served = settings.get(f"{_ROLLOUT}.server_urls") or settings.get(f"{_ROLLOUT}.server_command")
    local_vllm = settings.get(f"{_ROLLOUT}.name") == "vllm" and not served
    on = {section for key, value in settings.items() if value for section in (*ancestors(key), key)}
    off = {section: switch for section, switch in SWITCHES.items() if switch not in on}
    off |= {key: " and ".join(keys) for key, keys in READ_WITH.items() if on.isdisjoint(keys)}
    for layer in layers:
        if not layer.is_package:
            _translate_layer(layer, table, translation, local_vllm, off)
        unknown = table.faults(layer)
        translation.faults += {str(each): each for each in unknown.values()}.values()  # the keys of a section share one
        for key in unknown:
            _remove(layer.values, key)
    return translation


def _translate_layer(
    layer: Layer, table: KeyTable, translation: Translation, local_vllm: bool, off: Mapping[str, str]
) -> None:
    """Puts `layer` into our keys; records those that were removed in `translation`. `off`: the sections and keys that are
    not read, each with what would switch it on."""
    values = layer.values
    given = dict(flatten(values))
    for key, value in given.items():
        refusal = REFUSED_VALUES.get(key, {}).get(value) if isinstance(value, str | int) else None
        if refusal and key in off:
            translation.inert[key] = f"{off[key]} are not set"
            _remove(values, key)
        elif refusal:
            translation.faults.append(
                ConfigError(f"{key}={value} is invalid here ({layer.source})", fix=refusal, key=key)
            )
            _remove(values, key)
        if table.knows(key):
            continue
        renamed = (each for each in ALIASES if key == each or key.startswith(f"{each}."))
        theirs, rule = next(renamed, None), _rule(key)
        ours = None if theirs is None else ALIASES[theirs] + key.removeprefix(theirs)
        if ours and not table.knows(ours):  # a section has another name here, and not all of its keys
            ours = None
        if switch := next((off[section] for section in off if key.startswith(f"{section}.")), None):
            ours, rule = None, f"{switch} is off"
        advice = _what_to_do(key, value, rule, local_vllm)
        if ours and value is not None and given.get(ours) not in (None, value):
            why = f"{key} and {ours} mean the same but are set to different values ({layer.source})"
            translation.faults.append(ConfigError(why, fix=f"leave out {key}"))
        elif ours and value is not None:
            set_key(values, ours, value)
        elif advice:
            translation.faults.append(ConfigError(f"{key} does not exist here ({layer.source})", fix=advice))
        elif ours or rule:
            translation.inert[key] = rule if isinstance(rule, str) else "the same holds here"
        else:
            continue
        _remove(values, key)


def _what_to_do(key: str, value: Any, rule: _Rule | None, local_vllm: bool) -> str | None:
    """What to write instead of a key that is not ours; None if nothing needs to be done, or if the key is unknown."""
    name = key.removeprefix(f"{_ROLLOUT}.")
    if local_vllm and name in IN_PROCESS_VLLM:
        argument, preset = IN_PROCESS_VLLM[name]
        return None if value == preset else f"write {_ROLLOUT}.engine_kwargs.vllm.{argument}={value}"
    if rule is None or isinstance(rule, str):
        return None
    advice, harmless = rule
    is_filled_in = isinstance(value, str) and value.startswith("${") and bool(harmless)  # a default copied from a file
    return None if is_filled_in or value in harmless else advice


def _rule(key: str) -> _Rule | None:
    """The table entry for `key`, else for the innermost section above it."""
    names = key.split(".")
    for part in (".".join(names[:depth]) for depth in range(len(names), 0, -1)):
        for pattern, rule in _RULES.items():
            if fnmatchcase(part, pattern):
                return rule
    return None


def foreign_key(name: str) -> str:
    """What is said of a key of another framework, or the end of its name, that is none here; empty if it is not known."""
    rule = _rule(name) or _rule(f".{name}") or next((_RULES[key] for key in _RULES if key.endswith(f".{name}")), None)
    if rule is None:
        return ""
    return f"no effect   here: {rule}; leave it out" if isinstance(rule, str) else f"no key      here: {rule[0]}"


def _remove(values: dict[str, Any], key: str) -> None:
    """Removes `key`, and any section that becomes empty."""
    first, _, rest = key.partition(".")
    if rest and isinstance(values.get(first), dict):
        _remove(values[first], rest)
    if not rest or not values.get(first):
        values.pop(first, None)


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key; makes the sections that are missing."""
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value


# -- which keys exist --------------------------------------------------------------------------------------------------


class KeyTable:
    """The keys that a tree has: the declared ones, and anything in a free-form section."""

    def __init__(self, tree: type) -> None:
        declared = declarations(tree)
        self._free = {key for key, each in declared.items() if each.default == {}}
        self._values = set(declared) - self._free
        self._sections = {section for key in declared for section in ancestors(key)}

    def __iter__(self) -> Iterator[str]:
        return iter([*self._values, *self._free])

    def knows(self, key: str) -> bool:
        """Whether `key` is one of ours: a key, a section, or within a free-form section."""
        is_free = any(key == free or key.startswith(f"{free}.") for free in self._free)
        return is_free or key in self._values or key in self._sections

    def faults(self, layer: Layer) -> dict[str, ConfigError]:
        """Keys of `layer` that do not exist, or have a value where a section belongs, each with what is wrong."""
        faults = ((key, self._fault(key, value)) for key, value in flatten(layer.values))
        return {key: ConfigError(f"{fault[0]} ({layer.source})", fix=fault[1]) for key, fault in faults if fault}

    def _fault(self, key: str, value: Any) -> tuple[str, str] | None:
        """Returns (what is wrong with `key` set to `value`, the fix), if anything."""
        if key in self._sections or key in self._free:
            return (
                None
                if isinstance(value, Mapping)
                else (f"{key} must be a section of key: value, got {format_value(value)}", "")
            )
        if self.knows(key):
            return None
        leaf = next((part for part in ancestors(key) if part in self._values), None)
        if leaf:
            return f"{leaf} is one value, not a section", ""
        return f"unknown key {self._unknown_part(key)}", self._nearest(key)

    def _unknown_part(self, key: str) -> str:
        """`key` up to and including its first name that does not exist."""
        return next((part for part in ancestors(key) if part not in self._sections), key)

    def _nearest(self, key: str) -> str:
        """`did you mean …?` with the most similar key, preferably of the same section."""
        parent, _, name = self._unknown_part(key).rpartition(".")
        if name in TRL_NAMES:
            return f"TRL's {name} is {TRL_NAMES[name]} here (docs/from-trl.md)"

        def likeness(known: str) -> tuple[bool, float]:
            known_parent, _, known_name = known.rpartition(".")
            ratio, is_near = SequenceMatcher(None, name, known_name).ratio(), known_parent == parent
            words, known_words = set(name.split("_")), set(known_name.split("_"))
            if words <= known_words and ((is_near and parent) or len(words) > 1):  # total_steps: total_training_steps
                ratio = max(ratio, 0.75 + 0.25 * len(words) / len(known_words))
            return (is_near, ratio) if ratio >= (0.75 if is_near else 0.85) else (False, 0.0)

        best = max(sorted([*self, *self._sections]), key=likeness)
        shown = "etude config" if "actor_rollout_ref" in self._sections else "etude config --config-name sft"
        return f"did you mean {best}?" if likeness(best)[1] else f"`{shown}` lists the keys"
