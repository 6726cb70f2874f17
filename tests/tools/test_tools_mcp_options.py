"""What may be said of an MCP server, and the one line for what may not."""

import pytest

from etude.errors import ConfigError
from etude.tools.function_tool import read_schema
from etude.tools.mcp import MCPBaseTool, McpServer, anchor_servers


def read(entry):
    return McpServer.from_config("s", entry, "file.yaml")


@pytest.mark.parametrize(
    ("entry", "transport"),
    [
        ({"command": "python"}, "stdio"),
        ({"url": "http://host/mcp"}, "streamable-http"),
        ({"url": "http://host:8080/sse"}, "sse"),
        ({"url": "http://host/x", "sse_read_timeout": 300, "headers": {}}, "sse"),
        ({"url": "http://host/sse", "type": "streamable-http"}, "streamable-http"),
        ({"url": "http://host/mcp", "transport": "sse"}, "sse"),
        ({"url": "http://host/mcp", "type": "http"}, "streamable-http"),
    ],
)
def test_the_transport_is_said_or_seen(entry, transport):
    assert read(entry).transport == transport


def test_equal_entries_are_equal_servers():
    entry = {"command": "python", "args": ["a.py", 3], "env": {"B": "2", "A": 1}, "cwd": "/x"}
    server = read(entry)
    assert server == read(dict(reversed(entry.items())))
    assert hash(server) == hash(read(entry))
    assert (server.args, server.env) == (("a.py", "3"), (("A", "1"), ("B", "2")))
    assert server != read(entry | {"env": {"A": "1"}})


def test_secrets_are_not_shown():
    server = read({"url": "https://user:pass@host/mcp?key=k3y", "auth_token": "t0ken"})
    assert server.request_headers == {"Authorization": "Bearer t0ken"}
    assert str(server) == "MCP server 's' (https://host/mcp)"
    assert "t0ken" not in repr(server)
    assert "t0ken" not in str(server)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("python", "must be a mapping"),
        ({}, "needs either 'command'"),
        ({"command": "a", "url": "http://h"}, "needs either 'command'"),
        ({"comand": "a"}, "unknown key comand; did you mean 'command'"),
        ({"command": ""}, "command must be text"),
        ({"command": ["python", "a.py"]}, "command must be text"),
        ({"command": "a", "args": "b"}, "args must be a list"),
        ({"command": "a", "env": ["b"]}, "env: must be a mapping"),
        ({"command": "a", "headers": {}}, "'headers' has no effect on a server of type 'stdio'"),
        ({"command": "a", "type": "sse"}, "is not reached by 'command'"),
        ({"url": "http://h", "type": "stdio"}, "is not reached by 'url'"),
        ({"url": "http://h", "type": "websocket"}, "unknown type 'websocket'"),
        ({"url": "h/mcp"}, "url: must be an address"),
        ({"url": "file:///etc/passwd"}, "url: must be an address"),
        ({"url": "http://h", "headers": {"A": "b\r\nC: d"}}, "the header 'A' holds a character"),
        ({"url": "http://h", "headers": {"authorization": "x"}, "auth_token": "y"}, "are the same; set one"),
        ({"url": "http://h", "args": []}, "'args' has no effect"),
        ({"url": "http://h", "num_instances": 0}, "num_instances must be a whole number from 1 to 64"),
        ({"url": "http://h", "num_instances": 65}, "num_instances"),
        ({"url": "http://h", "num_instances": True}, "num_instances"),
        ({"url": "http://h", "connect_timeout": "soon"}, "connect_timeout must be a number above 0"),
    ],
)
def test_what_is_wrong_names_place_and_server(entry, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(entry)
    assert str(caught.value).startswith("file.yaml: mcpServers.s")
    assert "\n" not in str(caught.value)


def test_the_keys_of_a_tools_config():
    schema = read_schema({"function": {"name": "far"}}, "here")
    assert MCPBaseTool({"rate_limit": 120}, schema).config == {"rate_limit": 120, "calls_per_second": 120}
    assert MCPBaseTool({"rate_limit": 120, "calls_per_second": 3}, schema).config["calls_per_second"] == 3
    with pytest.raises(ConfigError, match=r"tool 'far': unknown key config.timout; did you mean 'timeout'"):
        MCPBaseTool({"timout": 3}, schema)
    with pytest.raises(ConfigError, match=r"config.rate_limit"):
        MCPBaseTool({"rate_limit": 0}, schema)
    mine = type("Mine", (MCPBaseTool,), {})
    assert mine({"own": 1}, schema).config == {"own": 1}


async def test_a_tool_of_no_server():
    with pytest.raises(ConfigError, match="tool 'far' belongs to no server"):
        await MCPBaseTool({}, read_schema({"function": {"name": "far"}}, "here")).execute("i", {})


def test_paths_of_commands_are_relative_to_the_file_that_holds_them(tmp_path):
    (tmp_path / "server.py").write_text("")
    (tmp_path / "run.sh").write_text("")
    (tmp_path / "python").write_text("")
    (tmp_path / "sub").mkdir()
    servers = {
        "a": {"command": "python", "args": ["server.py", "sub", "--port", 8]},
        "b": {"command": "./run.sh"},
        "c": {"command": "python", "args": ["server.py"], "cwd": "sub"},
        "d": {"url": "http://localhost/mcp"},
    }
    made = anchor_servers(servers, tmp_path)
    assert made["a"] == {"command": "python", "args": [f"{tmp_path}/server.py", "sub", "--port", 8]}
    assert made["b"] == {"command": f"{tmp_path}/run.sh"}
    assert made["c"] == {"command": "python", "args": ["server.py"], "cwd": f"{tmp_path}/sub"}
    assert made["d"] == servers["d"]
    assert anchor_servers(None, tmp_path) is None
