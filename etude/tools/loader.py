"""`load_tools`: loads tools from configuration files. An entry of a file is one of

- a mapping, as verl's files have, with the keys
    class_name    package.module.Class, or path/to/file.py:Class: a `BaseTool`, a Qwen-Agent-shaped class, or a function
                  decorated with `@function_tool`. Optional unless `config.type` is `native`.
    config        `type` (native, mcp, http, sandbox_fusion) and the tool's own options
    tool_schema   an OpenAI function schema; null for the tool's default
    mcp           for type mcp: `mcp_servers_config_path` or `mcpServers`, and the selection of their tools
- `{'mcpServers': …}`, whose tools are named `server-tool`, as in RL-Factory and Qwen-Agent
- a name, or a mapping with the key `name`, as in RL-Factory's `.pydata` files.

Invariant: an invalid file raises one `ConfigError` that names file and entry, before any model is loaded; a schema
reaches the tool as written. `${…}` is substituted from the environment everywhere except in schemas. Parsing the file
formats is left to `config_file`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, one_line, raise_faults
from etude.registry import did_you_mean, import_object
from etude.tools.base import BaseTool
from etude.tools.builtin import builtin_config, builtin_names
from etude.tools.config_file import fill_environment, import_class, read_config_file, read_data_file, resolve_path
from etude.tools.execution import ToolRuntime
from etude.tools.function_tool import FUNCTION_TOOLS, FunctionTool, load_function_tools, read_schema
from etude.tools.mcp import MCPBaseTool, anchor_servers, discover_tools
from etude.tools.qwen import TOOL_REGISTRY, QwenTool, is_qwen_shaped, registered_tool_class

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
_NOT_HERE = (
    "modules of verl.tools are not used; derive your class from etude.tools.BaseTool "
    "and name it as 'path/to/file.py:Class' (tools that come along are in etude.tools.builtin)"
)


def load_tools(path: str | Path | Sequence[str | Path]) -> list[BaseTool]:
    """Loads the tools of one or more configuration files (YAML, JSON, `.pydata`, or Python with `@function_tool`), in order.

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
    """Yields (tool, place in the file) for each tool of `file`."""
    if file.suffix == ".py":
        yield from ((tool, str(file)) for tool in load_function_tools(file))
        return
    entries, servers = read_config_file(file)
    faults: list[ConfigError] = []
    for place, entry in entries:
        where = f"{file}: {place}"
        try:
            tools = load_entry(entry, file, where)
        except ConfigError as error:  # the other entries may have more
            faults.append(error)
        else:
            yield from ((tool, where) for tool in tools)
    raise_faults(faults)
    if servers is not None:
        yield from ((tool, str(file)) for tool in load_entry({"mcpServers": servers}, file, str(file)))


def load_entry(entry: object, file: Path, where: str) -> list[BaseTool]:
    """Loads the tool that `entry` of `file` describes or names; several tools if it names MCP servers.

    Raises:
        ConfigError: the entry is invalid; begins with `where`.
    """
    if isinstance(entry, str):
        return _load_registered(entry, {}, where)
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a mapping with the key 'class_name' (a text), or the name of a tool")
    if "mcpServers" in entry:
        options = fill_environment(dict(entry), "", where)
        servers = anchor_servers(options.pop("mcpServers"), file.parent)
        config = _config({"config": options.pop("config", None)}, where)
        return _mcp_tools(servers, {"prefix": True, **options}, MCPBaseTool, config, file, where)
    if "name" in entry and "class_name" not in entry:
        return _load_registered(entry["name"], entry, where)
    return _load_described(entry, file, where)


def _load_described(entry: Mapping[str, Any], file: Path, where: str) -> list[BaseTool]:
    named = entry.get("class_name")
    where = f"{where} ({named})" if isinstance(named, str) else where
    if named is None and "function" in entry:
        line = f"{where}: a tool's schema alone, without the code that answers its calls"
        form = "write {class_name: file.py:Class, tool_schema: {…}}, the class a BaseTool"
        raise ConfigError(line, fix=f"{form}, or name a .py file whose function has @function_tool")
    for key in entry:
        if key not in ENTRY_KEYS:
            raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(str(key), ENTRY_KEYS)}")
    config = _config(entry, where)
    kind = config.get("type", "native")
    tool_class = _tool_class(named, kind, file, where)
    if kind == "mcp":
        return _load_mcp_entry(entry, tool_class, config, file, where)
    if "mcp" in entry:
        raise ConfigError(f"{where}: the key 'mcp' belongs to an entry with config.type 'mcp'")
    schema = None if entry.get("tool_schema") is None else read_schema(entry["tool_schema"], where)
    if isinstance(tool_class, FunctionTool):
        return [_construct(lambda: tool_class.configured(config, schema), where)]
    if is_qwen_shaped(tool_class):
        return [_construct(lambda: QwenTool(tool_class, config, schema), where)]
    return [_construct(lambda: tool_class(config, schema), where)]


