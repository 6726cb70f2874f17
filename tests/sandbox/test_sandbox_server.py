"""The server, started as a user starts it: Sandbox Fusion's interface, its own, and what it does when all goes wrong."""

import asyncio
import base64
import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from fastapi import HTTPException
from sandbox_fusion import async_client as fusion_async
from sandbox_fusion import client as fusion
from sandbox_fusion import models as fusion_models
from server_stage import PATIENCE, ServerProcess, in_background

from etude.cli.main import run as run_command
from etude.cli.sandbox import sandbox as sandbox_command
from etude.errors import ConfigError
from etude.sandbox import Isolation, Language
from etude.sandbox.fusion import RunCodeRequest, RunJupyterRequest
from etude.sandbox.service import SandboxService, ServerBusy, ServerOptions
from etude.serving import middleware
from etude.serving.listening import listen

pytestmark = pytest.mark.usefixtures("isolation")


def encoded(content):
    return base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--workers", "2", "--max-run-seconds", "60", "--memory-mb", "512") as process:
        yield process


def run_fusion(server, code, language="python", **fields):
    request = fusion_models.RunCodeRequest(code=code, language=language, **fields)
    return fusion.run_code(request, server.url, max_attempts=1, client_timeout=PATIENCE)


class TestSandboxFusionsClient:
    """The package `sandbox-fusion` of PyPI, unchanged."""

    def test_a_program_that_ends_well(self, server):
        answer = run_fusion(server, "import sys; print(input()); print('e', file=sys.stderr)", stdin="hello")
        assert answer.status is fusion_models.RunStatus.Success
        assert answer.message == ""
        assert answer.compile_result is None
        assert answer.run_result.status is fusion_models.CommandRunStatus.Finished
        assert (answer.run_result.return_code, answer.run_result.stdout) == (0, "hello\n")
        assert answer.run_result.stderr.strip() == "e"
        assert answer.run_result.execution_time > 0
        mapping = fusion_models.SummaryMapping(Success="good", RunTimeout="late")
        assert fusion.summary_run_code_result(answer, mapping) == "good"

    def test_a_program_that_fails(self, server):
        answer = run_fusion(server, "print('kept'); raise SystemExit(3)")
        assert answer.status is fusion_models.RunStatus.Failed
        assert (answer.run_result.return_code, answer.run_result.stdout) == (3, "kept\n")

    def test_a_program_that_takes_too_long(self, server):
        answer = run_fusion(server, "print('kept', flush=True)\nwhile True: pass", run_timeout=1)
        assert answer.status is fusion_models.RunStatus.Failed
        assert answer.run_result.status is fusion_models.CommandRunStatus.TimeLimitExceeded
        assert (answer.run_result.return_code, answer.run_result.stdout) == (None, "kept\n")
        mapping = fusion_models.SummaryMapping(RunTimeout="late")
        assert fusion.summary_run_code_result(answer, mapping) == "late"

    def test_files_go_in_and_come_out(self, server):
        code = "open('out.bin', 'wb').write(open('in/a.bin', 'rb').read()[::-1])"
        answer = run_fusion(server, code, files={"in/a.bin": encoded(b"\0\1\2")}, fetch_files=["out.bin", "missing"])
        assert answer.status is fusion_models.RunStatus.Success
        assert answer.files == {"out.bin": encoded(b"\2\1\0")}

    def test_bash(self, server):
        answer = run_fusion(server, "echo $((6 * 7)); cat", "bash", stdin="x")
        assert (answer.status, answer.run_result.stdout) == ("Success", "42\nx")

    def test_a_compiler(self, server):
        if "cpp" not in server.call("/health")[2]["languages"]:
            pytest.skip("no C++ compiler here")
        good = run_fusion(server, "#include <iostream>\nint main() { std::cout << 42; }", "cpp", compile_timeout=60)
        assert (good.status, good.compile_result.return_code, good.run_result.stdout) == ("Success", 0, "42")
        bad = run_fusion(server, "int main() { return x; }", "cpp", compile_timeout=60)
        assert (bad.status, bad.run_result) == (fusion_models.RunStatus.Failed, None)
        assert bad.compile_result.return_code != 0
        assert "x" in bad.compile_result.stderr
        mapping = fusion_models.SummaryMapping(CompileFailed="no")
        assert fusion.summary_run_code_result(bad, mapping) == "no"

    def test_a_language_that_is_not_there_is_the_sandboxs_failure(self, server):
        with pytest.raises(Exception, match="'sql' is not installed on this server"):
            run_fusion(server, "select 1", "sql")

    def test_cells(self, server):
        cells = [
            "a = 123",
            "a",
            "print(a)",
            'import sys; sys.stderr.write("oops")',
            'raise RuntimeError("no")',
            "a + 1",
        ]
        request = fusion_models.RunJupyterRequest(cells=cells, files={"x": encoded(b"1")}, fetch_files=["x"])
        answer = fusion.run_jupyter(request, server.url, max_attempts=1, client_timeout=PATIENCE)
        assert answer.status is fusion_models.RunStatus.Success
        assert answer.driver.status is fusion_models.CommandRunStatus.Finished
        assert [cell.stdout for cell in answer.cells] == ["", "", "123\n", "", "", ""]
        assert answer.cells[1].display == [{"text/plain": "123"}]
        assert answer.cells[3].stderr == "oops"
        (error,) = answer.cells[4].error
        assert (error["ename"], error["evalue"]) == ("RuntimeError", "no")
        assert any("RuntimeError" in line for line in error["traceback"])
        assert answer.cells[5].display == [{"text/plain": "124"}], "cells go on after an error"
        assert answer.files == {"x": encoded(b"1")}

    def test_cells_out_of_time_keep_what_was_done(self, server):
        request = fusion_models.RunJupyterRequest(cells=["print(1)", "while True: pass", "print(3)"], total_timeout=2)
        answer = fusion.run_jupyter(request, server.url, max_attempts=1, client_timeout=PATIENCE)
        assert answer.status is fusion_models.RunStatus.Failed
        assert answer.driver.status is fusion_models.CommandRunStatus.TimeLimitExceeded
        assert answer.cells[0].stdout == "1\n"

    def test_each_request_has_a_fresh_session(self, server):
        for cells in (["leak = 1"], ["leak"]):
            request = fusion_models.RunJupyterRequest(cells=cells)
            answer = fusion.run_jupyter(request, server.url, max_attempts=1, client_timeout=PATIENCE)
        assert answer.cells[0].error[0]["ename"] == "NameError"

    async def test_the_asynchronous_client(self, server):
        requests = [fusion_models.RunCodeRequest(code=f"print({i})", language="python") for i in range(12)]
        answers = await asyncio.gather(
            *(fusion_async.run_code(request, server.url, max_attempts=1) for request in requests)
        )
        assert [answer.run_result.stdout for answer in answers] == [f"{i}\n" for i in range(12)]


