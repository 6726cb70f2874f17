"""`code_interpreter`: what the model reads in every case, both kinds of state, both kinds of sandbox, and its limits."""

import asyncio
import shutil
import time

import pytest
import yaml
from aiohttp import web

from etude.errors import ConfigError, InfrastructureError, ToolError
from etude.sandbox import CellError, CellResult, Limits, RunResult, RunStatus, SandboxError
from etude.schemas import OpenAIFunctionToolSchema
from etude.tools import load_tools
from etude.tools.builtin import builtin_config
from etude.tools.builtin.code_interpreter import (
    MAX_STDERR_CHARS,
    NOTHING,
    SandboxFusionTool,
    cell_report,
    run_report,
    tail,
)

pytestmark = pytest.mark.usefixtures("isolation")

SCHEMA_003 = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "A tool for executing code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to execute.", "enum": None}},
            "required": ["code"],
        },
        "strict": False,
    },
}


@pytest.fixture
def tool():
    """`tool(**config)` makes one, whose sandbox is closed after the test."""
    made = []

    def make(**config):
        made.append(SandboxFusionTool({"num_workers": 4, **config}))
        return made[-1]

    yield make
    for each in made:
        if each._client is not None:
            each._client.close()


@pytest.fixture(scope="module")
def shared():
    """One stateless tool for the tests that only ask what it says."""
    made = SandboxFusionTool({"num_workers": 4, "default_timeout": 10, "memory_limit_mb": 256})
    yield made
    made._client.close()


async def said(tool, code, instance="i", **parameters):
    response, reward, _ = await tool.execute(instance, {"code": code, **parameters})
    assert reward == 0.0
    return response.text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(1 + 1)", "2"),
        ("total = 200000\ntotal * 1.1 // 1", "220000.0"),
        ("print('a')\n'b'", "a\n'b'"),
        ("x = 1", NOTHING),
        ("None", NOTHING),
        ("```python\nprint(3)\n```", "3"),
        ("```\n4\n```", "4"),
        (7, "7"),
        ("import sys; print('w', file=sys.stderr); print('o')", "o\nw"),
        ("raise SystemExit(3)", "(ended with exit status 3 and no error message)"),
        ("import sys; print('x'); sys.exit('bad')", "x\nbad"),
        ("import os; os.kill(os.getpid(), 11)", "(killed by SIGSEGV)"),
        ("if __name__ == '__main__':\n    print('main')", "main"),
        ("class A: pass\nimport pickle\nprint(pickle.loads(pickle.dumps(A())).__class__.__name__)", "A"),
        ("open('.source.py')", "No such file or directory: '.source.py'"),
        ("print('é')", "é"),
    ],
)
async def test_what_the_model_reads(shared, code, text):
    read = await said(shared, code)
    assert read == text if "\n" in text else read.endswith(text)


async def test_an_error_reads_as_if_the_code_were_the_program(shared):
    text = await said(shared, "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)")
    assert text.startswith("before\nTraceback (most recent call last):\n")
    assert 'File "<code>", line 5, in <module>\n    f(0)' in text
    assert 'File "<code>", line 2, in f\n    return 1 / x' in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "main.py" not in text
    assert "echo" not in text


@pytest.mark.parametrize("code", ["def f(:", "x = (", "print(1", "'\ud800'", "\0", "(" * 2000])
async def test_code_that_is_no_python(shared, code):
    text = await said(shared, code)
    assert "Error" in text
    assert "main.py" not in text


async def test_a_long_error_is_shown_from_its_useful_end(shared):
    text = await said(shared, "def f(n): return f(n + 1)\nimport sys\nsys.stderr.write('noise\\n' * 10000)\nf(0)")
    assert text.endswith("RecursionError: maximum recursion depth exceeded")
    assert len(text) < MAX_STDERR_CHARS + 100


