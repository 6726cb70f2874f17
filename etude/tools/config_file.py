"""`read_config_file`: parses a tool configuration file in any of its formats; `fill_environment` substitutes environment
variables, and `import_class` imports the class that an entry names.

    *.yaml, *.yml   `tools: [entry, …]` and `mcpServers: {name: server, …}`, either or both
    *.json          the same; a file written for Claude Desktop or verl's `mcp_servers_config_path`
    *.pydata        RL-Factory: a Python literal, a list of names, entries and `{'mcpServers': …}`
    *.py            functions decorated with `@function_tool`

Invariant: reading executes nothing: a `.pydata` file is parsed as literals, YAML without tags. An invalid file raises a
one-line error that names it. `${VAR}`, `${oc.env:VAR}` and `${oc.env:VAR,default}` are substituted once, not recursively;
anything else in `${…}` is an error, and so is a variable that is not set and has no default. Substituted values are never
logged.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from etude.errors import ConfigError, one_line
from etude.jsonl import decode_strictly
from etude.registry import did_you_mean, import_beside, missing_file

MAX_FILE_BYTES = 10_000_000
_SUFFIXES = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".pydata": "a Python literal"}
_TOP_KEYS = ("tools", "mcpServers")
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_VARIABLE = re.compile(r"(?:oc\.env:)?\s*([A-Za-z_][A-Za-z0-9_]*)\s*")
_VARIABLE_WITH_DEFAULT = re.compile(r"oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*,(.*)", re.DOTALL)


def read_config_file(path: Path) -> tuple[list[tuple[str, Any]], Mapping[str, Any] | None]:
    """Reads a tool configuration file: its entries, each with its place in the file, and the value of a top-level
    `mcpServers`.

    Raises:
        ConfigError: the file is missing, unreadable, too large, or not a tool configuration.
    """
    content = read_data_file(path)
    place = "tools" if isinstance(content, Mapping) else ""
    content = content if isinstance(content, Mapping) else {"tools": content}
    entries, servers = content.get("tools"), content.get("mcpServers")
    unknown = [key for key in content if key not in _TOP_KEYS]
    if unknown and (entries is not None or servers is not None):
        raise ConfigError(f"{path}: unknown key '{unknown[0]}'{did_you_mean(str(unknown[0]), _TOP_KEYS)}")
    if servers is not None and not isinstance(servers, Mapping):
        raise ConfigError(f"{path}: mcpServers must be a mapping of names to servers")
    if entries is None and servers is not None:
        entries = []
    if not isinstance(entries, list) or (not entries and servers is None):
        raise ConfigError(f"{path}: expected a list of tools under the key 'tools', or servers under 'mcpServers'")
    return [(f"{place}[{number}]", entry) for number, entry in enumerate(entries)], servers


def resolve_path(folder: Path, path: str) -> Path:
    """Resolves `path` relative to `folder` or, if no such file exists, to the working directory."""
    near = folder / Path(path).expanduser()
    return near if near.is_file() else Path(path).expanduser()


def read_data_file(path: Path) -> Any:
    """Parses a YAML, JSON or `.pydata` file.

    Raises:
        ConfigError: the file is missing, unreadable or too large; names it and the expected format.
    """
    if not path.is_file():
        raise ConfigError(f"tool configuration: {missing_file(path)}")
    form = _SUFFIXES.get(path.suffix.lower(), "YAML")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes, which no tool configuration is")
        text = path.read_text(encoding="utf-8-sig")
        if form == "JSON":
            return decode_strictly(text)
        return ast.literal_eval(text.strip()) if form == "a Python literal" else yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        raise ConfigError(f"{path}: not readable as {form}: {one_line(error)}") from error


class _UniqueKeys(yaml.SafeLoader):
    """Rejects a mapping with duplicate keys, of which PyYAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
        if twice is not None:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"the key '{twice}' is given twice in the mapping that begins in line {line}")
        return super().construct_mapping(node, deep)


def fill_environment(value: Any, place: str, where: str) -> Any:
    """Returns `value` with every `${…}` in its strings substituted; errors name `where` (file and entry) and `place` (the
    path of `value` in the entry).

    Raises:
        ConfigError: a reference names no variable, or one that is not set.
    """
    if isinstance(value, dict):
        return {key: fill_environment(item, f"{place}.{key}", where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill_environment(item, f"{place}[{i}]", where) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return _REFERENCE.sub(lambda match: _substitute(match[1], place, where), value)


def _substitute(reference: str, place: str, where: str) -> str:
    with_default = _VARIABLE_WITH_DEFAULT.fullmatch(reference)
    match = with_default or _VARIABLE.fullmatch(reference)
    if match is None:
        raise ConfigError(f"{where}: {place}: '${{{reference}}}' names no environment variable")
    value = os.environ.get(match[1])
    if value is None and with_default:
        return with_default[2].strip()
    if value is None:
        raise ConfigError(f"{where}: {place}: the environment variable {match[1]} is not set")
    return value


def import_class(name: str, file: Path, where: str, moved: Mapping[str, str], not_here: str) -> Any:
    """Imports the `class_name` of an entry of `file`: `package.module.Class`, or `path/to/file.py:Class`. A class of verl is
    rejected; the error names its counterpart in `moved`, or is `not_here`.

    Raises:
        ConfigError: the class cannot be imported; begins with `where`.
    """
    if name.startswith("verl."):
        new = moved.get(name.rpartition(".")[2])
        raise ConfigError(f"{where}: {f'here this class is {new}' if new else not_here}")
    try:
        return import_beside(name, file)
    except ConfigError as error:
        raise error.at(where) from error  # the whole message: it may list every moved import