def test_one_cells_own_time_limit(server):
    body = {"cells": ["while True: pass", "print('on')"], "cell_timeout": 1, "total_timeout": 30}
    answer = server.call("/run_jupyter", body)[2]
    assert answer["status"] == "Failed"
    assert answer["cells"][1]["stdout"] == "on\n", "the session survives an interrupted cell"


def test_ping_pages_and_redirect(server):
    assert server.call("/v1/ping")[2] == "pong"
    assert "openapi" in server.call("/openapi.json")[2]
    assert server.call("/")[0] == 200
    schema = server.call("/openapi.json")[2]["components"]["schemas"]
    assert {"run_timeout", "compile_timeout", "memory_limit_MB", "stdin", "files"} <= set(
        schema["RunCodeRequest"]["properties"]
    )
    health = server.call("/health")[2]
    assert (health["status"], health["workers"]) == ("ok", 2)
    assert health["isolation"] in ("bubblewrap", "namespaces")
    assert health["isolation"] in server.greeting


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"files": {"/etc/passwd": encoded(b"")}}, 400, "'/etc/passwd' is absolute"),
        ({"files": {"a/../../b": encoded(b"")}}, 400, "leaves the work directory; '..' is not allowed"),
        ({"fetch_files": ["/etc/passwd"]}, 400, "'/etc/passwd' is absolute"),
        ({"fetch_files": ["../x"]}, 400, "leaves the work directory"),
        ({"files": {"a": "no base64!"}}, 400, "the content of 'a' is not base64"),
        ({"run_timeout": 1000}, 400, "run_timeout: 1000 s is above this sandbox's 60 s"),
        ({"compile_timeout": 1000, "language": "c"}, 400, "compile_timeout: 1000 s is above this server's 120 s"),
        ({"memory_limit_MB": 4096}, 400, "memory_limit_MB: 4096 is above this sandbox's 512"),
        ({"memory_limit_MB": 0}, 400, "must be from 1, or -1 for the default"),
        ({"args": ["a", "\0"]}, 400, "args: argument 1 holds a NUL character"),
        ({"args": ["\ud800"]}, 400, "args: argument 0 is not valid UTF-8"),
        ({"args": ["x" * 200_000], "language": "bash"}, 400, "args: argument 0 has 200000 bytes"),
        ({"args": ["x"] * 200_000, "language": "bash"}, 400, "args: 200000 arguments take 2000000 bytes"),
        ({"run_timeout": -1}, 422, "greater than 0"),
        ({"run_timeout": "soon"}, 422, "valid number"),
        ({"language": "klingon"}, 422, "unknown language 'klingon'"),
        ({"code": None}, 422, "valid string"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_the_reason(server, fields, status, message):
    answer = server.call("/run_code", {"code": "print(1)", "language": "python", **fields})
    assert answer[0] == status
    assert message in json.dumps(answer[2])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[" * 100_000, 422),
        (b'{"code": "1", "language": "python", "run_timeout": NaN}', 422),
        (b'{"code": "1", "language": "\xff\xfe"}', 400),
    ],
)
def test_a_body_that_is_no_request(server, body, status):
    answer = server.call("/run_code", body)
    assert answer[0] in (status, 400, 422)
    assert "detail" in answer[2]


