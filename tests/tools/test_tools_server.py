"""`etude tools serve` as real processes, used by the SDK's own client: sessions, errors, limits, endings."""

import asyncio
import base64
import io
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from mcp import Client, StdioServerParameters
from PIL import Image
from wait_stage import until

from etude.errors import DataError
from etude.schemas import ToolResponse
from etude.tools import FunctionTool, load_tools
from etude.tools.mcp import close_connections
from etude.tools.server import ToolServer, content_of

TOOLS = '''
import asyncio
from pathlib import Path
from typing import Literal

from PIL import Image

from etude.tools import BaseTool, OpenAIFunctionToolSchema, ToolError, ToolResponse, function_tool

PARAMETERS = {"type": "object", "properties": {"by": {"type": "integer", "minimum": 0}}, "additionalProperties": False}
LOG = Path(__file__).with_name("log")


class Counter(BaseTool):
    """Counts for each client alone."""

    def __init__(self, config, tool_schema=None):
        function = {"name": "counter", "description": "Counts.", "parameters": PARAMETERS}
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate({"function": function}))
        self.counts = {}

    async def create(self, instance_id=None, start=0, **kwargs):
        self.counts[instance_id] = start
        self.note("create")
        return instance_id, ToolResponse(text=f"starts at {start}" if start else None)

    async def execute(self, instance_id, parameters, **kwargs):
        by = parameters.get("by", 1)
        print("a tool may print")
        if by == 13:
            raise OSError("the disk is gone")
        if by == 14:
            raise ToolError("never 14")
        if by == 15:
            raise SystemExit("bye")
        if by == 16:
            await asyncio.sleep(60)
        self.counts[instance_id] += by
        return ToolResponse(text=str(self.counts[instance_id])), 0.0, {}

    async def release(self, instance_id, **kwargs):
        self.note("release")
        del self.counts[instance_id]

    def note(self, word):
        with LOG.open("a") as file:
            file.write(word + "\\n")


@function_tool("drawn_by_server")
def draw(color: Literal["red", "blue"]) -> ToolResponse:
    """Draws."""
    return ToolResponse(text=color, image=[Image.new("RGB", (3, 2), color)])
'''
YAML = """
tools:
  - {class_name: 'served.py:Counter', config: {timeout: 30, max_response_chars: 1000}}
  - {class_name: 'served.py:draw'}
"""
CLIENT = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
SERVE = [sys.executable, "-m", "etude.cli.main", "tools", "serve"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "served.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text(YAML)
    return tmp_path


def log(folder):
    return (folder / "log").read_text().split() if (folder / "log").exists() else []


class Http:
    """A server process; `url` is what it says it listens on."""

    def __init__(self, folder, *options):
        command = [*SERVE, str(folder / "tools.yaml"), "--transport", "streamable-http", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        line = self.process.stderr.readline()
        assert line.startswith("serving on http://127.0.0.1:"), line
        self.url = line.split()[2]

    def end(self, number=signal.SIGINT):
        self.process.send_signal(number)
        status = self.process.wait(30)
        self.process.stderr.close()
        return status


@pytest.fixture
def http(folder):
    server = Http(folder)
    yield server
    if server.process.poll() is None:
        server.end(signal.SIGKILL)


async def texts(client, *bys):
    answers = []
    for by in bys:
        result = await client.call_tool("counter", {"by": by})
        answers.append((result.is_error, result.content[0].text))
    return answers


async def look_around(client):
    """What every transport has to do: list whole schemas, answer with text and images, tell errors."""
    listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(listed) == ["counter", "drawn_by_server"]
    assert listed["counter"].description == "Counts."
    assert listed["counter"].input_schema["properties"] == {"by": {"type": "integer", "minimum": 0}}
    assert listed["counter"].input_schema["additionalProperties"] is False
    assert await texts(client, 1, 2, 14) == [(False, "1"), (False, "3"), (True, "never 14")]
    [(is_error, broken)] = await texts(client, 13)
    assert is_error
    assert "the disk is gone" in broken
    [(is_error, left)] = await texts(client, 15)
    assert is_error
    assert "SystemExit" in left
    assert await texts(client, 4) == [(False, "7")]  # after all that, the same state
    drawn = await client.call_tool("drawn_by_server", {"color": "red"})
    text, image = drawn.content
    assert text.text == "red"
    picture = Image.open(io.BytesIO(base64.b64decode(image.data)))
    assert (picture.size, picture.getpixel((0, 0)), image.mime_type) == ((3, 2), (255, 0, 0), "image/png")
    refused = await client.call_tool("drawn_by_server", {"color": "green"})
    assert refused.is_error
    assert "color" in refused.content[0].text
    unknown = await client.call_tool("nosuch", {})
    assert unknown.is_error
    assert "Unknown tool 'nosuch'" in unknown.content[0].text


@pytest.mark.slow
async def test_over_stdio(folder):
    command = StdioServerParameters(command=SERVE[0], args=[*SERVE[1:], str(folder / "tools.yaml")])
    async with Client(command) as client:
        await look_around(client)
    assert log(folder) == ["create", "release"]


async def test_over_streamable_http_each_client_has_state_of_its_own(folder, http):
    async with Client(http.url) as first, Client(http.url) as second:
        await look_around(first)
        assert await texts(second, 5) == [(False, "5")]
        assert await texts(first, 1) == [(False, "8")]
    until(lambda: sorted(log(folder)) == ["create"] * 2 + ["release"] * 2)
    assert http.end() == 130


async def test_a_client_without_sessions_has_one_for_each_request(folder, http):
    async with Client(http.url, mode="2026-07-28") as client:
        assert await texts(client, 1, 2) == [(False, "1"), (False, "2")]
    until(lambda: log(folder) == ["create", "release"] * 2)


async def test_what_a_row_would_say(folder):
    (folder / "kwargs.json").write_text(json.dumps({"counter": {"create_kwargs": {"start": 40}}}))
    server = Http(folder, "--tools-kwargs", f"@{folder / 'kwargs.json'}")
    try:
        async with Client(server.url) as client:
            assert await texts(client, 1, 1) == [(False, "starts at 40\n41"), (False, "42")]
    finally:
        server.end()


async def test_a_client_that_leaves_in_the_middle_of_a_call(folder, http):
    async with Client(http.url) as client:
        waiting = asyncio.ensure_future(client.call_tool("counter", {"by": 16}))
        await asyncio.sleep(0.5)
        assert await texts(client, 2) == [(False, "2")]  # others are answered meanwhile
        waiting.cancel()
    until(lambda: log(folder) == ["create", "release"])
    assert http.process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_releases_the_tools_over_stdio(folder, number, status):
    process = subprocess.Popen(
        [*SERVE, str(folder / "tools.yaml")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    say(process, "initialize", 1, **CLIENT)
    assert "result" in hear(process)
    process.stdin.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
    say(process, "tools/call", 2, name="counter", arguments={"by": 3})
    assert hear(process)["result"]["content"][0]["text"] == "3"
    process.send_signal(number)
    assert process.wait(30) == status
    assert log(folder) == ["create", "release"]
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


def test_stdio_survives_what_is_no_message(folder):
    process = subprocess.Popen(
        [*SERVE, str(folder / "tools.yaml")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process.stdin.write(b"hello\n\xff\xfe\n{}\n[1]\n" + b"x" * (17 * 1024 * 1024) + b"\n")
    say(process, "initialize", 1, **CLIENT)
    while (answer := hear(process)).get("id") != 1:
        assert "error" in answer
    assert answer["result"]["serverInfo"]["name"] == "etude"
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()


def say(process, method, number, **params):
    message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def hear(process):
    line = process.stdout.readline()
    assert line
    return json.loads(line)


def test_a_body_that_is_too_large_is_refused(folder, http):
    request = urllib.request.Request(http.url, b"x" * (5 * 1024 * 1024), {"Content-Type": "application/json"})
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(request, timeout=20)
    assert http.process.poll() is None


@pytest.mark.slow
async def test_our_client_uses_our_server(folder):
    """A stateful tool behind `serve`, as the tool of a rollout."""
    entry = {"command": SERVE[0], "args": [*SERVE[1:], str(folder / "tools.yaml")]}
    (folder / "client.json").write_text(json.dumps({"mcpServers": {"far": entry}}))
    tools = {tool.name: tool for tool in load_tools(folder / "client.json")}
    try:
        counted = [await tools["far-counter"].execute("i", {"by": by}) for by in (1, 2)]
        drawn, _, _ = await tools["far-drawn_by_server"].execute("i", {"color": "blue"})
    finally:
        close_connections()
    assert [response.text for response, _, _ in counted] == ["1", "3"]
    assert drawn.image[0].getpixel((0, 0)) == (0, 0, 255)
    assert log(folder) == ["create", "release"]


def test_wrong_rows_show_before_a_client_comes():
    def nothing() -> str:
        return ""

    with pytest.raises(DataError, match="'nothin', which is not configured; did you mean 'nothing'"):
        ToolServer([FunctionTool(nothing)], {"nothin": {}})


def test_content_that_mcp_has_no_form_for_is_named():
    response = ToolResponse(text="t", image=["a.png", Image.new("CMYK", (2, 2))], video=["v"])
    kinds = [(block.type, getattr(block, "text", "")) for block in content_of(response)]
    assert kinds[0] == ("text", "t")
    assert kinds[1] == ("text", "[image of type str, which cannot be sent]")
    assert kinds[2][0] == "image"
    assert kinds[3] == ("text", "[video, which cannot be sent]")


def test_a_port_that_is_taken_is_one_line(folder, http):
    port = http.url.split(":")[2].split("/")[0]
    command = [*SERVE, str(folder / "tools.yaml"), "--transport", "streamable-http", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
