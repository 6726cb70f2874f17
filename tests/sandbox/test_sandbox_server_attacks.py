"""The server under attack from its clients and from the programs it runs: nobody else's request hangs, fails or pays."""

import asyncio
import contextlib
import re
import socket
from pathlib import Path

import psutil
import pytest
import uvicorn
from server_stage import PATIENCE, ServerProcess, in_background

from etude.sandbox.service import ANSWER_BYTES
from etude.serving.listening import limited_protocol, listen

pytestmark = pytest.mark.usefixtures("isolation")


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--workers", "2", "--max-run-seconds", "60", "--memory-mb", "1024") as process:
        yield process


def peak_memory(server):
    """Bytes that the server's own process ever held."""
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) << 10


def test_deleting_a_busy_session_hurts_no_stranger_and_answers_its_cell(server):
    for turn in range(8):
        session = server.call("/v1/sessions", {})[2]["session_id"]
        cell = {"code": "import time\ntime.sleep(50)", "timeout": 55}
        thread, results = in_background(lambda path=f"/v1/sessions/{session}/cells", cell=cell: server.call(path, cell))
        server.until(lambda: server.metric("etude_sandbox_running") == 1, "the cell did not start")
        assert server.call(f"/v1/sessions/{session}", method="DELETE")[0] == 204
        strangers = [in_background(lambda n=n: server.run(f"print({n})", run_timeout=20)) for n in range(4)]
        thread.join()
        assert results[0][0] == 410, results
        assert "closed while its cell ran" in results[0][2]["detail"]
        for n, (stranger, answers) in enumerate(strangers):
            stranger.join()
            assert answers[0]["run_result"]["stdout"] == f"{n}\n", turn


WIDE = """
import os, struct
text = b'{"cell":1,"x":[' + b"{}," * (9 << 20) + b"{}]}"
data = memoryview(struct.pack("!II", len(text), 0) + text)
while data:
    data = data[os.write(3, data[:65536]) :]
"""


def test_a_message_that_would_be_large_once_parsed_is_never_parsed(server):
    server.run("print(1)")
    before = peak_memory(server)
    session = server.call("/v1/sessions", {})[2]["session_id"]
    answer = server.call(f"/v1/sessions/{session}/cells", {"code": WIDE, "timeout": 30})[2]
    assert (answer["status"], answer["session_alive"]) == ("killed", False)
    assert peak_memory(server) - before < 60 << 20


class TestWrongIsNotBroken:
    """What the code did is `Failed`; what was done to its sandbox is repaired, or the sandbox's failure."""

    @pytest.mark.parametrize("end", ["import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)"])
    @pytest.mark.parametrize("after", [[], ["print(3)"]])
    def test_an_interpreter_that_dies(self, server, end, after):
        cells = ["print(1)", end, *after]
        status, _, answer = server.call("/run_jupyter", {"cells": cells})
        assert (status, answer["status"]) == (200, "Failed")
        assert answer["driver"]["stderr"] == f"the interpreter ended in or after cell 2 of {len(cells)}"
        assert answer["cells"][0]["stdout"] == "1\n"

    @pytest.mark.parametrize("milliseconds", [0, 1, 2, 4, 8])
    def test_a_program_that_exits_between_its_last_cell_and_the_fetch(self, server, milliseconds):
        leave = f"import os, threading\nthreading.Timer({milliseconds} / 1000, os._exit, [0]).start()"
        body = {"cells": ["open('x', 'w').write('1')", leave], "fetch_files": ["x"]}
        for _ in range(6):
            status, _, answer = server.call("/run_jupyter", body)
            assert (status, answer["status"] in ("Success", "Failed")) == (200, True), answer
            assert len(answer["cells"]) == 2
            assert (answer["status"] == "Success") == ("x" in answer["files"])

    def test_a_container_killed_from_outside_is_not_the_programs_failure(self, server):
        code = "import subprocess\nsubprocess.run(['sleep', '1.6452'])\nprint('done')"
        thread, results = in_background(lambda: server.run(code, run_timeout=20))
        kill_supervisor(server, "1.6452")
        thread.join()
        assert (results[0]["status"], results[0]["run_result"]["stdout"]) == ("Success", "done\n")

    def test_cells_whose_container_is_killed_from_outside_run_again(self, server):
        cells = ["x = 1", "import subprocess\nsubprocess.run(['sleep', '1.6453'])\nprint('done', x)"]
        thread, results = in_background(lambda: server.call("/run_jupyter", {"cells": cells}))
        kill_supervisor(server, "1.6453")
        thread.join()
        answer = results[0][2]
        assert (answer["status"], [cell["stdout"] for cell in answer["cells"]]) == ("Success", ["", "done 1\n"])

    def test_cells_that_lose_their_container_twice_are_to_blame(self, server):
        cells = ["print(1)", "import subprocess\nsubprocess.run(['sleep', '16.454'])"]
        thread, results = in_background(lambda: server.call("/run_jupyter", {"cells": cells}))
        first = kill_supervisor(server, "16.454")
        kill_supervisor(server, "16.454", besides=first)
        thread.join()
        answer = results[0][2]
        assert (answer["status"], len(answer["cells"])) == ("Failed", 1)

    def test_a_sessions_cell_whose_container_is_killed_from_outside_is_the_sandboxs_failure(self, server):
        path = f"/v1/sessions/{server.call('/v1/sessions', {})[2]['session_id']}/cells"
        code = "import subprocess\nsubprocess.run(['sleep', '16.455'])"
        thread, results = in_background(lambda: server.call(path, {"code": code, "timeout": 30}))
        kill_supervisor(server, "16.455")
        thread.join()
        assert results[0][0] == 503
        assert server.call(path, {"code": "1"})[0] == 404


