"""`load_interactions`: loads interactions from verl's YAML format.

    interaction:
      - name: gsm8k                      # default: the class's name without "Interaction", in lower case
        class_name: etude.agents.interactions.gsm8k.Gsm8kInteraction    # or path/to/file.py:Class
        config: {}

Invariant: every mistake is one `ConfigError` that names file and entry, before any model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.agents.interactions.base import BaseInteraction
from etude.agents.interactions.session import InteractionLimits
from etude.errors import ConfigError, one_line
from etude.registry import did_you_mean
from etude.tools.config_file import fill_environment, import_class, read_data_file

_KEYS = ("name", "class_name", "config")
_MOVED = {
    "Gsm8kInteraction": "etude.agents.interactions.gsm8k.Gsm8kInteraction",
    "BaseInteraction": "etude.agents.interactions.BaseInteraction",
}
_NOT_HERE = (
    "modules of verl.interactions are not used; derive your class from etude.agents.interactions.BaseInteraction "
    "and name it as 'path/to/file.py:Class'"
)


def load_interactions(path: str | Path) -> dict[str, BaseInteraction]:
    """Loads the interactions of a file; returns them by name, in file order.

    Raises:
        ConfigError: the file is missing or malformed, a class is missing, or a name is taken; names file and entry.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"interaction configuration not found: {path}")
    content = read_data_file(path)
    entries = content.get("interaction") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a list of interactions under the key 'interaction'")
    made: dict[str, BaseInteraction] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: interaction[{number}]"
        interaction = _interaction(entry, path, where)
        if interaction.name in made:
            raise ConfigError(f"{where}: the name '{interaction.name}' is taken by an earlier entry")
        made[interaction.name] = interaction
    return made


def _interaction(entry: object, file: Path, where: str) -> BaseInteraction:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{where}: expected a mapping with the key 'class_name' (a text)")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(str(key), _KEYS)}")
    found = _class(entry["class_name"], file, where)
    config: Any = fill_environment(dict(entry.get("config") or {}), "config", where)
    name = entry.get("name") or _name_of(found)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name must be a text, not {name!r}")
    try:
        InteractionLimits.from_config(config, name)
        made = found({**config, "name": name})
        made.name = name
    except Exception as error:  # a user's constructor may raise anything
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{where} ({entry['class_name']}): {kind}{one_line(error)}") from error
    return made


def _class(name: str, file: Path, where: str) -> type[BaseInteraction]:
    found = import_class(name, file, where, _MOVED, _NOT_HERE)
    if not (isinstance(found, type) and issubclass(found, BaseInteraction)):
        raise ConfigError(f"{where}: '{name}' is no subclass of etude.agents.interactions.BaseInteraction")
    return found


def _name_of(found: type) -> str:
    return re.sub("Interaction$", "", found.__name__).lower() or found.__name__.lower()