def test_the_most_arguments_reach_a_program(server):
    args = ["é" * 40_000] * 12
    assert server.run("echo $#", "bash", args=args)["run_result"]["stdout"] == "12\n"


def test_a_compilers_time_is_not_asked_for_where_nothing_is_compiled(server):
    assert server.run("print(1)", compile_timeout=1e9)["status"] == "Success"


def test_files_come_back_under_the_names_they_were_asked_for_by(server):
    code = "import os; os.makedirs('a'); open('a/b', 'w').write('1'); open('c', 'w').write('2')"
    names = ["a//b", "./a/./b", "a/b", "./c"]
    expected = {"a//b": encoded(b"1"), "./a/./b": encoded(b"1"), "a/b": encoded(b"1"), "./c": encoded(b"2")}
    assert server.run(code, fetch_files=names)["files"] == expected
    assert server.call("/run_jupyter", {"cells": [code], "fetch_files": names})[2]["files"] == expected


def test_text_of_every_kind_survives(server):
    text = "ünïcödé \U0001f40d \u2028 \x00 end"
    answer = server.run(f"print({text!r})")
    assert answer["run_result"]["stdout"] == text + "\n"
    binary = server.run("import sys; sys.stdout.buffer.write(bytes(range(256)))")
    assert binary["status"] == "Success"
    assert "�" in binary["run_result"]["stdout"]


def test_text_that_no_encoding_has_is_the_codes_failure(server):
    for code in ("print('\\ud800')", "\ud800", "print(1)\0"):
        assert server.run(code)["status"] == "Failed"
    hostile = ["raise ValueError('\\ud800')", "type('A', (), {'__repr__': lambda self: '\\udcff'})()"]
    status, _, answer = server.call("/run_jupyter", {"cells": hostile})
    assert (status, answer["status"]) == (200, "Success")
    assert answer["cells"][0]["error"][0]["ename"] == "ValueError"
    assert answer["cells"][1]["display"]


