"""What a call of an MCP tool costs, over each transport, beside the same function called in the process.

    python benchmarks/tools_mcp.py [--calls 500] [--rounds 5]

Reports, as medians over rounds: milliseconds of a call alone, milliseconds of CPU (of this process: the client's side) a
call when all are made at once, and calls a second then. One server serves everything, on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.tools import BaseTool, FunctionTool, load_tools
from etude.tools.mcp import close_connections

SERVER = """
import sys

from mcp.server import MCPServer

server = MCPServer("bench", log_level="ERROR")


@server.tool(structured_output=False)
async def add(a: int, b: int = 1) -> str:
    return str(a + b)


server.run(sys.argv[1]) if len(sys.argv) < 3 else server.run(sys.argv[1], port=int(sys.argv[2]))
"""
PORT = 18431


async def add(a: int, b: int = 1) -> str:
    """Adds."""
    return str(a + b)


@contextmanager
def tool_over(transport: str, folder: Path) -> Iterator[BaseTool]:
    """Yields the tool, from a server started for this transport."""
    if transport == "in process":
        yield FunctionTool(add)
        return
    file = folder / "server.py"
    file.write_text(SERVER)
    process = None
    entry: dict[str, Any] = {"command": "python", "args": [str(file), "stdio"]}
    if transport != "stdio":
        process = subprocess.Popen([sys.executable, str(file), transport, str(PORT)], stderr=subprocess.DEVNULL)
        entry = {"url": f"http://127.0.0.1:{PORT}/{'sse' if transport == 'sse' else 'mcp'}", "connect_attempts": 20}
    config = folder / "tools.json"
    config.write_text(json.dumps({"mcpServers": {"bench": entry}}))
    try:
        [tool] = load_tools(config)
        yield tool
    finally:
        close_connections()
        if process is not None:
            process.kill()
            process.wait()


async def measure(tool: BaseTool, calls: int) -> tuple[float, float, float]:
    """Returns (ms of a call alone, CPU ms per concurrent call, concurrent calls per second)."""
    alone = min(calls, 100)
    started = time.perf_counter()
    for number in range(alone):
        await tool.execute("i", {"a": number})
    latency = (time.perf_counter() - started) / alone
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(tool.execute("i", {"a": number}) for number in range(calls)))
    return 1e3 * latency, 1e3 * (time.process_time() - cpu) / calls, calls / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{'transport':<18}{'ms alone':>10}{'CPU ms':>10}{'calls/s':>10}")
    for transport in ("in process", "stdio", "streamable-http", "sse"):
        with tempfile.TemporaryDirectory() as folder, tool_over(transport, Path(folder)) as tool:
            asyncio.run(measure(tool, 20))
            rounds = [asyncio.run(measure(tool, options.calls)) for _ in range(options.rounds)]
            alone, cpu, rate = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(f"{transport:<18}{alone:>10.3f}{cpu:>10.3f}{rate:>10.0f}")


if __name__ == "__main__":
    main()
