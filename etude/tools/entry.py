"""`load_entry`: loads the tools of one entry of a tool configuration.

    class_name      package.module.Class, or path/to/file.py:Class: a `BaseTool`, a Qwen-Agent-shaped class, or a function
                    decorated with `@function_tool`. Optional unless `config.type` is `native`.
    config          `type` (native, mcp, http, sandbox_fusion) and the tool's own options
    tool_schema     an OpenAI function schema; null for the tool's own
    mcp             of type mcp: `mcp_servers_config_path` or `mcpServers`, and which of their tools

Invariant: an invalid entry raises one `ConfigError` that begins with its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, one_line
from etude.registry import did_you_mean, import_beside, import_object
from etude.schemas import OpenAIFunctionToolSchema
from etude.tools.base import BaseTool
from etude.tools.config_file import beside, read_data_file
from etude.tools.environment import filled
from etude.tools.function_tool import FunctionTool, read_schema
from etude.tools.mcp import MCPBaseTool, McpSelection, anchor_servers, discover_tools
from etude.tools.qwen import QwenTool, is_qwen_shaped
from etude.tools.runtime import ToolRuntime

ENTRY_KEYS = ("class_name", "config", "tool_schema", "mcp")
TYPES = ("native", "mcp", "http", "sandbox_fusion")
_DEFAULT_CLASSES = {
    "mcp": "etude.tools.mcp.MCPBaseTool",
    "http": "etude.tools.http_tool.HttpTool",
    "sandbox_fusion": "etude.tools.builtin.code_interpreter.SandboxFusionTool",
}
_MOVED = {
    "BaseTool": "etude.tools.BaseTool",
    "Gsm8kTool": "etude.tools.builtin.gsm8k.Gsm8kTool",
    "Geo3kTool": "etude.tools.builtin.geo3k.Geo3kTool",
    "SearchTool": (
        "etude.tools.builtin.search.SearchTool (the tool 'search') "
        "or etude.tools.builtin.web_search.WebSearchTool (the tool 'web_search')"
    ),
    "ImageZoomInTool": "etude.tools.builtin.image_zoom.ImageZoomInTool",
    "SandboxFusionTool": "etude.tools.builtin.code_interpreter.SandboxFusionTool",
    "MCPBaseTool": "etude.tools.MCPBaseTool",
    "MCPSearchTool": "etude.tools.MCPBaseTool",
}
"""verl's classes and their counterparts here: the import table of docs/migrating.md."""


def load_entry(entry: Mapping[str, Any], file: Path, where: str) -> list[BaseTool]:
    """The tool that `entry` of `file` describes; several if it names an MCP server.

    Raises:
        ConfigError: it is invalid; begins with `where`.
    """
    named = entry.get("class_name")
    where = f"{where} ({named})" if isinstance(named, str) else where
    for key in entry:
        if key not in ENTRY_KEYS:
            raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(str(key), ENTRY_KEYS)}")
    config = _config(entry, where)
    kind = config.get("type", "native")
    tool_class = _tool_class(named, kind, file, where)
    if kind == "mcp":
        return _mcp_tools(entry, tool_class, config, file, where)
    if "mcp" in entry:
        raise ConfigError(f"{where}: the key 'mcp' belongs to an entry with config.type 'mcp'")
    schema = None if entry.get("tool_schema") is None else read_schema(entry["tool_schema"], where)
    return [_construct(tool_class, config, schema, where)]


def load_servers(item: Mapping[str, Any], file: Path, where: str) -> list[BaseTool]:
    """The tools of an item `{'mcpServers': …}`, each named `server-tool` as RL-Factory and Qwen-Agent name them.

    Beside `mcpServers` the item of `file` may have `tool_selected_list`, `num_instances`, `prefix`, `tool_schemas_path`
    and `config` (for each tool).

    Raises:
        ConfigError: a server's entry is invalid or the server does not answer; begins with `where`.
    """
    item = filled(dict(item), "", where)
    options = {key: value for key, value in item.items() if key not in ("mcpServers", "config")}
    config = _config({"config": item.get("config")}, where)
    servers = anchor_servers(item["mcpServers"], file.parent)
    return _discovered(servers, options, MCPBaseTool, config, file, where, prefix=True)


def checked(make: Callable[[], BaseTool], where: str) -> BaseTool:
    """The tool that `make` returns, checked: its name matches its schema, and its policy is valid.

    Raises:
        ConfigError: it is not valid, or `make` raised anything.
    """
    try:
        tool = make()
        named = tool.get_openai_tool_schema().function.name
        ToolRuntime.of(tool)  # validates its policy and schema
    except Exception as error:  # report whatever a user's constructor raises
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{where}: {kind}{one_line(error, 600)}") from error
    if named != tool.name:
        raise ConfigError(f"{where}: the class names itself '{tool.name}', but its schema says '{named}'")
    return tool