def test_sessions_keep_variables_from_call_to_call(server):
    status, _, answer = server.call("/v1/sessions", {"files": {"data.txt": encoded(b"41")}})
    assert status == 200
    path = f"/v1/sessions/{answer['session_id']}/cells"
    assert server.call(path, {"code": "n = int(open('data.txt').read())"})[2]["status"] == "finished"
    cell = server.call(path, {"code": "print('hi')\nn + 1"})[2]
    assert cell["cell"]["display"] == [{"text/plain": "42"}]
    assert cell["cell"]["stdout"] == "hi\n"
    assert cell["session_alive"]
    late = server.call(path, {"code": "while True: pass", "timeout": 0.5})[2]
    assert (late["status"], late["session_alive"]) == ("time_limit", True)
    assert server.call(f"/v1/sessions/{answer['session_id']}", method="DELETE")[0] == 204
    assert server.call(path, {"code": "n"})[0] == 404
    assert server.call(f"/v1/sessions/{answer['session_id']}", method="DELETE")[0] == 204


def test_requests_are_counted_by_outcome(server):
    def count(outcome):
        return server.metric("etude_sandbox_requests_total", endpoint="run_code", outcome=outcome)

    before = {outcome: count(outcome) for outcome in ("success", "failed", "refused", "sandbox_error")}
    server.run("print(1)")
    server.run("raise SystemExit(1)")
    server.run("x", "sql")
    server.call("/run_code", {"code": "", "language": "python", "files": {"/a": ""}})
    assert {outcome: count(outcome) - before[outcome] for outcome in before} == dict.fromkeys(before, 1.0)
    assert server.metric("etude_sandbox_request_seconds_count", endpoint="run_code") > 0
    assert server.metric("etude_sandbox_running") == 0


def test_a_client_that_hangs_up_ends_its_run(server):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"code": "while True: pass", "language": "python", "run_timeout": 50}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /run_code HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        server.until(lambda: server.metric("etude_sandbox_running") == 1, "the run did not start")
    server.until(lambda: server.metric("etude_sandbox_running") == 0, "the run goes on")
    assert server.metric("etude_sandbox_requests_total", endpoint="run_code", outcome="abandoned") == 1


def test_many_at_once_each_get_their_own_answer(server):
    def one(i):
        if i % 10 == 3:
            return server.run("import os\nos.kill(os.getppid(), 9)\nwhile True: os.fork()", run_timeout=2)
        return server.run(f"print({i} * {i})", run_timeout=30)["run_result"]["stdout"]

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(one, range(60)))
    for i, answer in enumerate(answers):
        if i % 10 == 3:
            assert answer["status"] == "Failed"
        else:
            assert answer == f"{i * i}\n"


