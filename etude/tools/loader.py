"""`load_tools`: the documents' YAML as tools.

Invariant: whatever is wrong with a file is one `ConfigError` that names file and entry, raised before any model is
loaded; a schema reaches the tool as it was written. `${VAR}`, `${oc.env:VAR}` and `${oc.env:VAR,default}` are filled in
from the environment in `class_name` and `config`, never in a schema.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from etude.errors import ConfigError, one_line
from etude.registry import did_you_mean, import_object
from etude.schemas import OpenAIFunctionToolSchema
from etude.tools.base import BaseTool
from etude.tools.function_tool import read_schema
from etude.tools.policy import CallPolicy

_MAX_FILE_BYTES = 10_000_000
_ENTRY_KEYS = ("class_name", "config", "tool_schema")
_LATER_TYPES = {"mcp": "an MCP client", "sandbox_fusion": "a Sandbox Fusion client"}
_MOVED = {"Gsm8kTool": "etude.tools.builtin.gsm8k.Gsm8kTool", "BaseTool": "etude.tools.BaseTool"}
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_VARIABLE = re.compile(r"(?:oc\.env:)?\s*([A-Za-z_][A-Za-z0-9_]*)\s*")
_VARIABLE_WITH_DEFAULT = re.compile(r"oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*,(.*)", re.DOTALL)


def load_tools(path: str | Path | Sequence[str | Path]) -> list[BaseTool]:
    """The tools of one or several YAML files, in order.

    Raises:
        ConfigError: a file or one of its entries is wrong; names the file and the entry.
    """
    tools: dict[str, BaseTool] = {}
    for file in [Path(path)] if isinstance(path, str | Path) else [Path(each) for each in path]:
        for number, entry in enumerate(_read_entries(file)):
            where = f"{file}: tools[{number}]"
            tool = _load_entry(entry, file, where)
            if tool.name in tools:
                raise ConfigError(f"{where} ({_class_of(tool)}): there already is a tool named '{tool.name}'")
            tools[tool.name] = tool
    return list(tools.values())


initialize_tools_from_config = load_tools


def _read_entries(file: Path) -> list[Any]:
    if not file.is_file():
        raise ConfigError(f"tool configuration not found: {file}")
    if file.stat().st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"{file}: larger than {_MAX_FILE_BYTES} bytes, which no tool configuration is")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ConfigError(f"{file}: not readable as YAML: {one_line(error)}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{file}: expected a list of tools under the key 'tools'")
    return entries


def _load_entry(entry: object, file: Path, where: str) -> BaseTool:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{where}: expected a mapping with the key 'class_name' (a text)")
    where = f"{where} ({entry['class_name']})"
    for key in entry:
        if key not in (*_ENTRY_KEYS, "mcp"):
            raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(str(key), _ENTRY_KEYS)}")
    config = _config(entry, where)
    schema = None if entry.get("tool_schema") is None else read_schema(entry["tool_schema"], where)
    return _construct(
        _tool_class(_filled(entry["class_name"], "class_name", where), file, where), config, schema, where
    )


def _config(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    raw = entry.get("config")
    if raw is not None and not isinstance(raw, dict):
        raise ConfigError(f"{where}: config must be a mapping, not {type(raw).__name__}")
    kind = (raw or {}).get("type", "native")
    if kind in _LATER_TYPES:
        raise ConfigError(f"{where}: config.type '{kind}' needs {_LATER_TYPES[kind]}, not available in this version")
    if kind != "native":
        hint = did_you_mean(str(kind), ["native", *_LATER_TYPES])
        raise ConfigError(f"{where}: unknown config.type '{kind}'{hint} (known: native, {', '.join(_LATER_TYPES)})")
    if "mcp" in entry:
        raise ConfigError(f"{where}: the key 'mcp' needs {_LATER_TYPES['mcp']}, not available in this version")
    return _filled(raw or {}, "config", where)


def _tool_class(name: str, file: Path, where: str) -> type[BaseTool]:
    if name.startswith("verl."):
        raise ConfigError(f"{where}: {_moved(name)}")
    if ":" in name:
        path, _, attribute = name.rpartition(":")
        near = file.parent / Path(path).expanduser()
        name = f"{near if near.is_file() else path}:{attribute}"
    try:
        found = import_object(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error
    if not isinstance(found, type) or not issubclass(found, BaseTool):
        raise ConfigError(f"{where}: this is no subclass of etude.tools.BaseTool")
    return found


def _moved(name: str) -> str:
    new = _MOVED.get(name.rpartition(".")[2])
    if new is not None:
        return f"here this class is {new}"
    return (
        "modules of verl.tools are not used; derive your class from etude.tools.BaseTool "
        "and name it as 'path/to/file.py:Class' (tools that come along are in etude.tools.builtin)"
    )


def _construct(
    tool_class: type[BaseTool], config: dict[str, Any], schema: OpenAIFunctionToolSchema | None, where: str
) -> BaseTool:
    try:
        tool = tool_class(config, schema)
        named = tool.get_openai_tool_schema().function.name
        CallPolicy.from_config(config, tool.name)
    except Exception as error:  # whatever a user's constructor raises is theirs to read
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{where}: {kind}{one_line(error)}") from error
    if named != tool.name:
        raise ConfigError(f"{where}: the class names itself '{tool.name}', but its schema says '{named}'")
    return tool


def _filled(value: Any, place: str, where: str) -> Any:
    """`value` with every `${…}` in its strings replaced; `place` is its path for errors."""
    if isinstance(value, dict):
        return {key: _filled(item, f"{place}.{key}", where) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, f"{place}[{i}]", where) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return _REFERENCE.sub(lambda match: _variable(match[1], place, where), value)


def _variable(reference: str, place: str, where: str) -> str:
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


def _class_of(tool: BaseTool) -> str:
    return f"{type(tool).__module__}.{type(tool).__qualname__}"
