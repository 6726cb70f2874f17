"""`discover_tools`: the tools of MCP servers, as listed by the servers or in a schema file.

Invariant: a server that does not answer raises one `ConfigError` that names file, entry and server, at the start of a
run; selected tools exist; their schemas are the server's, unchanged. With schemas from a file (as `etude tools
schema` prints them) no server is contacted, and a run that replays recorded calls needs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError, EtudeError, InfrastructureError, one_line
from etude.registry import did_you_mean
from etude.schemas import OpenAIFunctionToolSchema
from etude.tools.config_file import beside, read_data_file
from etude.tools.function_tool import read_schema
from etude.tools.mcp.connection import McpPool, pool_of, run_in_loop
from etude.tools.mcp.options import McpServer

if TYPE_CHECKING:
    from mcp_types import Tool

_LONGEST_NAME = 128
SELECTION_KEYS = ("tool_selected_list", "num_instances", "prefix", "tool_schemas_path")


@dataclass(frozen=True)
class McpSelection:
    """Selects tools of some servers, and their names.

    Attributes:
        servers: the servers, in the order of their tools.
        selected: names (the server's own, or with prefix); None for all.
        prefix: whether a tool is named `server-tool`, so that two servers may have tools of the same name.
        schemas: of the tools, under their names here; None to ask the servers.
    """

    servers: tuple[McpServer, ...]
    selected: tuple[str, ...] | None = None
    prefix: bool = False
    schemas: tuple[OpenAIFunctionToolSchema, ...] | None = None

    @classmethod
    def from_config(
        cls,
        servers: object,
        options: Mapping[str, Any],
        where: str,
        *,
        prefix: bool = False,
        folder: Path | None = None,
    ) -> McpSelection:
        """The selection that `options` makes among `servers`, the mapping of an `mcpServers` key; paths are resolved in
        `folder` first.

        Raises:
            ConfigError: they are invalid; names `where` and key.
        """
        if not isinstance(servers, Mapping) or not servers:
            raise ConfigError(f"{where}: mcpServers must be a mapping of names to servers")
        for key in options:
            if key not in SELECTION_KEYS:
                raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(str(key), SELECTION_KEYS)}")
        selected = options.get("tool_selected_list")
        if selected is not None and (
            not isinstance(selected, list | tuple) or not all(isinstance(name, str) for name in selected)
        ):
            raise ConfigError(f"{where}: tool_selected_list must be a list of tool names")
        prefixed = options.get("prefix", prefix)
        if not isinstance(prefixed, bool):
            raise ConfigError(f"{where}: prefix must be true or false, not {prefixed!r}")
        common = {key: options[key] for key in ("num_instances",) if options.get(key) is not None}
        made = [
            McpServer.from_config(str(name), {**common, **entry} if isinstance(entry, Mapping) else entry, where)
            for name, entry in servers.items()
        ]
        schemas = None
        if (path := options.get("tool_schemas_path")) is not None:
            if len(made) > 1 and not prefixed:
                raise ConfigError(
                    f"{where}: tool_schemas_path of several servers needs prefix: true, to tell whose they are"
                )
            schemas = _schemas_in(path, folder or Path(), where)
        return cls(tuple(made), tuple(selected) if selected else None, prefixed, schemas)


@dataclass(frozen=True)
class Discovered:
    """A tool listed by a server: its name there, its schema under its name here."""

    server: McpServer
    remote_name: str
    schema: OpenAIFunctionToolSchema


def discover_tools(selection: McpSelection, where: str) -> list[Discovered]:
    """Connects to all servers at once and lists their tools; the connections stay open for the calls.

    Raises:
        ConfigError: a server does not answer, lists an unusable tool, or lacks a selected one.
    """
    found = _listed(selection, where) if selection.schemas is None else _remembered(selection, where)
    if selection.selected is None:
        return found
    known = {name for each in found for name in (each.remote_name, each.schema.function.name)}
    absent = [name for name in selection.selected if name not in known]
    if absent:
        hint = did_you_mean(absent[0], known) or f" (it has: {', '.join(sorted(known)) or 'none'})"
        raise ConfigError(f"{where}: tool_selected_list: no server has a tool '{absent[0]}'{hint}")
    return [e for e in found if {e.remote_name, e.schema.function.name} & set(selection.selected)]


def _listed(selection: McpSelection, where: str) -> list[Discovered]:
    pools = [pool_of(server) for server in selection.servers]
    listed = run_in_loop(_list_all(pools, where), _patience(selection.servers))
    both = zip(selection.servers, listed, strict=True)
    return [each for server, tools in both for each in _read(server, tools, selection.prefix, where)]


def _remembered(selection: McpSelection, where: str) -> list[Discovered]:
    """The tools of `selection.schemas`, each with the server that its name starts with, or the only one."""
    found = []
    for schema in selection.schemas or ():
        name = schema.function.name
        owners = [server for server in selection.servers if not selection.prefix or name.startswith(f"{server.name}-")]
        if not owners:
            raise ConfigError(f"{where}: tool_schemas_path: no server of '{name}' is configured")
        owner = max(owners, key=lambda server: len(server.name))
        found.append(Discovered(owner, name.removeprefix(f"{owner.name}-") if selection.prefix else name, schema))
    return found


def _schemas_in(path: object, folder: Path, where: str) -> tuple[OpenAIFunctionToolSchema, ...]:
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{where}: tool_schemas_path must be a path, not {path!r}")
    content = read_data_file(beside(folder, path))
    if not isinstance(content, list):
        raise ConfigError(f"{where}: {path}: expected a list of schemas, as  etude tools schema  prints it")
    return tuple(read_schema(each, f"{where}: {path}[{number}]") for number, each in enumerate(content))


async def _list_all(pools: Sequence[McpPool], where: str) -> list[list[Tool]]:
    answers = await asyncio.gather(*(pool.list_tools() for pool in pools), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, InfrastructureError | EtudeError):
            raise ConfigError(f"{where}: {one_line(answer, 600)}") from answer
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def _read(server: McpServer, tools: Sequence[Tool], prefix: bool, where: str) -> list[Discovered]:
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


def _patience(servers: Sequence[McpServer]) -> float:
    """Maximum seconds until every server is connected or has failed: attempts, closing, pauses."""
    return max(server.connect_attempts * (2 * server.connect_timeout + 25.0) for server in servers)