class TestATightServer:
    """One worker, room for two, a token, a small body."""

    @pytest.fixture(scope="class")
    def tight(self):
        options = ("--workers", "1", "--max-concurrency", "2", "--queue-seconds", "0.5", "--max-request-mb", "1")
        with ServerProcess(*options, env={"ETUDE_SANDBOX_TOKEN": "s3cret"}) as process:
            yield process

    def run(self, server, code, **fields):
        body = {"code": code, "language": "python", **fields}
        return server.call("/run_code", body, headers={"Authorization": "Bearer s3cret"})

    def test_a_token_is_needed(self, tight):
        body = {"code": "print(1)", "language": "python"}
        assert tight.call("/run_code", body)[0] == 401
        for wrong in ("Bearer s3cre", "Bearer s3crett", "s3cret", "Basic s3cret", "Bearer \xff"):
            assert tight.call("/run_code", body, headers={"Authorization": wrong})[0] == 401
        assert tight.call("/metrics")[0] == 401
        assert tight.call("/docs")[0] == 401
        assert tight.call("/v1/ping")[2] == "pong"
        assert tight.call("/health")[0] == 200
        assert self.run(tight, "print(1)")[0] == 200

    def test_a_large_body_is_refused_unread(self, tight):
        status, _, answer = self.run(tight, "#" * (1 << 20))
        assert (status, answer["detail"]) == (413, "the request is larger than 1 MiB")

    @pytest.mark.slow
    def test_a_large_body_of_no_announced_length_is_refused(self, tight):
        host, port = tight.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            head = "POST /run_code HTTP/1.1\r\nHost: [::1]\r\nAuthorization: Bearer s3cret\r\nTransfer-Encoding: chunked\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
            chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            answer = b""
            try:
                for _ in range(40):
                    connection.sendall(chunk)
                answer = connection.recv(1000)
            except (BrokenPipeError, ConnectionResetError):
                answer = answer or connection.recv(1000)
        assert b" 413 " in answer.splitlines()[0]

    def test_who_waits_too_long_or_finds_no_room_shall_come_again(self, tight):
        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(self.run, tight, "import time; time.sleep(3)", run_timeout=20)
            tight.until(lambda: tight.call("/health")[2]["running"] == 1, "the run did not start")
            others = list(threads.map(lambda _: self.run(tight, "print(1)"), range(3)))
            assert first.result()[2]["status"] == "Success"
        refused = [answer for answer in others if answer[0] == 429]
        assert refused
        reasons = {"2 requests are in progress, which is the maximum", "no worker was free within 0.5 s"}
        assert {answer[2]["detail"] for answer in refused} <= reasons
        assert all(int({k.lower(): v for k, v in headers.items()}["retry-after"]) >= 1 for _, headers, _ in refused)
        assert self.run(tight, "print(1)")[2]["status"] == "Success"


async def test_a_full_queue_and_a_long_wait():
    service = SandboxService(Stuck(), ServerOptions(max_concurrency=2, queue_seconds=0.05))

    async def stay(until):
        async with service.worker():
            await until.wait()

    end = asyncio.Event()
    first = asyncio.create_task(stay(end))
    second = asyncio.create_task(stay(end))
    while service.running < 1:
        await asyncio.sleep(0)
    assert (service.running, service.waiting) == (1, 1)
    with pytest.raises(ServerBusy, match="2 requests are in progress"):
        await stay(end)
    with pytest.raises(ServerBusy, match=r"no worker was free within 0\.05 s"):
        await second
    assert (service.running, service.waiting) == (1, 0)
    third = asyncio.create_task(stay(end))
    await asyncio.sleep(0.01)
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    end.set()
    await first
    await stay(end)
    assert (service.running, service.waiting) == (0, 0)


class Stuck:
    """An executor that never answers."""

    workers = 1
    languages = tuple(Language)
    isolation = Isolation.NONE

    async def run(self, request):
        await asyncio.sleep(PATIENCE)

    async def session(self, **_):
        await asyncio.sleep(PATIENCE)


async def test_a_request_has_a_deadline_whatever_the_sandbox_does():
    service = SandboxService(Stuck(), ServerOptions(grace_seconds=0.05))
    message = RunCodeRequest(code="1", language="python", run_timeout=0.05, compile_timeout=0.05)
    answer = await service.run_code(message)
    assert (answer.status, answer.message) == ("SandboxError", "no result within 0.15 s")
    cells = await service.run_jupyter(RunJupyterRequest(cells=["1"], total_timeout=0.05))
    assert (cells.status, cells.message) == ("SandboxError", "no result within 0.15 s")
    assert service.running == service.waiting == 0


