"""MCP tools against real servers, over all transports: what arrives, what is told, what breaks, and what is shared."""

import asyncio
import base64
import errno
import io
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import mcp_types
import PIL.Image
import psutil
import pytest
from mcp_stage import STDIO, HttpServer, configured, execute, kill_stdio_servers, stdio_servers, text_of, write_json

from etude.errors import ConfigError, InfrastructureError, ToolError
from etude.schemas import FunctionCall
from etude.tools import MCPBaseTool, ToolSession, load_tools
from etude.tools.mcp import close_connections
from etude.tools.mcp.tool import read_content


@pytest.fixture(scope="module")
def servers():
    """One running server a transport: (its `mcpServers` entry)."""
    http, sse = HttpServer("streamable-http"), HttpServer("sse")
    yield {"stdio": STDIO, "streamable-http": http.entry, "sse": sse.entry}
    close_connections()
    http.close()
    sse.close()


@pytest.fixture
def stdio(tmp_path):
    """Makes tools of a subprocess of this test alone."""
    close_connections()
    yield lambda **given: configured(tmp_path, {"stage": STDIO | {"env": {"TEST": str(tmp_path)}}}, **given)
    close_connections()
    assert stdio_servers() == []


def eventually(ask):
    """What `ask` returns once the end of the old connection has been seen; a call before that is infrastructure."""
    for _ in range(200):
        try:
            return ask()
        except InfrastructureError:
            time.sleep(0.05)
    return ask()


@pytest.mark.parametrize("transport", ["stdio", "streamable-http", "sse"])
def test_every_transport(servers, tmp_path, transport):
    tools = configured(tmp_path, {"stage": servers[transport]})
    assert text_of(tools["add"], a=2) == "3"

    parameters = tools["shelve"].tool_schema.to_openai()["function"]["parameters"]
    assert parameters["properties"]["books"]["items"] == {"$ref": "#/$defs/Book"}
    assert parameters["$defs"]["Book"]["required"] == ["title"]
    assert parameters["properties"]["order"]["enum"] == ["title", "pages"]
    assert tools["shelve"].tool_schema.function.description == "Sorts books."
    assert text_of(tools["shelve"], books=[{"title": "b"}, {"title": "a", "pages": 2}]) == "a, b"

    response, reward, metrics = execute(tools["picture"], size=5)
    assert (response.text, reward, metrics) == ("before\nafter", 0.0, {})
    [image] = response.image
    assert (image.size, image.getpixel((0, 0))) == ((5, 5), (255, 0, 0))

    with pytest.raises(ToolError, match="there is no such page"):
        execute(tools["refuse"])
    with pytest.raises(ToolError, match=r"a\n.*valid integer"):
        execute(tools["add"], a="two")


async def test_the_calls_of_a_turn_share_a_connection_and_run_at_once(stdio):
    tools = stdio()
    calls = [FunctionCall(name="meet", arguments='{"people": 16}')] * 16  # none is answered before all are there
    async with ToolSession(tools, request_id="r") as session:
        outcomes = await session.execute(calls, 0)
    assert [outcome.response.text for outcome in outcomes] == ["met"] * 16