def _construct(make: Callable[[], BaseTool], where: str) -> BaseTool:
    """Calls `make` and validates the tool that it returns: its name matches its schema, and its call policy is valid.

    Raises:
        ConfigError: the tool is invalid, or `make` raised any exception.
    """
    try:
        tool = make()
        named = tool.get_openai_tool_schema().function.name
        ToolRuntime.of(tool)  # validates its policy and schema
    except Exception as error:  # a user's constructor may raise anything
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
    made: dict[str, Any] = fill_environment(dict(raw or {}), "config", where)
    return made


def _tool_class(named: object, kind: str, file: Path, where: str) -> Any:
    """Imports the class of an entry, or the `FunctionTool` that it names."""
    if named is None and kind in _DEFAULT_CLASSES:
        return import_object(_DEFAULT_CLASSES[kind])
    if not isinstance(named, str):
        raise ConfigError(f"{where}: expected a mapping with the key 'class_name' (a text)")
    found = import_class(fill_environment(named, "class_name", where), file, where, _MOVED, _NOT_HERE)
    is_tool = isinstance(found, FunctionTool) or (isinstance(found, type) and issubclass(found, BaseTool))
    if not is_tool and not is_qwen_shaped(found):
        raise ConfigError(
            f"{where}: this is no subclass of etude.tools.BaseTool, no function decorated with @function_tool, and has no "
            "method 'call' as Qwen-Agent's tools have"
        )
    return found


def _load_mcp_entry(
    entry: Mapping[str, Any], tool_class: Any, config: dict[str, Any], file: Path, where: str
) -> list[BaseTool]:
    """Loads the tools of the MCP servers that the key `mcp` lists, or that are listed in the file that it names."""
    if entry.get("tool_schema") is not None:
        raise ConfigError(f"{where}: the schemas of MCP tools come from their server; remove tool_schema")
    if not isinstance(tool_class, type) or not issubclass(tool_class, MCPBaseTool):
        raise ConfigError(f"{where}: a class for config.type 'mcp' derives from etude.tools.MCPBaseTool")
    raw = entry.get("mcp")
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: config.type 'mcp' needs the key 'mcp' with mcp_servers_config_path or mcpServers")
    options = fill_environment(dict(raw), "mcp", where)
    path, servers = options.pop("mcp_servers_config_path", None), options.pop("mcpServers", None)
    where, folder = f"{where}: mcp", file.parent
    if (path is None) == (servers is None):
        raise ConfigError(f"{where} needs either mcp_servers_config_path or mcpServers")
    if path is not None:
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{where}: mcp_servers_config_path must be a path, not {path!r}")
        found = resolve_path(folder, path)
        try:
            content = read_data_file(found)
        except ConfigError as error:
            raise ConfigError(f"{where}: {one_line(error)}") from error
        where, folder = f"{where}: {found}", found.parent
        if not isinstance(content, Mapping) or "mcpServers" not in content:
            raise ConfigError(f"{where}: expected the key 'mcpServers'")
        servers = fill_environment(content["mcpServers"], "mcpServers", where)
    return _mcp_tools(anchor_servers(servers, folder), options, tool_class, config, file, where)


def _mcp_tools(
    servers: object,
    options: Mapping[str, Any],
    tool_class: type[MCPBaseTool],
    config: dict[str, Any],
    file: Path,
    where: str,
) -> list[BaseTool]:
    tools: list[BaseTool] = []
    for server, remote_name, schema in discover_tools(servers, options, where, file.parent):
        tool = _construct(lambda schema=schema: tool_class(dict(config), schema), where)  # type: ignore[misc]
        assert isinstance(tool, MCPBaseTool)
        tool.attach(server, remote_name)
        tools.append(tool)
    return tools


def _load_registered(name: object, config: Mapping[str, Any], where: str) -> list[BaseTool]:
    """Constructs the tool or tools registered as `name` with `config`. Looks the name up, in this order, among classes
    registered with `@register_tool`, functions decorated with `@function_tool`, the built-in tools (`calculator`, …), and
    the tools of an installed Qwen-Agent."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: 'name' must be the name of a tool, not {name!r}")
    where = f"{where} ({name})"
    made: dict[str, Any] = fill_environment(dict(config), "config", where)
    own = {key: value for key, value in made.items() if key != "name"}
    if name not in TOOL_REGISTRY and name in FUNCTION_TOOLS:
        return [_construct(lambda: FUNCTION_TOOLS.get(name).configured(own), where)]
    if name not in TOOL_REGISTRY and name in builtin_names():
        path = builtin_config(name)
        entries = [{**e, "config": {**(e.get("config") or {}), **own}} for _, e in read_config_file(path)[0]]
        return [tool for entry in entries for tool in load_entry(entry, path, where)]
    try:
        tool_class = registered_tool_class(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error
    if tool_class is None:
        known = sorted({*TOOL_REGISTRY.names(), *FUNCTION_TOOLS.names(), *builtin_names()})
        hint = did_you_mean(name, known)
        raise ConfigError(
            f"{where}: no tool is registered as '{name}'{hint} (known: {', '.join(known)}; "
            "a tool of Qwen-Agent needs the package qwen-agent)"
        )
    return [_construct(lambda: QwenTool(tool_class, made, name=name), where)]