def _config(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    raw = entry.get("config")
    if raw is not None and not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: config must be a mapping, not {type(raw).__name__}")
    kind = (raw or {}).get("type", "native")
    if kind not in TYPES:
        hint = did_you_mean(str(kind), TYPES)
        raise ConfigError(f"{where}: unknown config.type '{kind}'{hint} (known: {', '.join(TYPES)})")
    made: dict[str, Any] = filled(dict(raw or {}), "config", where)
    return made


def _tool_class(named: object, kind: str, file: Path, where: str) -> Any:
    """A class, or a `FunctionTool`."""
    if named is None and kind in _DEFAULT_CLASSES:
        return import_object(_DEFAULT_CLASSES[kind])
    if not isinstance(named, str):
        raise ConfigError(f"{where}: expected a mapping with the key 'class_name' (a text)")
    name = filled(named, "class_name", where)
    if name.startswith("verl."):
        raise ConfigError(f"{where}: {_moved(name)}")
    try:
        found = import_beside(name, file)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    is_tool = isinstance(found, FunctionTool) or (isinstance(found, type) and issubclass(found, BaseTool))
    if not is_tool and not is_qwen_shaped(found):
        raise ConfigError(
            f"{where}: this is no subclass of etude.tools.BaseTool, no function decorated with @function_tool, and has no "
            "method 'call' as Qwen-Agent's tools have"
        )
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
    tool_class: Any, config: dict[str, Any], schema: OpenAIFunctionToolSchema | None, where: str
) -> BaseTool:
    if isinstance(tool_class, FunctionTool):
        return checked(lambda: tool_class.configured(config, schema), where)
    if is_qwen_shaped(tool_class):
        return checked(lambda: QwenTool(tool_class, config, schema), where)
    return checked(lambda: tool_class(config, schema), where)


def _mcp_tools(
    entry: Mapping[str, Any], tool_class: Any, config: dict[str, Any], file: Path, where: str
) -> list[BaseTool]:
    if entry.get("tool_schema") is not None:
        raise ConfigError(f"{where}: the schemas of MCP tools come from their server; remove tool_schema")
    if not isinstance(tool_class, type) or not issubclass(tool_class, MCPBaseTool):
        raise ConfigError(f"{where}: a class for config.type 'mcp' derives from etude.tools.MCPBaseTool")
    raw = entry.get("mcp")
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: config.type 'mcp' needs the key 'mcp' with mcp_servers_config_path or mcpServers")
    options = filled(dict(raw), "mcp", where)
    path, servers = options.pop("mcp_servers_config_path", None), options.pop("mcpServers", None)
    if (path is None) == (servers is None):
        raise ConfigError(f"{where}: mcp needs either mcp_servers_config_path or mcpServers")
    where, servers = f"{where}: mcp", anchor_servers(servers, file.parent)
    if path is not None:
        servers, where = _servers_of(path, file, where)
    return _discovered(servers, options, tool_class, config, file, where, prefix=False)


def _servers_of(path: object, file: Path, where: str) -> tuple[object, str]:
    """(the `mcpServers` of the file `path`, environment and paths filled in; its place for errors)."""
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{where}: mcp_servers_config_path must be a path, not {path!r}")
    found = beside(file.parent, path)
    try:
        content = read_data_file(found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error
    if not isinstance(content, Mapping) or "mcpServers" not in content:
        raise ConfigError(f"{where}: {found}: expected the key 'mcpServers'")
    servers = anchor_servers(filled(content["mcpServers"], "mcpServers", str(found)), found.parent)
    return servers, f"{where}: {found}"


def _discovered(
    servers: object,
    options: Mapping[str, Any],
    tool_class: type[BaseTool],
    config: dict[str, Any],
    file: Path,
    where: str,
    *,
    prefix: bool,
) -> list[BaseTool]:
    tools: list[BaseTool] = []
    selection = McpSelection.from_config(servers, options, where, prefix=prefix, folder=file.parent)
    for found in discover_tools(selection, where):
        tool = checked(lambda found=found: tool_class(dict(config), found.schema), where)  # type: ignore[misc]
        assert isinstance(tool, MCPBaseTool)
        tool.attach(found.server, found.remote_name)
        tools.append(tool)
    return tools
