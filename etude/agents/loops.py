"""`register_agent_loops`: the file that `rollout.agent.agent_loop_config_path` names, as registered agent loops.

    - name: my_agent
      _target_: package.module.MyAgentLoop     # or path/to/file.py:MyAgentLoop
      max_steps: 5                             # other keys are passed to the class

Invariant: every mistake is one `ConfigError` that names file and entry; reading a file twice has no further effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.agents.base import AGENT_LOOPS, AgentLoopBase
from etude.errors import ConfigError
from etude.registry import import_beside
from etude.tools.config_file import read_data_file


@dataclass(frozen=True)
class ConfiguredLoop:
    """A loop's class with its keyword arguments from the file."""

    loop_class: type[AgentLoopBase]
    keywords: Mapping[str, Any]

    def __call__(self, **given: Any) -> AgentLoopBase:
        """A loop for one trajectory."""
        return self.loop_class(**self.keywords, **given)


def register_agent_loops(path: str | Path) -> list[str]:
    """Registers the loops of a file and returns their names.

    Raises:
        ConfigError: the file is missing or malformed, a class is missing or not an agent loop, or a name is taken.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"agent loop configuration not found: {path}")
    entries = read_data_file(path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a list of entries with 'name' and '_target_'")
    names = []
    for number, entry in enumerate(entries):
        where = f"{path}: entry {number}"
        if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
            raise ConfigError(f"{where}: expected a mapping with 'name' and '_target_' (texts)")
        try:
            found = import_beside(entry["_target_"], path)
            if not (isinstance(found, type) and issubclass(found, AgentLoopBase)):
                raise ConfigError(f"'{entry['_target_']}' is no subclass of etude.agents.AgentLoopBase")
            keywords = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
            _register(entry["name"], ConfiguredLoop(found, keywords))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        names.append(entry["name"])
    return names


def _register(name: str, loop: ConfiguredLoop) -> None:
    if name in AGENT_LOOPS:
        held = AGENT_LOOPS.get(name)
        if held == loop or (held is loop.loop_class and not loop.keywords):  # its module registers it as well
            return
    AGENT_LOOPS.register(name)(loop)