def kill_supervisor(server, seconds, besides=None):
    """Kills the supervisor of the program that sleeps for `seconds`, as an administrator might; the program's process id.

    `besides` is that of an earlier one, which may still be there, under whatever parent, while its container ends.
    """
    found = []

    def find():
        for process in server.descendants():
            with contextlib.suppress(psutil.NoSuchProcess, AttributeError):  # it, or its parent, has ended
                if process.pid != besides and process.cmdline()[1:2] == [seconds]:
                    found.append((process.parent().parent(), process.pid))
        return found

    server.until(find, "the program did not start")
    supervisor, program = found[0]
    supervisor.kill()
    return program


class TestOneBudgetForAnAnswer:
    def answer_of(self, server, path, body):
        """The answer, its length, and how much more than ever before the server held."""
        server.run("print(1)")
        before = peak_memory(server)
        status, headers, answer = server.call(path, body)
        assert status == 200, answer
        return answer, int(headers["content-length"]), peak_memory(server) - before

    def test_many_cells_that_print_much(self, server):
        cells = ["print('x' * 999_999)"] * 60 + ["'last' + 'y' * 999_999", "raise ValueError('z' * 999_999)"]
        answer, size, memory = self.answer_of(server, "/run_jupyter", {"cells": cells})
        assert answer["status"] == "Success"
        assert size < ANSWER_BYTES + (1 << 20)
        assert memory < 250 << 20
        assert [len(cell["stdout"]) for cell in answer["cells"][:30]] == [1_000_000] * 30
        assert len(answer["cells"]) == 62
        for cell in answer["cells"][40:-1]:
            assert len(cell["stdout"]) <= 1000
            assert "the answer is full" in cell["stderr"]
        assert answer["cells"][-2]["display"][0]["text/plain"].startswith("'lasty")
        assert answer["cells"][-1]["error"][0]["ename"] == "ValueError"

    def test_a_letter_counts_with_its_bytes(self, server):
        _, size, _ = self.answer_of(server, "/run_jupyter", {"cells": ["print('€' * 333_000)"] * 40})
        assert 0.9 * ANSWER_BYTES < size < ANSWER_BYTES + (1 << 20)

    def test_images_and_files_count_as_well(self, server):
        png = "import os, struct\nclass P:\n  def _repr_png_(self):\n    return "
        png += "b'\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR' + struct.pack('>II', 9, 9) + os.urandom(2_000_000)\n"
        cells = [png] + ["for _ in range(4): display(P())"] * 6 + ["open('big', 'wb').write(bytes(4 << 20))"]
        body = {"cells": cells, "fetch_files": ["big"]}
        answer, size, _ = self.answer_of(server, "/run_jupyter", body)
        assert answer["status"] == "Success"
        assert size < ANSWER_BYTES + (1 << 20)
        assert [len(cell["display"]) for cell in answer["cells"]] == [0, 4, 4, 4, 0, 0, 0, 1]
        assert answer["files"] == {}
        assert answer["message"] == f"fetch_files: 'big': {4 << 20} bytes are more than this answer has room for"

    def test_files_of_a_run(self, server):
        code = "for name in 'abc': open(name, 'wb').write(bytes(15 << 20))\nimport os; os.symlink('a', 'd')"
        body = {"code": code, "language": "python", "fetch_files": ["a", "b", "c", "d"]}
        answer, size, _ = self.answer_of(server, "/run_code", body)
        assert (answer["status"], sorted(answer["files"])) == ("Success", ["a"])
        assert size < ANSWER_BYTES
        assert "'b': 15728640 bytes are more than this answer has room for" in answer["message"]
        assert "'d': " in answer["message"]