def test_loops_and_threads_share_one_connection(stdio):
    tools = stdio()
    seen = [text_of(tools["process"]) for _ in range(2)]
    threads = [threading.Thread(target=lambda: seen.append(text_of(tools["process"]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = stdio()
    seen.append(text_of(again["process"]))
    assert len(seen) == 7
    assert len(set(seen)) == 1
    assert len(stdio_servers()) == 1


async def test_a_pool_of_instances(stdio):
    tools = stdio(num_instances=3)
    waiting = [asyncio.ensure_future(tools["wait"].execute("i", {"seconds": 1.5})) for _ in range(2)]
    await asyncio.sleep(0.01)
    answer, _, _ = await tools["process"].execute("i", {})
    await asyncio.gather(*waiting)
    assert answer.text
    assert len(stdio_servers()) == 3


def test_a_server_that_is_killed_between_calls_is_started_again(stdio):
    tools = stdio()
    before = text_of(tools["process"])
    kill_stdio_servers()
    after = eventually(lambda: text_of(tools["process"]))
    assert before != after


def test_a_server_that_dies_in_the_middle_fails_all_its_calls_at_once(stdio):
    tools = stdio()

    async def both():
        return await asyncio.gather(
            tools["wait"].execute("i", {"seconds": 60}),
            tools["die"].execute("i", {"after": 0.2}),
            return_exceptions=True,
        )

    errors = asyncio.run(both())
    assert [type(error) for error in errors] == [InfrastructureError, InfrastructureError]
    assert "MCP server 'stage'" in str(errors[0])
    assert "timed out" not in str(errors[0])  # nobody waited until the tool's time was up
    assert text_of(tools["add"], a=1) == "2"


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
def test_an_http_server_that_is_killed_and_comes_back(tmp_path, transport):
    server = HttpServer(transport)
    try:
        tools = configured(tmp_path, {"stage": server.entry | {"connect_attempts": 2}})

        async def killed():
            waiting = asyncio.ensure_future(tools["wait"].execute("i", {"seconds": 60}))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.kill)
            await waiting

        with pytest.raises(InfrastructureError, match="MCP server 'stage'"):
            asyncio.run(killed())
        with pytest.raises(InfrastructureError, match="cannot connect"):
            text_of(tools["add"], a=1)
        server.start()
        assert text_of(tools["add"], a=1) == "2"
        server.kill()
        server.start()  # a new process that does not know our session
        assert eventually(lambda: text_of(tools["add"], a=1)) == "2"
    finally:
        close_connections()
        server.close()


def test_a_call_that_takes_too_long_leaves_the_connection_to_the_others(stdio):
    tools = stdio(config={"timeout": 0.5})
    before = text_of(tools["process"])
    with pytest.raises(InfrastructureError, match="timed out"):
        execute(tools["wait"], seconds=60)

    async def given_up():
        await asyncio.wait_for(tools["wait"].execute("i", {"seconds": 60}), 0.1)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(given_up())
    assert text_of(tools["process"]) == before


def test_keys_come_from_the_environment(tmp_path, monkeypatch):
    server = HttpServer("streamable-http", key="se$cret")
    monkeypatch.setenv("STAGE_KEY", "se$cret")
    try:
        path = write_json(
            tmp_path / "servers.json",
            {"mcpServers": {"stage": {"url": server.url, "headers": {"Authorization": "Bearer ${STAGE_KEY}"}}}},
        )
        tools = {tool.name: tool for tool in load_tools(path)}
        assert text_of(tools["stage-add"], a=1) == "2"
        by_token = {"stage": {"url": server.url, "auth_token": "${oc.env:STAGE_KEY}"}}
        assert text_of(configured(tmp_path, by_token)["add"], a=1) == "2"
        monkeypatch.setenv("STAGE_KEY", "wrong")
        with pytest.raises(ConfigError, match=r"tools.yaml: tools\[0\].*stage.*HTTP 401") as caught:
            configured(tmp_path, by_token | {"stage": by_token["stage"] | {"connect_attempts": 1}})
        assert "wrong" not in str(caught.value)
        monkeypatch.delenv("STAGE_KEY")
        with pytest.raises(ConfigError, match=r"mcpServers.stage.auth_token: .*STAGE_KEY is not set"):
            configured(tmp_path, by_token)
    finally:
        close_connections()
        server.close()


def test_a_subprocess_has_the_environment_that_it_is_given_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_OURS", "1")
    monkeypatch.setenv("PASSED", "on")
    tools = configured(tmp_path, {"stage": STDIO | {"env": {"GIVEN": "${PASSED}"}}})
    assert text_of(tools["environment"], name="SECRET_OF_OURS") == "not set"
    assert text_of(tools["environment"], name="GIVEN") == "on"
    close_connections()


def test_which_tools_and_under_which_names(servers, tmp_path):
    only = configured(tmp_path, {"stage": servers["stdio"]}, tool_selected_list=["add", "refuse"])
    assert list(only) == ["add", "refuse"]
    both = configured(
        tmp_path, {"one": servers["stdio"], "two": servers["streamable-http"]}, prefix=True, tool_selected_list=["add"]
    )
    assert list(both) == ["one-add", "two-add"]
    assert text_of(both["two-add"], a=1) == "2"
    exact = configured(
        tmp_path,
        {"one": servers["stdio"], "two": servers["streamable-http"]},
        prefix=True,
        tool_selected_list=["two-add"],
    )
    assert list(exact) == ["two-add"]
    with pytest.raises(ConfigError, match=r"tool_selected_list: no server has a tool 'ad'; did you mean 'add'"):
        configured(tmp_path, {"stage": servers["stdio"]}, tool_selected_list=["ad"])
    with pytest.raises(ConfigError, match="there already is a tool named 'add'"):
        configured(tmp_path, {"one": servers["stdio"], "two": servers["streamable-http"]})


def test_a_class_of_ones_own_reads_the_answers(servers, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from etude.tools import MCPBaseTool\n"
        "class Loud(MCPBaseTool):\n"
        "    def _parse_tool_result(self, content):\n"
        "        return content[0].text.upper() + '!', {'parts': len(content)}\n"
    )
    write_json(tmp_path / "mcp_server.json", {"mcpServers": {"stage": servers["stdio"]}})
    (tmp_path / "tools.yaml").write_text(
        "tools:\n"
        "  - class_name: mine.py:Loud\n"
        "    config: {type: mcp, timeout: 20, rate_limit: 120}\n"
        "    mcp:\n"
        "      mcp_servers_config_path: mcp_server.json\n"
        "      tool_selected_list: [wait]\n"
    )
    [tool] = load_tools(tmp_path / "tools.yaml")
    assert isinstance(tool, MCPBaseTool)
    assert tool.config["calls_per_second"] == 120
    response, _, metrics = execute(tool, seconds=0)
    assert (response.text, metrics) == ("DONE!", {"parts": 1})


async def test_execute_kwargs_of_the_row_are_added(servers, tmp_path):
    tools = configured(tmp_path, {"stage": servers["stdio"]})
    async with ToolSession(tools, {"add": {"execute_kwargs": {"b": 40}}}, request_id="r") as session:
        outcomes = await session.execute([FunctionCall(name="add", arguments='{"a": 2}')], 0)
    assert outcomes[0].response.text == "42"


UNLISTED = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    answers = {"initialize": {"result": info}, "server/discover": {"error": {"code": -32601, "message": "no"}}}
    if asked["method"] in answers:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"]} | answers[asked["method"]]), flush=True)
"""
BROKEN = {
    "no command": ({"command": "no-such-command-here"}, r"cannot connect: FileNotFoundError.*no-such-command-here"),
    "a command that ends": (
        {"command": sys.executable, "args": ["-c", "raise SystemExit('out of order')"]},
        r"\(it said: out of order\)",
    ),
    "a command that says nothing": (
        {"command": sys.executable, "args": ["-c", "import time; time.sleep(60)"], "connect_timeout": 1},
        r"no answer within 1 s \(connect_timeout\)",
    ),
    "a command that lists no tools": (
        {"command": sys.executable, "args": ["-c", UNLISTED], "connect_timeout": 2},
        r"cannot connect: .*'tools/list' timed out \(connect_timeout: 2 s\)",
    ),
    "a command that talks nonsense": (
        {"command": sys.executable, "args": ["-c", "print('hello')"]},
        "cannot connect",
    ),
    "nobody listens": ({"url": "http://127.0.0.1:9/mcp"}, "cannot connect: ConnectError"),
    "nobody listens (sse)": ({"url": "http://127.0.0.1:9/sse"}, "cannot connect: ConnectError"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_server_that_does_not_start_is_one_line_before_anything_else(tmp_path, case):
    entry, message = BROKEN[case]
    with pytest.raises(ConfigError, match=message) as caught:
        configured(tmp_path, {"broken": {"connect_attempts": 1} | entry})
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'tools.yaml'}: tools[0]: mcp: MCP server 'broken'")
    assert "\n" not in text


def test_the_handshake_over_sse_has_all_of_the_time(tmp_path):
    class Mute(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"event: endpoint\ndata: /post\n\n")
            over.wait(30)

        def do_POST(self):
            self.send_response(202)
            self.end_headers()

        def log_message(self, *_):
            pass

    over = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Mute) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, began = f"http://127.0.0.1:{server.server_port}/sse", time.monotonic()
        with pytest.raises(ConfigError, match=r"no answer within 2 s \(connect_timeout\)"):
            configured(tmp_path, {"mute": {"url": url, "connect_timeout": 2, "connect_attempts": 1}})
        assert time.monotonic() - began >= 2
        over.set()
        server.shutdown()


def test_without_the_sdk_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"tools\[0\].*pip install 'etude\[mcp\]'"):
        configured(tmp_path, {"stage": STDIO | {"args": ["unique"]}})


def test_a_forked_child_opens_connections_of_its_own(stdio):
    tools = stdio()
    ours = text_of(tools["process"])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, text_of(tools["process"]).encode())
            close_connections()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        theirs = pipe.read()
    os.waitpid(child, 0)
    assert theirs.isdigit()
    assert theirs != ours
    assert text_of(tools["process"]) == ours


@pytest.mark.parametrize("transport", ["stdio", "streamable-http"])
def test_a_message_without_end_breaks_its_connection_and_nothing_else(servers, tmp_path, transport):
    entry = servers[transport] | {"max_message_bytes": 100_000}
    tools = configured(tmp_path, {"stage": entry, "other": STDIO | {"env": {"OTHER": "1"}}}, prefix=True)
    assert len(text_of(tools["stage-long"], chars=50_000)) == 50_000

    async def both():
        waiting = asyncio.ensure_future(tools["other-wait"].execute("i", {"seconds": 0.3}))
        with pytest.raises(InfrastructureError, match="MCP server 'stage'") as caught:
            await tools["stage-long"].execute("i", {"chars": 30_000_000})
        assert "timed out" not in str(caught.value)
        return (await waiting)[0].text

    assert asyncio.run(both()) == "done"
    assert text_of(tools["stage-add"], a=1) == "2"


def test_a_server_that_prints_beside_the_protocol(tmp_path):
    noisy = tmp_path / "noisy.py"
    noisy.write_text(
        "import sys\n"
        "print('welcome to the server', flush=True)\n"
        "print('\\udcff'.encode('utf-8', 'surrogateescape'), flush=True)\n"
        f"sys.argv[1:] = ['stdio']\nexec(open({str(STDIO['args'][0])!r}).read())\n"
    )
    tools = configured(tmp_path, {"noisy": {"command": sys.executable, "args": [str(noisy)]}})
    assert text_of(tools["add"], a=1) == "2"
    close_connections()


def test_a_server_that_does_not_want_to_leave_is_killed_with_what_it_started(tmp_path):
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print(child.pid, file=sys.stderr, flush=True)\n"
        f"sys.argv[1:] = ['stdio']\nexec(open({str(STDIO['args'][0])!r}).read())\n"
        "time.sleep(100)\n"
    )
    tools = configured(tmp_path, {"stubborn": {"command": sys.executable, "args": [str(stubborn)]}})
    server = psutil.Process(int(text_of(tools["process"])))
    family = [server, *server.children()]
    assert len(family) == 2
    close_connections()
    _, alive = psutil.wait_procs(family, 10)
    assert alive == [] or all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_a_server_that_reads_nothing_any_more_is_killed_with_a_message_under_way(stdio):
    tools = stdio(config={"timeout": 0.5})
    server = psutil.Process(int(text_of(tools["process"])))
    server.suspend()
    with pytest.raises(InfrastructureError, match="timed out"):
        execute(tools["environment"], name="x" * 5_000_000)
    close_connections()
    _, alive = psutil.wait_procs([server], 10)
    assert alive == [] or server.status() == psutil.STATUS_ZOMBIE


def test_a_program_that_ends_leaves_no_server_behind_and_says_nothing(tmp_path):
    configured(tmp_path, {"stage": STDIO})
    close_connections()
    program = (
        "import asyncio, sys; from etude.tools import load_tools\n"
        "tools = {tool.name: tool for tool in load_tools(sys.argv[1])}\n"
        "print(asyncio.run(tools['process'].execute('i', {}))[0].text)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "tools.yaml")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert not psutil.pid_exists(int(done.stdout))


def test_with_the_schemas_at_hand_no_server_is_asked_before_the_first_call(tmp_path):
    known = configured(tmp_path, {"stage": STDIO}, tool_selected_list=["add", "wait"])
    write_json(tmp_path / "schemas.json", [tool.get_openai_tool_schema().to_openai() for tool in known.values()])
    close_connections()
    tools = configured(tmp_path, {"stage": STDIO}, tool_schemas_path="schemas.json")
    assert stdio_servers() == []
    assert {name: tool.tool_schema for name, tool in tools.items()} == {n: t.tool_schema for n, t in known.items()}
    assert text_of(tools["add"], a=1) == "2"
    close_connections()
    with pytest.raises(ConfigError, match="tool_schemas_path of several servers needs prefix: true"):
        configured(tmp_path, {"one": STDIO, "two": STDIO}, tool_schemas_path="schemas.json")
    with pytest.raises(ConfigError, match="no server of 'add' is configured"):
        configured(tmp_path, {"one": STDIO, "two": STDIO}, tool_schemas_path="schemas.json", prefix=True)


def test_a_recorded_server_need_not_exist_any_more(tmp_path):
    """Record with the server, replay without it: the schemas and the calls are all that a run needs."""
    record = {"record": str(tmp_path / "calls.jsonl")}
    tools = configured(tmp_path, {"stage": STDIO}, config=record, tool_selected_list=["add"])
    write_json(tmp_path / "schemas.json", [tools["add"].get_openai_tool_schema().to_openai()])

    async def run(tools):
        async with ToolSession(tools, request_id="r") as session:
            return [outcome.response.text for outcome in await session.execute(
                [FunctionCall(name="add", arguments='{"a": 20, "b": 22}')], 0)]  # fmt: skip

    assert asyncio.run(run(tools)) == ["42"]
    close_connections()
    replay = {"replay": str(tmp_path / "calls.jsonl")}
    gone = {"stage": {"command": "a-server-that-is-gone"}}
    replayed = configured(tmp_path, gone, config=replay, tool_schemas_path="schemas.json")
    assert asyncio.run(run(replayed)) == ["42"]


def png(width, height):
    file = io.BytesIO()
    PIL.Image.new("L", (width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_content_of_every_kind():
    image = mcp_types.ImageContent(type="image", data=png(3, 2), mime_type="image/png")
    broken = [
        mcp_types.ImageContent(type="image", data=data, mime_type="image/png")
        for data in ("not base64!", base64.b64encode(b"no image").decode(), png(9000, 9000))
    ]
    text = mcp_types.TextResourceContents(uri="file:///a.txt", text="in a file", mime_type="text/plain")
    blob = mcp_types.BlobResourceContents(uri="file:///a.bin", blob="AAAA", mime_type="application/octet-stream")
    response = read_content(
        [
            mcp_types.TextContent(type="text", text="first"),
            image,
            *broken,
            mcp_types.EmbeddedResource(type="resource", resource=text),
            mcp_types.EmbeddedResource(type="resource", resource=blob),
            mcp_types.ResourceLink(type="resource_link", uri="http://h/x", name="x"),
            mcp_types.AudioContent(type="audio", data="AAAA", mime_type="audio/wav"),
        ]
    )
    assert [picture.size for picture in response.image] == [(3, 2)]
    lines = response.text.splitlines()
    assert lines[0] == "first"
    assert all(line.startswith("[image/png, not shown: ") for line in lines[1:4])
    assert "9000 x 9000" in lines[3]
    assert lines[4:] == [
        "in a file",
        "[resource file:///a.bin, application/octet-stream]",
        "[resource http://h/x: x]",
        "[audio content, which cannot be shown]",
    ]


def test_an_answer_of_many_images_and_one_of_nothing():
    image = mcp_types.ImageContent(type="image", data=png(1, 1), mime_type="image/png")
    response = read_content([image] * 40)
    assert len(response.image) == 32
    assert response.text.count("more than 32 images") == 8
    large = mcp_types.ImageContent(type="image", data=png(6000, 6000), mime_type="image/png")
    response = read_content([large, large, image])  # 36 million pixels each
    assert [picture.size for picture in response.image] == [(6000, 6000), (1, 1)]
    assert "[image/png, not shown: an image of 6000 x 6000 pixels, and one answer's images have" in response.text
    assert read_content([]).is_empty()


def test_a_malformed_image_is_told_and_a_machine_that_cannot_read_is_infrastructure(monkeypatch):
    held = io.BytesIO()
    PIL.Image.new("L", (24, 18)).save(held, "TIFF")
    data = held.getvalue().replace(b"\x11\x01\x04\x00", b"\x11\x01\x0c\x00", 1)  # its offsets as float64
    broken = mcp_types.ImageContent(type="image", data=base64.b64encode(data).decode(), mime_type="image/tiff")
    assert read_content([broken]).text.startswith("[image/tiff, not shown: ")

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("PIL.Image.open", refuse)
    with pytest.raises(InfrastructureError, match=r"cannot be read now: .*Too many open files"):
        read_content([broken])


async def test_a_retry_reconnects(tmp_path):
    """The server dies of every third call; each of four is answered all the same."""
    server = STDIO | {"env": {"STAGE_CALLS": "2"}}
    tools = configured(tmp_path, {"stage": server}, config={"max_retries": 5, "retry_delay": 0.05})
    async with ToolSession(tools, request_id="r") as session:
        call = FunctionCall(name="calculator", arguments='{"expression": "2 + 3"}')
        outcomes = [(await session.execute([call], turn))[0] for turn in range(4)]
    assert [(outcome.response.text, outcome.error) for outcome in outcomes] == [("5", None)] * 4
    assert sum(outcome.retries for outcome in outcomes) >= 1
    close_connections()


FICKLE = """
import os, sys, pathlib
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server, before = MCPServer("fickle", log_level="ERROR"), pathlib.Path(sys.argv[1])


def look(word: str) -> str:
    if sys.argv[2] == "forgets":
        server.remove_tool("look")
    elif sys.argv[2] == "refuses":
        raise ToolError("no such tool is known for " + word)
    else:
        os._exit(3)
    return "seen"


def look_again(words: list[str]) -> str:
    return "seen"


if sys.argv[2] == "renames" and before.exists():
    server.tool(name="find", structured_output=False)(look)
elif sys.argv[2] == "changes" and before.exists():
    server.tool(name="look", structured_output=False)(look_again)
else:
    server.tool(name="look", structured_output=False)(look)
before.touch()
server.run("stdio")
"""


@pytest.fixture
def fickle(tmp_path):
    """Makes the tool of a server that behaves so."""
    script = tmp_path / "fickle.py"
    script.write_text(FICKLE)
    command = {"command": sys.executable, "args": [str(script), str(tmp_path / "started")]}
    close_connections()
    yield lambda how: configured(tmp_path, {"fickle": command | {"args": [*command["args"], how]}})["look"]
    close_connections()


@pytest.mark.parametrize("how", ["forgets", "renames", "changes"])
def test_a_tool_that_its_server_no_longer_has_as_prompts_show_it_is_no_mistake_of_the_models(fickle, how):
    tool = fickle(how)
    if how == "forgets":
        assert text_of(tool, word="x") == "seen"
    else:
        with pytest.raises(InfrastructureError):  # it dies
            execute(tool, word="x")
    for _ in range(2):
        with pytest.raises(InfrastructureError, match="look"):
            execute(tool, word="x")
    if how == "changes":  # a new start of a run takes the tool as it now is
        assert text_of(fickle(how), words=["x"]) == "seen"


def test_servers_without_any_tool_are_no_tools(tmp_path):
    (tmp_path / "bare.py").write_text(
        "from mcp.server import MCPServer\nMCPServer('bare', log_level='ERROR').run('stdio')"
    )
    with pytest.raises(ConfigError, match="no tool is listed by MCP server 'bare'"):
        configured(tmp_path, {"bare": {"command": sys.executable, "args": [str(tmp_path / "bare.py")]}})
    close_connections()


def test_a_tools_own_words_about_tools_are_for_the_model(fickle):
    with pytest.raises(ToolError, match="no such tool is known"):
        execute(fickle("refuses"), word="x")


def test_a_server_beside_its_configuration_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    shutil.copy(STDIO["args"][0], tmp_path / "mine" / "server.py")
    monkeypatch.chdir(tmp_path)
    assert configured(tmp_path / "mine", {"stage": STDIO | {"args": ["server.py", "stdio"]}})
