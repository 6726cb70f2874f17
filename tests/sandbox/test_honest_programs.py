"""What people write goes on working in the strictest mode: event loops, sockets, processes, compilers, databases, plots."""

import pytest

from etude.sandbox import Language, Limits, RunStatus

PROGRAMS = {
    "numpy": """
import numpy as np
x = np.random.default_rng(0).normal(size=(300, 300))
print(np.allclose(x @ np.linalg.inv(x), np.eye(300)))
""",
    "event loop": """
import asyncio, socket, sys

async def echo(reader, writer):
    writer.write(await reader.read(100))
    await writer.drain()
    writer.close()

async def ask(open_connection, *address):
    reader, writer = await open_connection(*address)
    writer.write(b"ping")
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer == b"ping"

async def main():
    tcp = await asyncio.start_server(echo, "127.0.0.1", 0)
    unix = await asyncio.start_unix_server(echo, "socket")
    asks = [ask(asyncio.open_connection, *tcp.sockets[0].getsockname()) for _ in range(50)]
    asks += [ask(asyncio.open_unix_connection, "socket") for _ in range(20)]
    one, other = socket.socketpair(socket.AF_UNIX)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    reader, _ = await asyncio.open_connection(sock=other)
    one.send(b"x")
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(7)", stdout=asyncio.subprocess.PIPE)
    output, _ = await child.communicate()
    print(all(await asyncio.gather(*asks)) and await reader.read(1) == b"x" and output == b"7\\n")

asyncio.run(main())
""",
    "a gigabyte through a connection": """
import hashlib, socket, threading

def send(link):
    with link:
        for _ in range(256):
            link.sendall(bytes(1 << 20))

for pair in ("tcp", "unix"):
    if pair == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname())
            other, _ = server.accept()
    else:
        one, other = socket.socketpair()
    threading.Thread(target=send, args=(one,)).start()
    total = 0
    while part := other.recv(1 << 20):
        total += len(part)
    other.close()
    assert total == 256 << 20, total
print(True)
""",
    "a server and its client": """
import http.server, threading, urllib.request
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(b"main.py" in urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").read())
""",
    "datagrams": """
import socket
for family, name in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, "datagrams")):
    receiver = socket.socket(family, socket.SOCK_DGRAM)
    receiver.bind(name)
    socket.socket(family, socket.SOCK_DGRAM).sendto(b"x" * 5000, receiver.getsockname())
    assert len(receiver.recv(9000)) == 5000
print(True)
""",
    "processes": """
import concurrent.futures, multiprocessing, os, subprocess

def square(x):
    return x * x

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            assert list(pool.map(square, range(5))) == [0, 1, 4, 9, 16], method
    with multiprocessing.Manager() as manager:
        assert list(manager.list([1])) == [1]
    assert subprocess.run("sort | uniq -c", shell=True, input=b"b\\na\\nb\\n", capture_output=True).stdout.split() == [
        b"1", b"a", b"2", b"b"]
    print(True)
""",
    "files": """
import mmap, os, pathlib, shutil, sqlite3
with sqlite3.connect("base.db") as base:
    base.execute("pragma journal_mode=wal")
    base.execute("create table t (x)")
    base.executemany("insert into t values (?)", [(i,) for i in range(1000)])
base.close()
shutil.copy("base.db", "copy.db")
with open("mapped", "w+b") as file:
    file.write(bytes(8192))
    file.flush()
    os.fsync(file.fileno())
    with mmap.mmap(file.fileno(), 0) as mapped:
        mapped[5000:5003] = b"abc"
        mapped.flush()
        mapped.madvise(mmap.MADV_DONTNEED)
os.sync()
assert pathlib.Path("mapped").read_bytes()[5000:5003] == b"abc"
print(sqlite3.connect("copy.db").execute("select sum(x) from t").fetchone() == (499500,))
""",
    "pytest": """
import pathlib, subprocess, sys
pathlib.Path("test_it.py").write_text("def test_it(tmp_path, capfd):\\n    (tmp_path / 'x').touch()\\n")
run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], capture_output=True, text=True)
print("1 passed" in run.stdout or run)
""",
    "psutil": """
import os, psutil
memory, me = psutil.virtual_memory(), psutil.Process()
assert memory.total == memory.available == 1 << 30, memory
assert psutil.cpu_percent(0.01) == 0 and len(psutil.cpu_percent(percpu=True)) == len(os.sched_getaffinity(0))
assert 0 < me.memory_percent() < 50 and abs(me.create_time() - __import__("time").time()) < 100_000
print({process.pid for process in psutil.process_iter()} == {1, os.getpid()})
""",
    "matplotlib": """
import matplotlib.pyplot as plt
plt.plot([1, 2, 3])
plt.savefig("plot.png")
print(open("plot.png", "rb").read(4) == b"\\x89PNG")
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_python(isolated_sandbox, name):
    result = isolated_sandbox.run(PROGRAMS[name], limits=Limits(cpu_seconds=120, wall_seconds=240))
    assert (result.status, result.stdout) == (RunStatus.FINISHED, "True\n"), result


def test_node(isolated_sandbox):
    if Language.JAVASCRIPT not in isolated_sandbox.executor.languages:
        pytest.skip("node is not installed")
    code = """
const {execFileSync} = require("child_process"), fs = require("fs"), net = require("net");
const {Worker} = require("worker_threads");
fs.writeFileSync("a", "x"); fs.copyFileSync("a", "b"); fs.fsyncSync(fs.openSync("b", "r+"));
const server = net.createServer(link => link.pipe(link)).listen(0, () => {
  const link = net.connect(server.address().port, () => link.end("ping"));
  link.on("data", data => {
    server.close();
    new Worker("require('worker_threads').parentPort.postMessage(7)", {eval: true}).on("message", number =>
      console.log(data.toString(), execFileSync("echo", ["child"]).toString().trim(), number));
  });
});
"""
    result = isolated_sandbox.run(code, language=Language.JAVASCRIPT)
    assert (result.status, result.stdout) == (RunStatus.FINISHED, "ping child 7\n"), result


def test_compiler(isolated_sandbox):
    if Language.CPP not in isolated_sandbox.executor.languages:
        pytest.skip("g++ is not installed")
    code = """
#include <future>
#include <iostream>
int main() { std::cout << std::async(std::launch::async, [] { return 6 * 7; }).get() << std::endl; }
"""
    result = isolated_sandbox.run(code, language=Language.CPP)
    assert (result.status, result.stdout) == (RunStatus.FINISHED, "42\n"), result
