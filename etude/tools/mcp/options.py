"""`McpServer`: how to reach one MCP server, read from an entry of `mcpServers`.

Invariant: an `McpServer` is complete and hashable, and two equal ones share their connections; its `str` never contains
headers or environment, which hold keys. The keys are those of the documents and of Claude Desktop, Qwen-Agent and verl:
`{command, args, env, cwd}` for a subprocess, `{url, type, headers, auth_token}` for a running server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from etude.errors import ConfigError
from etude.registry import did_you_mean


class McpTransport(str, Enum):
    """The transport of messages."""

    STDIO = "stdio"
    STREAMABLE_HTTP = "streamable-http"
    SSE = "sse"


_SPELLINGS = {
    "stdio": McpTransport.STDIO,
    "streamable-http": McpTransport.STREAMABLE_HTTP,
    "streamable_http": McpTransport.STREAMABLE_HTTP,
    "streamableHttp": McpTransport.STREAMABLE_HTTP,
    "http": McpTransport.STREAMABLE_HTTP,
    "sse": McpTransport.SSE,
}
_STDIO_KEYS = ("command", "args", "env", "cwd")
_URL_KEYS = ("url", "headers", "auth_token", "sse_read_timeout")
_SHARED_KEYS = ("type", "transport", "num_instances", "connect_timeout", "connect_attempts", "max_message_bytes")
_IGNORED_KEYS = ("description", "name")
MAX_INSTANCES = 64


@dataclass(frozen=True)
class McpServer:
    """One server.

    Attributes:
        name: its key under `mcpServers`.
        num_instances: connections per process (for stdio: subprocesses); calls take the least busy one.
        connect_timeout: seconds for one attempt to connect and list the tools.
        connect_attempts: attempts before a call, or the start of a run, fails.
        sse_read_timeout: seconds without a byte after which an HTTP answer or an SSE stream counts as lost.
        max_message_bytes: limit of one message of the server; a longer one (over SSE: above 1 MiB) breaks the
            connection.
    """

    name: str
    transport: McpTransport
    command: str = ""
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    cwd: str | None = None
    url: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    num_instances: int = 1
    connect_timeout: float = 30.0
    connect_attempts: int = 3
    sse_read_timeout: float = 300.0
    max_message_bytes: int = 16 * 1024 * 1024

    @classmethod
    def from_config(cls, name: str, entry: object, where: str) -> McpServer:
        """The server that `entry` (environment already filled in) describes.

        Raises:
            ConfigError: a key is unknown, missing or of the wrong type; names `where` and the server.
        """
        where = f"{where}: mcpServers.{name}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where} must be a mapping with 'command' or 'url'")
        known = (*_STDIO_KEYS, *_URL_KEYS, *_SHARED_KEYS)
        for key in entry:
            if key not in known and key not in _IGNORED_KEYS:
                raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(str(key), known)}")
        if ("command" in entry) == ("url" in entry):
            raise ConfigError(f"{where} needs either 'command' (a subprocess) or 'url' (a running server)")
        transport = _transport(entry, where)
        foreign = _URL_KEYS if transport is McpTransport.STDIO else _STDIO_KEYS
        misplaced = [key for key in foreign if key in entry]
        if misplaced:
            raise ConfigError(f"{where}: '{misplaced[0]}' has no effect on a server of type '{transport.value}'")
        return cls(
            name=name,
            transport=transport,
            command=_text(entry, "command", where),
            args=tuple(_texts(entry.get("args"), f"{where}: args")),
            env=tuple(sorted(_pairs(entry.get("env"), f"{where}: env").items())),
            cwd=_text(entry, "cwd", where) or None,
            url=_url(entry, where),
            headers=tuple(sorted(_headers(entry, where).items())),
            num_instances=int(
                _number(entry, "num_instances", cls.num_instances, where, whole=True, most=MAX_INSTANCES)
            ),
            connect_timeout=_number(entry, "connect_timeout", cls.connect_timeout, where),
            connect_attempts=int(_number(entry, "connect_attempts", cls.connect_attempts, where, whole=True)),
            sse_read_timeout=_number(entry, "sse_read_timeout", cls.sse_read_timeout, where),
            max_message_bytes=int(_number(entry, "max_message_bytes", cls.max_message_bytes, where, whole=True)),
        )

    def __str__(self) -> str:
        """Name and place, without secrets: a URL without user, password and query."""
        if self.transport is McpTransport.STDIO:
            return f"MCP server '{self.name}' ({' '.join([self.command, *self.args])})"
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return f"MCP server '{self.name}' ({parts.scheme}://{host}{parts.path})"


def anchor_servers(servers: object, folder: Path) -> object:
    """`servers`, the mapping of an `mcpServers` key in `folder`, with absolute paths for a `cwd` that is a folder
    there and, without one, for a command with a slash or an argument that is a file there."""
    if not isinstance(servers, Mapping):
        return servers
    return {name: _anchored(entry, folder.resolve()) for name, entry in servers.items()}


def _anchored(entry: object, folder: Path) -> object:
    if not isinstance(entry, Mapping):
        return entry

    def full(text: object, named: Callable[[Path], bool]) -> object:
        return str(folder / text) if isinstance(text, str) and text and named(folder / text) else text

    if entry.get("cwd") is not None:
        return {**entry, "cwd": full(entry["cwd"], Path.is_dir)}
    made = {**entry}
    if "/" in str(entry.get("command")):  # anything else is a program on PATH
        made["command"] = full(entry["command"], Path.is_file)
    if isinstance(entry.get("args"), list | tuple):
        made["args"] = [full(each, Path.is_file) for each in entry["args"]]
    return made


def _transport(entry: Mapping[str, Any], where: str) -> McpTransport:
    spelled = entry.get("type", entry.get("transport"))
    if spelled is None:
        if "command" in entry:
            return McpTransport.STDIO
        looks_like_sse = urlsplit(str(entry["url"])).path.rstrip("/").endswith("/sse") or "sse_read_timeout" in entry
        return McpTransport.SSE if looks_like_sse else McpTransport.STREAMABLE_HTTP
    if spelled not in _SPELLINGS:
        known = [transport.value for transport in McpTransport]
        hint = did_you_mean(str(spelled), known)
        raise ConfigError(f"{where}: unknown type '{spelled}'{hint} (known: {', '.join(known)})")
    transport = _SPELLINGS[spelled]
    if (transport is McpTransport.STDIO) != ("command" in entry):
        given = "command" if "command" in entry else "url"
        raise ConfigError(f"{where}: a server of type '{spelled}' is not reached by '{given}'")
    return transport


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if value is None and key not in entry:
        return ""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{where}: {key} must be a text, not {value!r}")
    return value


def _texts(value: object, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(each, str | int | float) for each in value):
        raise ConfigError(f"{where} must be a list of texts")
    return [str(each) for each in value]


def _pairs(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(each, str | int | float) for each in value.values()):
        raise ConfigError(f"{where} must be a mapping of names to texts")
    return {str(key): str(each) for key, each in value.items()}


def _headers(entry: Mapping[str, Any], where: str) -> dict[str, str]:
    headers = _pairs(entry.get("headers"), f"{where}: headers")
    token = _text(entry, "auth_token", where)
    if token and any(name.lower() == "authorization" for name in headers):
        raise ConfigError(f"{where}: auth_token and headers.Authorization are the same; set one")
    made = headers | ({"Authorization": f"Bearer {token}"} if token else {})
    for name, value in made.items():
        if not name.isascii() or any(character in "\r\n\0" for character in name + value):
            raise ConfigError(f"{where}: the header '{name}' holds a character that HTTP forbids")
    return made


def _url(entry: Mapping[str, Any], where: str) -> str:
    url = _text(entry, "url", where)
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc):
        raise ConfigError(f"{where}: url must begin with http:// or https://")
    return url


def _number(
    entry: Mapping[str, Any], key: str, default: float, where: str, *, whole: bool = False, most: float = float("inf")
) -> float:
    value = entry.get(key, default)
    types = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, types) or not 0 < value <= most:
        limit = "" if most == float("inf") else f" of at most {most:g}"
        raise ConfigError(f"{where}: {key} must be a positive {'whole ' if whole else ''}number{limit}, not {value!r}")
    return value
