"""The stage of the MCP tests: real servers in processes of their own, and the tools that a configuration makes of them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from etude.tools import load_tools

SERVER = Path(__file__).with_name("mcp_stage_server.py")
STDIO = {"command": sys.executable, "args": [str(SERVER), "stdio"]}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class HttpServer:
    """The stage server over `streamable-http` or `sse`; `kill` ends it as a crash does, `start` begins it again."""

    def __init__(self, transport, key=None):
        self.transport, self.port, self.key, self.closed = transport, free_port(), key, False
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/{'sse' if self.transport == 'sse' else 'mcp'}"

    @property
    def entry(self):
        return {"url": self.url, "connect_timeout": 20}

    def start(self):
        """Nothing happens once it is closed, so that a thread that revives it leaves nothing behind."""
        if self.closed:
            return
        environment = os.environ | ({"STAGE_KEY": self.key} if self.key else {})
        command = [sys.executable, str(SERVER), self.transport, str(self.port)]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.05)
        raise AssertionError("the stage server does not start")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def close(self):
        self.closed = True
        self.kill()


def configured(folder, servers, *, config=None, **mcp):
    """The tools of a YAML file with one entry of type mcp, by name."""
    path = folder / "tools.yaml"
    entry = {"config": {"type": "mcp", "timeout": 20, **(config or {})}, "mcp": {"mcpServers": servers, **mcp}}
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return {tool.name: tool for tool in load_tools(path)}


def execute(tool, **arguments):
    """One execute in an event loop of its own: (response, reward, metrics)."""
    return asyncio.run(tool.execute("i", arguments))


def text_of(tool, **arguments):
    return execute(tool, **arguments)[0].text


def kill_stdio_servers():
    """Kills the stage's subprocesses of this process, and waits until they are gone."""
    found = stdio_servers()
    for process in found:
        process.kill()
    psutil.wait_procs(found, 30)


def stdio_servers():
    """The stage's subprocesses of this process that still run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if str(SERVER) in child.cmdline() and "stdio" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def write_json(path, content):
    path.write_text(json.dumps(content))
    return path
