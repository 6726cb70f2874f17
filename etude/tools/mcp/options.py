"""`McpServer`: the configuration of one MCP server, read from an entry of `mcpServers`.

Invariant: an `McpServer` is complete and hashable, and two equal ones share their connections; its `str` never contains
headers or environment variables, which may be secret. The keys are those of Claude Desktop, Qwen-Agent and verl:
`{command, args, env, cwd}` for a subprocess, `{url, type, headers, auth_token}` for a running server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Le
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from etude.errors import ConfigError
from etude.options.types import Count, Positive, Text
from etude.registry import did_you_mean
from etude.tools.options import HttpUrl, ToolOptions, read_section

Transport = Literal["stdio", "streamable-http", "sse"]

_SPELLINGS: dict[object, Transport] = {
    "stdio": "stdio",
    "streamable-http": "streamable-http",
    "streamable_http": "streamable-http",
    "streamableHttp": "streamable-http",
    "http": "streamable-http",
    "sse": "sse",
}
_STDIO_KEYS = ("command", "args", "env", "cwd")
_URL_KEYS = ("url", "headers", "auth_token", "sse_read_timeout")
_READ_HERE = ("type", "transport", "description", "name")


def _pairs(value: object) -> object:
    if not isinstance(value, Mapping) or not all(isinstance(each, str | int | float) for each in value.values()):
        raise ValueError("must be a mapping of names to texts")
    return tuple(sorted((str(key), str(each)) for key, each in value.items()))


Pairs = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs)]
"""A mapping of strings as a hashable tuple of pairs."""


class McpServer(ToolOptions):
    """One server.

    Attributes:
        name: its key under `mcpServers`.
        num_instances: connections per process (for stdio: subprocesses); calls take the least busy one.
        connect_timeout: seconds for one attempt to connect and list the tools; on a busy machine, a server in Python may
            need half a minute to start.
        connect_attempts: attempts before a call, or the start of a run, fails.
        sse_read_timeout: seconds without a byte after which an HTTP answer or an SSE stream counts as lost.
        max_message_bytes: limit of one message of the server; a longer one (over SSE: above 1 MiB) breaks the
            connection.
    """

    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: str
    transport: Transport
    command: Text = ""
    args: tuple[str, ...] = ()
    env: Pairs = Field(default=(), repr=False)
    cwd: Text | None = None
    url: HttpUrl = ""
    headers: Pairs = Field(default=(), repr=False)
    auth_token: Text | None = Field(default=None, repr=False)
    num_instances: Annotated[Count, Le(64)] = 1
    connect_timeout: Positive = 60.0
    connect_attempts: Count = 3
    sse_read_timeout: Positive = 300.0
    max_message_bytes: Count = 16 * 1024 * 1024

    @model_validator(mode="after")
    def _fits(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("needs either 'command' (a subprocess) or 'url' (a running server)")
        stdio = self.transport == "stdio"
        if stdio != bool(self.command):
            raise ValueError(
                f"a server of type '{self.transport}' is not reached by '{'command' if self.command else 'url'}'"
            )
        if misplaced := [key for key in (_URL_KEYS if stdio else _STDIO_KEYS) if key in self.model_fields_set]:
            raise ValueError(f"'{misplaced[0]}' has no effect on a server of type '{self.transport}'")
        if self.auth_token and any(name.lower() == "authorization" for name, _ in self.headers):
            raise ValueError("auth_token and headers.Authorization are the same; set one")
        for name, value in self.request_headers.items():
            if not name.isascii() or any(character in "\r\n\0" for character in name + value):
                raise ValueError(f"the header '{name}' holds a character that HTTP forbids")
        return self

    @property
    def request_headers(self) -> dict[str, str]:
        """The headers to send with every request."""
        return dict(self.headers) | ({"Authorization": f"Bearer {self.auth_token}"} if self.auth_token else {})

    @classmethod
    def from_config(cls, name: str, entry: object, where: str) -> McpServer:
        """Reads the server from `entry`, in which environment variables are already substituted.

        Raises:
            ConfigError: a key is unknown, missing or of the wrong type; names `where` and the server.
        """
        where = f"{where}: mcpServers.{name}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where} must be a mapping with 'command' or 'url'")
        own = {key: value for key, value in entry.items() if key not in _READ_HERE}
        return read_section(cls, {"name": name, "transport": _transport(entry, where)} | own, where)

    def __str__(self) -> str:
        """Name and command or URL, without secrets: the URL lacks user, password and query."""
        if self.transport == "stdio":
            return f"MCP server '{self.name}' ({' '.join([self.command, *self.args])})"
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return f"MCP server '{self.name}' ({parts.scheme}://{host}{parts.path})"


def _transport(entry: Mapping[str, Any], where: str) -> Transport:
    """Returns the transport from the key `type` or `transport`, or infers it from the other keys."""
    spelled = entry.get("type", entry.get("transport"))
    if spelled in _SPELLINGS:
        return _SPELLINGS[spelled]
    if spelled is not None:
        known = ["stdio", "streamable-http", "sse"]
        hint = did_you_mean(str(spelled), known)
        raise ConfigError(f"{where}: unknown type '{spelled}'{hint} (known: {', '.join(known)})")
    if "url" not in entry:
        return "stdio"
    looks_like_sse = urlsplit(str(entry["url"])).path.rstrip("/").endswith("/sse") or "sse_read_timeout" in entry
    return "sse" if looks_like_sse else "streamable-http"


def anchor_servers(servers: object, folder: Path) -> object:
    """Makes paths in `servers`, the value of an `mcpServers` key, absolute where they exist in `folder`: a `cwd` that is a
    folder there or, without a `cwd`, a command with a slash and arguments that are files there."""
    if not isinstance(servers, Mapping):
        return servers
    return {name: _anchor(entry, folder.resolve()) for name, entry in servers.items()}


def _anchor(entry: object, folder: Path) -> object:
    if not isinstance(entry, Mapping):
        return entry

    def full(text: object, exists: Callable[[Path], bool]) -> object:
        return str(folder / text) if isinstance(text, str) and text and exists(folder / text) else text

    if entry.get("cwd") is not None:
        return {**entry, "cwd": full(entry["cwd"], Path.is_dir)}
    made = {**entry}
    if "/" in str(entry.get("command")):  # otherwise a program on PATH
        made["command"] = full(entry["command"], Path.is_file)
    if isinstance(entry.get("args"), list | tuple):
        made["args"] = [full(each, Path.is_file) for each in entry["args"]]
    return made