async def test_a_client_that_sends_slowly_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)

    async def reads_all(scope, receive, send):
        while (await receive()).get("more_body"):
            pass

    async def slow():
        await asyncio.sleep(0.03)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(HTTPException) as raised:
        await middleware.BodyLimit(reads_all, 1 << 20)({"type": "http", "headers": []}, slow, None)
    assert raised.value.status_code == 408


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end_finishes_its_runs(signum):
    server = ServerProcess("--workers", "1")
    thread, results = in_background(lambda: server.run("import time; time.sleep(1.5); print('done')", run_timeout=20))
    server.until(lambda: server.metric("etude_sandbox_running") == 1, "the run did not start")
    children = server.descendants()
    status, stderr = server.stop(signum)
    thread.join()
    assert results[0]["run_result"]["stdout"] == "done\n"
    assert status in (130, 143, -signum), stderr
    assert "Traceback" not in stderr
    assert not [child for child in children if child.is_running() and child.status() != "zombie"]


def test_a_run_that_outlasts_the_grace_is_killed():
    server = ServerProcess("--workers", "1", "--grace", "1")

    body = {"code": "import time; time.sleep(50)", "language": "python", "run_timeout": 55}
    thread, results = in_background(lambda: server.call("/run_code", body))
    cells = {"cells": ["import time; time.sleep(50)"], "total_timeout": 55}
    waiting, others = in_background(lambda: server.call("/run_jupyter", cells))
    server.until(lambda: server.metric("etude_sandbox_running") == 1, "the run did not start")
    children = server.descendants()
    began = time.monotonic()
    server.stop()
    thread.join()
    waiting.join()
    assert time.monotonic() - began < 40
    for status, _, answer in (*results, *others):
        assert (status, answer) == (503, {"detail": "the server was shut down before the run had ended"})
    assert not [child for child in children if child.is_running() and child.status() != "zombie"]


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = CliRunner().invoke(sandbox_command, ["serve", "--port", str(taken.getsockname()[1])])
    assert isinstance(result.exception, ConfigError)
    assert "cannot listen on 127.0.0.1" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token", " "], "the token is empty"),
        (["--token", "a", "--token-file", "b"], "not both"),
        (["--token-file", "/nowhere/token"], "--token-file /nowhere/token"),
        (["--queue-seconds", "0"], "queue-seconds must be above 0"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
    ],
)
def test_a_command_line_that_makes_no_sense(arguments, message, capsys):
    assert run_command(sandbox_command, ["serve", "--port", "0", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_are_checked():
    with pytest.raises(ConfigError, match="workers must be above 0"):
        ServerOptions(workers=0)
    with pytest.raises(ConfigError, match="token is empty"):
        ServerOptions(token="")


def test_check_proves_the_isolation(capsys):
    assert run_command(sandbox_command, ["check"]) == 0
    assert "every guarantee holds" in capsys.readouterr().out


@pytest.mark.soak
def test_a_storm_of_two_thousand_requests_with_five_in_a_hundred_hostile():
    """Every answer right, none lost, memory flat, no process and no mount left behind."""
    hostile = (
        "import os\nwhile True: os.fork()",
        "x = []\nwhile True: x.append(bytearray(1 << 24))",
        "while True: pass",
        "while True: print('x' * 100000)",
        "import os\nos.kill(-1, 9)\nwhile True: pass",
    )

    def one(i):
        if i % 20 == 7:
            code = hostile[i // 20 % len(hostile)]
            return server.run(code, run_timeout=2, memory_limit_MB=128)["status"] == "Failed"
        return server.run(f"print({i} * 3)", run_timeout=120)["run_result"]["stdout"] == f"{i * 3}\n"

    def mounts():
        return Path("/proc/self/mounts").read_text(encoding="utf-8").count("\n")

    with ServerProcess("--workers", "4", "--max-concurrency", "128", "--queue-seconds", "600") as server:
        with ThreadPoolExecutor(64) as threads:
            assert all(threads.map(one, range(200)))
            before = server.memory(), mounts()
            assert all(threads.map(one, range(2000)))
        after = server.memory(), mounts()
        assert after[0] < before[0] * 1.2 + (8 << 20)
        assert after[1] == before[1]
        server.until(lambda: len(server.descendants()) <= 4 * 4, "processes are left behind")


def test_a_listener_accepts_connections_before_anything_serves_it():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=5):
        pass
