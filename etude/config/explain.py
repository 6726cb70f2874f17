"""Describes a key: its declaration, and its value in a composition."""

from __future__ import annotations

from collections.abc import Iterator

from etude.config.checks import inert_reason, shown_value
from etude.config.compose import Composition
from etude.errors import ConfigError
from etude.options import declarations
from etude.options.types import allowed
from etude.options.validate import yaml_text
from etude.registry import did_you_mean


def explain(composition: Composition, name: str) -> Iterator[str]:
    """Lines on the key `name`, or on each key of the section `name`; a unique suffix suffices.

    Raises:
        ConfigError: no key matches, or several do.
    """
    for number, key in enumerate(_keys(composition, name)):
        if number:
            yield ""
        yield from _explain_key(composition, key)


def _keys(composition: Composition, name: str) -> list[str]:
    declared = declarations(type(composition.options))
    found = [key for key in declared if key == name or key.startswith(f"{name}.")]
    if found:
        return found
    found = [key for key in declared if key.endswith(f".{name}")]
    if len(found) > 1:
        raise ConfigError(f"several keys end in {name}: {', '.join(found)}")
    if not found:
        sections = {key.rpartition(".")[0] for key in declared} - {""}
        raise ConfigError(f"unknown key {name}{did_you_mean(name, [*declared, *sections])}")
    return found


def _explain_key(composition: Composition, key: str) -> Iterator[str]:
    options = composition.options
    declared = declarations(type(options))[key]
    about, missing = declared.about, inert_reason(options, key)
    yield f"{key}={shown_value(options, key)}"
    yield f"  {about.meaning}"
    yield f"  takes       {allowed(declared.hint)}{f', in {about.unit}' if about.unit else ''}"
    yield f"  default     {about.written or yaml_text(declared.default)}"
    yield f"  set by      {composition.sources.get(key, 'its default')}"
    if about.verl_default or about.verl_meaning:
        default = f"default {about.verl_default}" if about.verl_default else ""
        yield f"  in verl     {'; '.join(filter(None, (default, about.verl_meaning)))}"
    if about.alias_of:
        yield f"  other name  {about.alias_of}"
    if missing:
        yield f"  no effect   here: it applies {missing}"
    elif declared.when:
        yield f"  applies     {declared.when[-1][1].condition}, as here"