class TestConnections:
    def test_idle_connections_keep_nobody_out(self):
        with ServerProcess("--workers", "2", descriptors=128) as server, contextlib.ExitStack() as opened:
            for n in range(300):
                idle = opened.enter_context(socket.create_connection(address(server), timeout=PATIENCE))
                with contextlib.suppress(OSError):  # it may have been let go already
                    idle.sendall(b"POST /run_code HTTP/1.1\r\nHost: localhost\r\n"[: n % 40])
            assert server.run("print(1)")["run_result"]["stdout"] == "1\n"
            answers = [in_background(lambda n=n: server.run(f"print({n})", run_timeout=30)) for n in range(6)]
            for n, (thread, results) in enumerate(answers):
                thread.join()
                assert results[0]["run_result"]["stdout"] == f"{n}\n"
            assert len(psutil.Process(server.process.pid).net_connections("tcp")) < 40

    @pytest.mark.slow
    async def test_who_does_not_send_its_head_in_time_is_let_go(self):
        async with toy_server(max_connections=9, head_seconds=0.2) as port:
            for sent in (b"", b"GET / HTTP/1.1\r\nHost:", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                answer = await asyncio.wait_for(read_all(reader), PATIENCE)
                assert answer.count(b"200 OK") == (1 if b"\r\n\r\n" in sent else 0)
                writer.close()

    async def test_the_longest_idle_one_makes_room_and_a_busy_one_never(self):
        async with toy_server(max_connections=2, head_seconds=PATIENCE) as port:
            busy, ask = await asyncio.open_connection("127.0.0.1", port)
            ask.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            await SLOW_BEGAN.wait()
            idle, first = await asyncio.open_connection("127.0.0.1", port)
            kept, second = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(read_all(idle), PATIENCE) == b""
            second.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in await asyncio.wait_for(read_all(kept), PATIENCE)
            SLOW_ENDS.set()
            assert b"200 OK" in await asyncio.wait_for(read_all(busy), PATIENCE)
            for writer in (ask, first, second):
                writer.close()


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


async def read_all(reader):
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


SLOW_BEGAN, SLOW_ENDS = asyncio.Event(), asyncio.Event()


@contextlib.asynccontextmanager
async def toy_server(max_connections, head_seconds):
    """An application that answers at once, but `/slow` when it is let."""

    async def application(scope, receive, send):
        if scope["path"] == "/slow":
            SLOW_BEGAN.set()
            await SLOW_ENDS.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    listener = listen("127.0.0.1", 0)
    protocol = limited_protocol(max_connections, head_seconds)
    server = uvicorn.Server(uvicorn.Config(application, http=protocol, lifespan="off", log_config=None))
    with contextlib.ExitStack() as patched:
        patched.enter_context(pytest.MonkeyPatch.context()).setattr(server, "capture_signals", contextlib.nullcontext)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving
