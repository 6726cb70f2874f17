"""The stage of the serving engines' tests: a bigram model in a folder, servers in this process and in others."""

import asyncio
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import uvicorn
from safetensors.numpy import save_file
from sglang_server import log_softmax

from etude.inference.http import HttpServer
from etude.inference.sglang import SGLangEngine

VOCAB = 50
CONTEXT = 256


def save_bigram(folder, seed):
    """A checkpoint of the bigram model; returns its folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    matrix = np.random.default_rng(seed).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)
    save_file({"logits": matrix}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def bigram_score(folder):
    """What the trainer would compute with the checkpoint: see `etude.inference.probe.Score`."""
    from safetensors.numpy import load_file

    matrix = load_file(Path(folder) / "model.safetensors")["logits"].astype(np.float64)

    def score(rows, temperature):
        return [
            [float(log_softmax(matrix[a] / temperature)[b]) for a, b in zip([prompt[-1], *response], response)]
            for prompt, response in rows
        ]

    return score


@asynccontextmanager
async def serving(app):
    """`app` behind a port of this machine, in this event loop; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.ensure_future(server.serve())
    while not server.started:
        assert not task.done()
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


@contextmanager
def serving_in_a_thread(app):
    """The same beside a program that has an event loop of its own."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


class Process:
    """A bigram server in a process of its own, to be killed or stopped."""

    def __init__(self, folder, delay=0.005, port=0):
        script = Path(__file__).with_name("sglang_server.py")
        self.popen = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(delay), str(port)], stdout=subprocess.PIPE, text=True
        )
        self.port = int(self.popen.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def engine(self, timeout=30.0):
        return SGLangEngine(HttpServer(self.url, timeout=timeout), CONTEXT)

    def end(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self.popen.stdout.close()
