"""`discover_tools`: finds the tools of MCP servers, as listed by the servers or in a schema file.

Invariant: a server that does not respond raises one `ConfigError` that names file, entry and server, at the start of a run;
selected tools exist; schemas are the server's, unchanged. With schemas from a file (as `etude tools schema` prints them)
no server is contacted, so a run that replays recorded calls needs no server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.errors import ConfigError, EtudeError, InfrastructureError, one_line
from etude.options.types import Count, Flag, Text
from etude.registry import did_you_mean
from etude.schemas import OpenAIFunctionToolSchema
from etude.tools.config_file import read_data_file, resolve_path
from etude.tools.function_tool import read_schema
from etude.tools.mcp.options import McpServer
from etude.tools.mcp.reconnecting import pool_of, run_in_loop
from etude.tools.options import ToolOptions, read_section

if TYPE_CHECKING:
    from mcp_types import Tool

_LONGEST_NAME = 128


class McpSelection(ToolOptions):
    """What an entry says beside its servers.

    Attributes:
        tool_selected_list: names (the server's own, or with prefix); empty for all.
        prefix: whether a tool is named `server-tool`, so that two servers may have tools of the same name.
        num_instances: of servers that do not set it themselves.
        tool_schemas_path: a file with the schemas of the tools, under their names here; None to ask the servers.
    """

    tool_selected_list: tuple[Text, ...] = ()
    prefix: Flag = False
    num_instances: Count | None = None
    tool_schemas_path: Text | None = None


class Discovered(NamedTuple):
    """A tool of `server`, which calls it `remote_name`; `schema` has its name here."""

    server: McpServer
    remote_name: str
    schema: OpenAIFunctionToolSchema


def discover_tools(servers: object, options: Mapping[str, Any], where: str, folder: Path) -> list[Discovered]:
    """Returns the tools that `options` (a `McpSelection`) selects from `servers`, the value of an `mcpServers` key. Relative
    paths are looked up in `folder` first. All servers are contacted concurrently; the connections stay open for the calls.

    Raises:
        ConfigError: an option is invalid, or a server does not respond, lists an unusable tool, or lacks a selected one, or
            none lists any.
    """
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError(f"{where}: mcpServers must be a mapping of names to servers")
    selection = read_section(McpSelection, options, where)
    common = {} if selection.num_instances is None else {"num_instances": selection.num_instances}
    made = [
        McpServer.from_config(str(name), {**common, **entry} if isinstance(entry, Mapping) else entry, where)
        for name, entry in servers.items()
    ]
    if selection.tool_schemas_path is None:
        # The time limit covers every attempt to connect, closing it, and the pauses in between.
        patience = max(server.connect_attempts * (2 * server.connect_timeout + 25.0) for server in made)
        found = run_in_loop(_ask_servers(made, selection.prefix, where), patience)
    else:
        found = _read_schema_file(made, selection, folder, where)
    if not found:
        raise ConfigError(f"{where}: no tool is listed by {', '.join(str(server) for server in made)}")
    selected = set(selection.tool_selected_list)
    known = {name for each in found for name in (each.remote_name, each.schema.function.name)}
    for name in selection.tool_selected_list:
        if name not in known:
            hint = did_you_mean(name, known) or f" (it has: {', '.join(sorted(known)) or 'none'})"
            raise ConfigError(f"{where}: tool_selected_list: no server has a tool '{name}'{hint}")
    return [each for each in found if not selected or {each.remote_name, each.schema.function.name} & selected]


def _read_schema_file(
    servers: Sequence[McpServer], selection: McpSelection, folder: Path, where: str
) -> list[Discovered]:
    """Reads the schema file; a tool belongs to the server whose name prefixes its name, or to the only server."""
    path, prefix = str(selection.tool_schemas_path), selection.prefix
    if len(servers) > 1 and not prefix:
        raise ConfigError(f"{where}: tool_schemas_path of several servers needs prefix: true, to tell whose they are")
    content = read_data_file(resolve_path(folder, path))
    if not isinstance(content, list):
        raise ConfigError(f"{where}: {path}: expected a list of schemas, as  etude tools schema  prints it")
    found = []
    for number, each in enumerate(content):
        schema = read_schema(each, f"{where}: {path}[{number}]")
        name = schema.function.name
        owners = [server for server in servers if not prefix or name.startswith(f"{server.name}-")]
        if not owners:
            raise ConfigError(f"{where}: tool_schemas_path: no server of '{name}' is configured")
        owner = max(owners, key=lambda server: len(server.name))
        found.append(Discovered(owner, name.removeprefix(f"{owner.name}-") if prefix else name, schema))
    return found


async def _ask_servers(servers: Sequence[McpServer], prefix: bool, where: str) -> list[Discovered]:
    listing = (pool_of(server).list_tools() for server in servers)
    found: list[Discovered] = []
    for server, answer in zip(servers, await asyncio.gather(*listing, return_exceptions=True)):
        if isinstance(answer, InfrastructureError | EtudeError):
            raise ConfigError(f"{where}: {one_line(answer, 600)}") from answer
        if isinstance(answer, BaseException):
            raise answer
        found += _to_discovered(server, answer, prefix, where)
    return found


def _to_discovered(server: McpServer, tools: Sequence[Tool], prefix: bool, where: str) -> list[Discovered]:
    found = []
    for tool in tools:
        name = f"{server.name}-{tool.name}" if prefix else tool.name
        place = f"{where}: mcpServers.{server.name}: tool '{one_line(ValueError(tool.name), _LONGEST_NAME)}'"
        if len(name) > _LONGEST_NAME:
            raise ConfigError(f"{place}: its name is longer than {_LONGEST_NAME} characters")
        function = {"name": name, "description": tool.description or tool.title or "", "parameters": tool.input_schema}
        schema = read_schema({"type": "function", "function": function}, place)
        found.append(Discovered(server, tool.name, schema))
    return found
