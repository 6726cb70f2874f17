"""`load_tools`: loads tools from configuration files.

Invariant: an invalid file raises one `ConfigError` that names file and entry, before any model is loaded; a schema
reaches the tool as written. `${…}` is filled in from the environment (see `environment`) everywhere except in
schemas.

The file formats are left to `config_file`, one entry of the documents' YAML to `entry`, and RL-Factory's literals to
`registered`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import ConfigError
from etude.tools.base import BaseTool
from etude.tools.config_file import read_config_file
from etude.tools.entry import load_entry, load_servers
from etude.tools.function_tool import load_function_tools
from etude.tools.registered import registered_tools


def load_tools(path: str | Path | Sequence[str | Path]) -> list[BaseTool]:
    """The tools of one or several configuration files (YAML, JSON, `.pydata`, or Python with `@function_tool`), in order.

    Raises:
        ConfigError: a file or one of its entries is invalid; names the file and the entry.
    """
    tools: dict[str, tuple[BaseTool, str]] = {}
    for file in [Path(path)] if isinstance(path, str | Path) else [Path(each) for each in path]:
        for tool, where in _tools_of(file):
            if tool.name in tools:
                first = tools[tool.name][1]
                raise ConfigError(f"{where}: there already is a tool named '{tool.name}' (from {first})")
            tools[tool.name] = tool, where
    return [tool for tool, _ in tools.values()]


initialize_tools_from_config = load_tools


def _tools_of(file: Path) -> Iterator[tuple[BaseTool, str]]:
    """Each tool of `file`, with the place it comes from."""
    if file.suffix == ".py":
        yield from ((tool, str(file)) for tool in load_function_tools(file))
        return
    content = read_config_file(file)
    for place, entry in content.entries:
        where = f"{file}: {place}"
        yield from ((tool, where) for tool in _load(entry, file, where))
    if content.servers is not None:
        yield from ((tool, str(file)) for tool in load_servers({"mcpServers": content.servers}, file, str(file)))


def _load(entry: Any, file: Path, where: str) -> list[BaseTool]:
    if isinstance(entry, str):
        return registered_tools(entry, {}, where)
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a mapping with the key 'class_name' (a text), or the name of a tool")
    if "mcpServers" in entry:
        return load_servers(entry, file, where)
    if "name" in entry and "class_name" not in entry:
        return registered_tools(entry["name"], entry, where)
    return load_entry(entry, file, where)
