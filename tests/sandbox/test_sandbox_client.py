"""The client: embedded and over HTTP the same, and every way in which a server can fail is the sandbox's failure."""

import asyncio
import contextlib
import json
import threading
import time

import pytest
from aiohttp import web
from http_stage import listening
from server_stage import PATIENCE, ServerProcess

from etude.errors import ConfigError, is_infrastructure
from etude.sandbox import (
    Language,
    Limits,
    RunRequest,
    RunStatus,
    SandboxClient,
    SandboxError,
    SandboxRequestError,
    UnknownSessionError,
)
from etude.sandbox import client as client_module

pytestmark = pytest.mark.usefixtures("isolation")


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--workers", "2", "--token", "abc") as process:
        yield process


@pytest.fixture(scope="module", params=["embedded", "remote"])
def client(request):
    if request.param == "embedded":
        opened = SandboxClient(workers=2)
    else:
        opened = SandboxClient(request.getfixturevalue("server").url + "/run_code", token="abc")
    yield opened
    opened.close()


class TestBothKinds:
    async def test_a_program(self, client):
        request = RunRequest(
            "import sys; print(input()); open('b', 'w').write('2'); sys.exit(3)",
            stdin="hi",
            files={"a": b"1"},
            fetch_files=["a", "b", "c"],
        )
        result = await client.run(request)
        assert (result.status, result.return_code, result.stdout) == (RunStatus.FINISHED, 3, "hi\n")
        assert dict(result.files) == {"a": b"1", "b": b"2"}

    async def test_a_time_limit(self, client):
        result = await client.run(RunRequest("while True: pass", limits=Limits(wall_seconds=0.5)))
        assert (result.status, result.return_code) == (RunStatus.TIME_LIMIT, None)

    async def test_bash(self, client):
        assert (await client.run(RunRequest("echo 1", Language.BASH))).stdout == "1\n"

    async def test_a_session(self, client):
        session = await client.session(files={"n": b"41"})
        assert (await client.run_cell(session, "n = int(open('n').read())", 10)).error is None
        assert (await client.run_cell(session, "n + 1", 10)).text == "42"
        failed = await client.run_cell(session, "1 / 0", 10)
        assert failed.error.name == "ZeroDivisionError"
        late = await client.run_cell(session, "while True: pass", 0.3)
        assert (late.status, late.session_alive) == (RunStatus.TIME_LIMIT, True)
        await client.close_session(session)
        with pytest.raises(UnknownSessionError):
            await client.run_cell(session, "n", 10)
        await client.close_session(session)

    async def test_many_at_once(self, client):
        results = await asyncio.gather(*(client.run(RunRequest(f"print({i})")) for i in range(20)))
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(20)]

    def test_threads_and_loops_share_it(self, client):
        outputs = {}

        def blocking(i):
            outputs[i] = client.run_blocking(RunRequest(f"print({i})")).stdout

        def own_loop(i):
            outputs[i] = asyncio.run(client.run(RunRequest(f"print({i})"))).stdout

        threads = [threading.Thread(target=(blocking, own_loop)[i % 2], args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outputs == {i: f"{i}\n" for i in range(8)}

    async def test_a_cancelled_caller_ends_the_run(self, client):
        task = asyncio.create_task(client.run(RunRequest("import time; time.sleep(60)")))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # both workers are free again: two runs at once would otherwise wait for the one that sleeps
        began = time.monotonic()
        await asyncio.gather(*(client.run(RunRequest("print(1)")) for _ in range(4)))
        assert time.monotonic() - began < 50


async def test_a_request_above_the_servers_limits_is_not_tried_again(server):
    async with SandboxClient(server.url, token="abc") as client:
        with pytest.raises(SandboxRequestError, match="refuses the request: memory_limit_MB: 4096 is above"):
            await client.run(RunRequest("1", limits=Limits(memory_mb=4096)))
        with pytest.raises(SandboxRequestError, match="no valid text"):
            await client.run(RunRequest("'\ud800'"))


async def test_a_wrong_token_is_the_users_to_change(server):
    async with SandboxClient(server.url, token="wrong") as client:
        with pytest.raises(ConfigError, match="wants another bearer token"):
            await client.run(RunRequest("1"))


GOOD = {"status": "Success", "message": "", "run_result": {"status": "Finished", "return_code": 0, "stdout": "ok"}}


class Misbehaving:
    """A server that answers what the test says, in order; the last answer is repeated."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = []

    async def __call__(self, request):
        self.seen.append((request.method, request.path, await request.read()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == "hang up":
            request.transport.close()
            return web.Response()
        if answer == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(10_000):
                await response.write(b"x" * 10_000)
            return response
        status, body, *headers = answer
        body = json.dumps(body) if isinstance(body, dict) else body
        return web.Response(status=status, text=body, headers=headers[0] if headers else {})


@contextlib.asynccontextmanager
async def misbehaving(*answers):
    server = Misbehaving(*answers)
    async with listening(server) as server.url:
        yield server


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.001)


BROKEN = [
    ("hang up", "ServerDisconnectedError"),
    ((500, "oops"), "answered 500: oops"),
    ((502, ""), "answered 502"),
    ((503, {"detail": "full"}), "answered 503: full"),
    ((504, "late"), "answered 504: late"),
    ((302, "", {"Location": "/elsewhere"}), "answered 302"),
    ((200, "no json"), "answered nonsense"),
    ((200, {"status": "Marvellous", "message": ""}), "answered nonsense: status"),
    ((200, {"status": "SandboxError", "message": "no disk"}), "the sandbox failed: no disk"),
    ((200, {"status": "Success", "message": ""}), "without a result"),
    ((200, GOOD | {"files": {"a": "no base64"}}), "not base64"),
]


@pytest.mark.parametrize(("answer", "reason"), BROKEN[:-1])
async def test_every_way_to_fail_is_infrastructure_and_tried_again(answer, reason):
    async with misbehaving(answer) as server, SandboxClient(server.url) as client:
        with pytest.raises(SandboxError, match=reason) as raised:
            await client.run(RunRequest("1"))
        assert is_infrastructure(raised.value)
        assert "tried 3 times" in str(raised.value)
        assert len(server.seen) == 3


@pytest.mark.parametrize(("answer", "_"), BROKEN[:-1])
async def test_a_failure_that_passes_is_not_seen(answer, _):
    async with misbehaving(answer, (200, GOOD)) as server, SandboxClient(server.url) as client:
        assert (await client.run(RunRequest("1"))).stdout == "ok"
        assert len(server.seen) == 2


async def test_files_that_are_no_base64_are_the_servers_fault():
    async with misbehaving(BROKEN[-1][0]) as server, SandboxClient(server.url, attempts=1) as client:
        with pytest.raises(SandboxError, match="not base64"):
            await client.run(RunRequest("1"))


async def test_a_wrong_answer_is_not_tried_again():
    failed = GOOD | {"status": "Failed", "run_result": {"status": "Finished", "return_code": 1}}
    async with misbehaving((200, failed)) as server, SandboxClient(server.url) as client:
        assert (await client.run(RunRequest("1"))).return_code == 1
        assert len(server.seen) == 1


async def test_a_busy_server_is_asked_again_when_it_says():
    busy = (429, {"detail": "full"}, {"Retry-After": "0"})
    async with misbehaving(busy, busy, busy, busy, busy, (200, GOOD)) as server:
        async with SandboxClient(server.url, attempts=1) as client:
            assert (await client.run(RunRequest("1"))).stdout == "ok"
        assert len(server.seen) == 6


async def test_a_server_that_stays_busy_is_given_up(monkeypatch):
    monkeypatch.setattr(client_module, "BUSY_SECONDS", 0.1)
    async with misbehaving((429, "", {"Retry-After": "0"})) as server, SandboxClient(server.url, attempts=1) as client:
        with pytest.raises(SandboxError, match=r"was busy for 0\.1 s"):
            await client.run(RunRequest("1"))


async def test_a_cell_is_never_sent_twice():
    async with misbehaving((503, "")) as server, SandboxClient(server.url) as client:
        with pytest.raises(SandboxError, match="answered 503"):
            await client.run_cell("s", "x += 1", 1)
        assert len(server.seen) == 1


async def test_an_answer_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 1 << 20)
    async with misbehaving("endless") as server, SandboxClient(server.url, attempts=1) as client:
        with pytest.raises(SandboxError, match="larger than 1 MiB"):
            await client.run(RunRequest("1"))


async def test_a_server_that_never_answers(monkeypatch):
    monkeypatch.setattr(client_module, "MARGIN_SECONDS", 0.1)

    async def silent(reader, writer):
        await reader.read()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with SandboxClient(url, attempts=1) as client:
        request = RunRequest("1", limits=Limits(wall_seconds=0.1), compile_seconds=0.1)
        with pytest.raises(SandboxError, match="TimeoutError"):
            await asyncio.wait_for(client.run(request), PATIENCE)
    listener.close()


async def test_nobody_listens():
    async with SandboxClient("http://127.0.0.1:9", attempts=2) as client:
        with pytest.raises(SandboxError, match="tried 2 times"):
            await client.run(RunRequest("1"))


async def test_a_server_without_sessions_says_so():
    async with misbehaving((404, {"detail": "Not Found"})) as server, SandboxClient(server.url) as client:
        with pytest.raises(ConfigError, match="has no /v1/sessions: stateful code needs `etude sandbox serve`"):
            await client.session()
        with pytest.raises(ConfigError, match=r"has no /run_code: is this a sandbox\?"):
            await client.run(RunRequest("1"))


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://x", "http://", "/run_code"])
def test_a_url_that_is_none(url):
    with pytest.raises(ConfigError, match="not of the form http://host:port"):
        SandboxClient(url)


def test_a_closed_client_says_so():
    client = SandboxClient(workers=1)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.run_blocking(RunRequest("1"))
    with pytest.raises(ConfigError, match="attempts"):
        SandboxClient(attempts=0)


def test_clients_of_one_kind_share_an_executor_until_the_last_is_closed():
    first, second = SandboxClient(workers=3), SandboxClient(workers=3)
    assert first._sandbox is second._sandbox
    first.run_blocking(RunRequest("1"))
    first.close()
    assert second.run_blocking(RunRequest("print(1)")).stdout == "1\n"
    second.close()
    assert second._sandbox._executor is None
    again = SandboxClient(workers=3)
    assert again.run_blocking(RunRequest("print(1)")).stdout == "1\n"
    again.close()