async def test_a_program_out_of_time_says_so_and_keeps_its_output(shared):
    text = await said(shared, "print('so far', flush=True)\nwhile True: pass", timeout=0.5)
    assert text == "so far\n(timed out after 0.5 s)"


async def test_a_program_out_of_memory_says_so(shared):
    text = await said(shared, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert "MemoryError" in text or "more than 256 MiB" in text


async def test_calls_share_nothing(shared):
    await said(shared, "x = 1; open('f', 'w').write('1')")
    assert "NameError" in await said(shared, "x")
    assert "FileNotFoundError" in await said(shared, "open('f')")


@pytest.mark.slow
async def test_other_languages(shared):
    assert await said(shared, "echo $((1 + 1))", language="bash") == "2"
    assert await said(shared, "exit 4", language="bash") == "(ended with exit status 4 and no error message)"
    with pytest.raises(ToolError, match="unknown language 'cobol'; use one of python, bash"):
        await said(shared, "x", language="cobol")
    if shutil.which("g++"):
        text = await said(shared, "int main() { return x; }", language="cpp")
        assert text.startswith("(compilation failed)\n")
        assert "x" in text


@pytest.mark.parametrize("timeout", [0, -1, "soon", True, None])
async def test_a_timeout_that_makes_no_sense_is_told(shared, timeout):
    with pytest.raises(ToolError, match="'timeout' must be a number of seconds"):
        await said(shared, "1", timeout=timeout)


async def test_a_timeout_is_never_longer_than_the_configured_one(tool):
    text = await said(tool(default_timeout=0.5), "while True: pass", timeout=1000)
    assert text == "(timed out after 0.5 s)"


@pytest.mark.parametrize("code", [None, [], {"a": 1}, True, "", "   \n"])
async def test_no_code_is_told(shared, code):
    with pytest.raises(ToolError, match="the argument 'code' must be"):
        await said(shared, code)


async def test_too_much_code_is_told(tool):
    with pytest.raises(ToolError, match="longer than 10 characters"):
        await said(tool(max_code_chars=10), "print('hello world')")


async def test_metrics_say_how_it_went(shared):
    _, _, metrics = await shared.execute("i", {"code": "raise SystemExit(2)"})
    assert (metrics["status"], metrics["return_code"]) == ("finished", 2)
    assert metrics["seconds"] >= 0


class TestStateful:
    async def test_variables_live_from_call_to_call_and_no_longer(self, tool):
        stateful = tool(stateful=True)
        first, _ = await stateful.create()
        second, _ = await stateful.create("mine")
        assert second == "mine"
        assert await said(stateful, "x = 20", first) == NOTHING
        assert await said(stateful, "print('hi')\nx + 1", first) == "hi\n21"
        assert "NameError" in await said(stateful, "x", second)
        session = stateful._instance_dict[first].session
        for instance in (first, second):
            await stateful.release(instance)
        with pytest.raises(KeyError):
            await stateful._sandbox().run_cell(session, "x", 5)
        await stateful.release("never created")

    async def test_a_cell_out_of_time_is_interrupted(self, tool):
        stateful = tool(stateful=True, default_timeout=0.5)
        instance, _ = await stateful.create()
        await said(stateful, "x = 5", instance)
        text = await said(stateful, "print('so far')\nwhile True: pass", instance)
        assert text == "so far\n(timed out after 0.5 s)"
        assert await said(stateful, "x", instance) == "5"
        await stateful.release(instance)

    async def test_an_interpreter_that_ends_is_replaced_and_the_model_told(self, tool):
        stateful = tool(stateful=True)
        instance, _ = await stateful.create()
        await said(stateful, "x = 1", instance)
        text = await said(stateful, "import os; os._exit(0)", instance)
        assert "(the interpreter ended: its variables are lost, the next call starts a new one)" in text
        assert "NameError" in await said(stateful, "x", instance)
        await stateful.release(instance)

    async def test_a_session_that_is_lost_is_infrastructure_for_good_and_no_cell_runs_elsewhere(self, tool, tmp_path):
        stateful = tool(stateful=True)
        instance, _ = await stateful.create()
        await said(stateful, "x = 1", instance)
        await stateful._sandbox().close_session(stateful._instance_dict[instance].session)  # as one idle for long is
        for _ in range(3):  # `max_retries` calls again
            with pytest.raises(InfrastructureError, match="the trajectory has lost its interpreter"):
                await said(stateful, "print(2)", instance)
        await stateful.release(instance)
        again, _ = await stateful.create()
        assert await said(stateful, "print(2)", again) == "2"
        await stateful.release(again)

    async def test_a_call_that_was_cut_off_is_not_sent_again(self, tool):
        stateful = tool(stateful=True)
        instance, _ = await stateful.create()
        await said(stateful, "n = 0", instance)
        task = asyncio.create_task(said(stateful, "n += 1\nimport time; time.sleep(60)", instance))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(InfrastructureError, match="the trajectory has lost its interpreter"):
            await said(stateful, "n", instance)
        await stateful.release(instance)

    async def test_an_answer_that_never_came_is_not_asked_for_again(self, tool, serve):
        """A server that breaks off while the cell may be running sees each cell once."""
        cells = []

        async def answer(request):
            body = await request.json()
            if "code" not in body:
                return web.json_response({"session_id": f"s{len(cells)}"})
            cells.append(body["code"])
            request.transport.abort()
            return web.Response()

        stateful = tool(stateful=True, sandbox_fusion_url=await serve(answer, ""))
        instance, _ = await stateful.create()
        for _ in range(3):
            with pytest.raises(InfrastructureError):
                await said(stateful, "x += 1", instance)
        assert cells == ["x += 1"]

    async def test_calls_of_one_turn_run_one_after_the_other(self, tool):
        stateful = tool(stateful=True)
        instance, _ = await stateful.create()
        await said(stateful, "n = 0", instance)
        await asyncio.gather(
            *(said(stateful, "m = n; import time; time.sleep(0.01); n = m + 1", instance) for _ in range(8))
        )
        assert await said(stateful, "n", instance) == "8"
        await stateful.release(instance)

    async def test_images_are_shown(self, tool):
        pytest.importorskip("PIL")
        stateful = tool(stateful=True)
        instance, _ = await stateful.create()
        code = (
            "import struct, zlib\n"
            "def chunk(kind, data):\n"
            "    body = kind + data\n"
            "    return struct.pack('>I', len(data)) + body + struct.pack('>I', zlib.crc32(body))\n"
            "class Picture:\n"
            "    def _repr_png_(self):\n"
            "        head = chunk(b'IHDR', struct.pack('>IIBBBBB', 3, 2, 8, 2, 0, 0, 0))\n"
            "        rows = chunk(b'IDAT', zlib.compress((b'\\0' + b'\\xff\\0\\0' * 3) * 2))\n"
            "        return b'\\x89PNG\\r\\n\\x1a\\n' + head + rows + chunk(b'IEND', b'')\n"
            "Picture()"
        )
        response, _, _ = await stateful.execute(instance, {"code": code})
        (image,) = response.image
        assert (image.size, image.getpixel((0, 0))) == ((3, 2), (255, 0, 0))
        assert "(1 image shown)" in response.text
        broken = "class B:\n    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\nnonsense'\nB()"
        response, _, _ = await stateful.execute(instance, {"code": broken})
        assert response.image is None
        await stateful.release(instance)

    async def test_only_python_has_state(self):
        with pytest.raises(ConfigError, match="only Python keeps its variables"):
            SandboxFusionTool({"stateful": True, "default_language": "bash"})


class TestLimits:
    async def test_no_more_than_num_workers_run_at_once(self, tool):
        limited = tool(num_workers=2, rate_limit=5, rate_limiter_name="workers")
        tasks = [asyncio.create_task(said(limited, "import time; time.sleep(0.2)")) for _ in range(6)]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, limited._here.held)
            await asyncio.sleep(0.01)
        assert most == 2
        assert limited._here.held == limited._here.waiting == 0

    async def test_the_rate_limit_is_one_for_all_tools_of_a_name(self, tool):
        first = tool(rate_limit=1, rate_limiter_name="one")
        second = tool(rate_limit=1, rate_limiter_name="one")
        free = tool(rate_limit=1, rate_limiter_name="one", enable_global_rate_limit=False)
        began = time.monotonic()
        await asyncio.gather(*(said(each, "import time; time.sleep(0.3)") for each in (first, second)))
        assert time.monotonic() - began >= 0.6
        assert first._everywhere is second._everywhere
        await said(free, "1")
        assert free._everywhere is None

    async def test_conflicting_limits_are_an_error(self, tool):
        first = tool(rate_limit=1, rate_limiter_name="conflict")
        await said(first, "1")
        with pytest.raises(ConfigError, match="'conflict' allows 1 at once already; 2 at once is asked for"):
            await said(tool(rate_limit=2, rate_limiter_name="conflict"), "1")

    async def test_a_cancelled_call_gives_its_permits_back(self, tool):
        limited = tool(num_workers=1, rate_limit=1, rate_limiter_name="cancelled")
        task = asyncio.create_task(said(limited, "import time; time.sleep(60)"))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.wait_for(said(limited, "print(1)"), 30) == "1"


