"""The server under attack from its clients and from the programs it runs: nobody else's request hangs, fails or pays."""

import re
import threading
from pathlib import Path

import pytest
from server_stage import ServerProcess

pytestmark = pytest.mark.usefixtures("isolation")


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--workers", "2", "--max-run-seconds", "60", "--memory-mb", "1024") as process:
        yield process


def in_background(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


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


def test_a_frame_that_would_be_large_once_parsed_is_never_parsed(server):
    server.run("print(1)")
    before = peak_memory(server)
    session = server.call("/v1/sessions", {})[2]["session_id"]
    answer = server.call(f"/v1/sessions/{session}/cells", {"code": WIDE, "timeout": 30})[2]
    assert (answer["status"], answer["session_alive"]) == ("killed", False)
    assert peak_memory(server) - before < 60 << 20