class TestAServer:
    """`sandbox_fusion_url`: any server of Sandbox Fusion's interface."""

    async def test_its_answers_are_read(self, tool, serve):
        bodies = []

        async def answer(request):
            bodies.append(await request.json())
            run = {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": "", "execution_time": 0.1}
            return web.json_response({"status": "Success", "message": "", "run_result": run, "files": {}})

        remote = tool(sandbox_fusion_url=await serve(answer, "/run_code"), default_timeout=7, memory_limit_mb=99)
        assert await said(remote, "print(6 * 7)") == "42"
        (body,) = bodies
        assert (body["language"], body["run_timeout"], body["memory_limit_MB"]) == ("python", 7, 99)


def load_yaml(tmp_path, entry):
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [entry]}), encoding="utf-8")
    return load_tools(file)


class TestConfiguration:
    def test_the_ready_configuration_loads(self):
        (made,) = load_tools(builtin_config("code_interpreter"))
        assert isinstance(made, SandboxFusionTool)
        assert made.name == "code_interpreter"
        assert made.get_openai_tool_schema().function.parameters.required == ["code"]

    def test_the_documents_configuration_loads(self, tmp_path):
        config = {
            "sandbox_fusion_url": "http://127.0.0.1:8080/run_code",
            "num_workers": 10,
            "enable_global_rate_limit": True,
            "rate_limit": 10,
            "default_timeout": 30,
            "default_language": "python",
            "memory_limit_mb": 1024,
            "type": "native",
        }
        name = "etude.tools.builtin.code_interpreter.SandboxFusionTool"
        (made,) = load_yaml(tmp_path, {"class_name": name, "config": config, "tool_schema": SCHEMA_003})
        assert made.get_openai_tool_schema() == OpenAIFunctionToolSchema.model_validate(SCHEMA_003)
        made._client.close()

    def test_its_type_is_enough(self, tmp_path):
        (made,) = load_yaml(tmp_path, {"config": {"type": "sandbox_fusion"}})
        assert isinstance(made, SandboxFusionTool)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"num_workers": 0}, "config.num_workers"),
            ({"rate_limit": "many"}, "config.rate_limit"),
            ({"default_timeout": -1}, "config.default_timeout"),
            ({"default_language": "cobol"}, "config.default_language"),
            ({"memory_limit_mb": 1}, "config.memory_limit_mb"),
            ({"sandbox_fusion_url": "localhost"}, "not of the form http://host:port"),
            ({"sandbox_url": "http://x"}, "unknown key config.sandbox_url"),
            ({"isolation": "perhaps"}, "config.isolation"),
        ],
    )
    def test_what_makes_no_sense_is_one_line(self, tmp_path, config, message):
        with pytest.raises(ConfigError, match=message):
            load_yaml(tmp_path, {"config": {"type": "sandbox_fusion", **config}})


LIMITS = Limits(wall_seconds=30, memory_mb=512)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (RunResult(RunStatus.FINISHED, 0, "out\n", ""), "out"),
        (RunResult(RunStatus.FINISHED, 0, "", ""), NOTHING),
        (RunResult(RunStatus.FINISHED, 1, "out\n", "E: no\n"), "out\nE: no"),
        (RunResult(RunStatus.FINISHED, -6, "", "abort"), "abort\n(killed by SIGABRT)"),
        (RunResult(RunStatus.FINISHED, -200, "", ""), "(killed by signal 200)"),
        (RunResult(RunStatus.TIME_LIMIT, None, "", ""), "(timed out after 30 s)"),
        (RunResult(RunStatus.MEMORY_LIMIT, None, "a", ""), "a\n(killed: it used more than 512 MiB of memory)"),
        (RunResult(RunStatus.KILLED, None, "", ""), "(killed: it interfered with its sandbox)"),
        (
            RunResult(RunStatus.COMPILE_FAILED, None, "", "", compile=RunResult(RunStatus.FINISHED, 1, "", "E")),
            "(compilation failed)\nE",
        ),
        (
            RunResult(RunStatus.COMPILE_FAILED, None, "", "", compile=RunResult(RunStatus.TIME_LIMIT, None, "", "")),
            "(the compiler timed out)",
        ),
    ],
)
def test_the_report_of_a_run(result, text):
    assert run_report(result, LIMITS) == text


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (CellResult(RunStatus.FINISHED, "", ""), NOTHING),
        (CellResult(RunStatus.FINISHED, "a\n", "w\n", text="1"), "a\n1\nw"),
        (CellResult(RunStatus.FINISHED, "", "", error=CellError("E", "v", "Trace\nE: v\n")), "Trace\nE: v"),
        (
            CellResult(RunStatus.TIME_LIMIT, "", "", error=CellError("KeyboardInterrupt", "", "KeyboardInterrupt")),
            "(timed out after 5 s)",
        ),
        (CellResult(RunStatus.FINISHED, "", "", images=(b"", b"")), "(2 images shown)"),
        (
            CellResult(RunStatus.MEMORY_LIMIT, "", "", session_alive=False),
            "(killed: it used more than 512 MiB of memory)\n"
            "(the interpreter ended: its variables are lost, the next call starts a new one)",
        ),
    ],
)
def test_the_report_of_a_cell(result, text):
    assert cell_report(result, LIMITS, 5) == text


def test_the_end_of_a_text_begins_with_a_whole_line():
    assert tail("short\n") == "short"
    lines = "\n".join(f"line {i}" for i in range(1000))
    assert tail(lines, 20) == "... (only the end)\nline 998\nline 999"
    assert tail("x" * 50, 20) == "... (only the end)\n" + "x" * 20


async def test_a_sandbox_that_fails_is_never_an_answer(tool, monkeypatch):
    failing = tool()

    async def broken(*_):
        raise SandboxError("no box")

    monkeypatch.setattr(failing._sandbox(), "run", broken)
    with pytest.raises(SandboxError):
        await said(failing, "print(1)")
    assert failing._here.held == 0


def test_cells_are_not_cached(tool):
    """A second trajectory, whose `x` is another, read the first one's `x + 1`."""
    for cache in ({}, {"path": "cells.db"}):
        with pytest.raises(ConfigError, match=r"config\.cache is for tools whose execute is pure, and with stateful"):
            tool(stateful=True, cache=cache)
    tool(cache={})
    tool(stateful=True, cache={"enabled": False})
    tool(stateful=True, cache={"path": "recorded.db", "only": True})  # of a recording: after the same earlier calls
