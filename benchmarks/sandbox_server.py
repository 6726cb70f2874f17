"""The sandbox server under load, beside bare `python -c`, in one run.

1. `POST /run_code` with `print(1+1)`, one after the other, alternating with `python -c 'print(1+1)'`: medians.
2. The same request, 8 at once: runs a second, beside 8 bare `python -c` at once. With `--peer URL` a Sandbox Fusion
   server that runs is measured in the same run. Without one, its published figures stand in: 8.7 to 11.1 runs a second
   without any isolation, on an idle machine of this class where `python -c` took 28 to 45 ms at the same time; both
   are also set in relation to `python -c`, because a machine that is busy slows everything.
3. 2,000 requests, 64 at once, 5 % of them hostile (fork bomb, memory bomb, endless loop, endless output, kill -9 of
   everything it sees): every answer checked; memory of the server's process, processes and mounts before and after.

    python benchmarks/sandbox_server.py [--requests 2000] [--concurrency 64] [--peer http://127.0.0.1:8081]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time

import aiohttp
import psutil

HOSTILE = (
    "import os\nwhile True: os.fork()",
    "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "while True: pass",
    "while True: print('x' * 100000)",
    "import os, signal\nos.kill(-1, signal.SIGKILL)\nwhile True: pass",
)
FUSION_RUNS = (8.7, 11.1)
FUSION_BARE = (0.028, 0.045)  # seconds of `python -c` on the machine of those runs


def interpreter() -> str:
    """Returns the interpreter itself, without the start-up cost of an environment's wrappers."""
    return os.path.realpath(sys.executable)


def bare() -> float:
    began = time.perf_counter()
    done = subprocess.run([interpreter(), "-c", "print(1+1)"], capture_output=True, check=True)
    assert done.stdout == b"2\n"
    return time.perf_counter() - began


async def post(http: aiohttp.ClientSession, url: str, code: str, **fields: object) -> dict:
    async with http.post(f"{url}/run_code", json={"code": code, "language": "python", **fields}) as response:
        assert response.status == 200, (response.status, await response.text())
        return await response.json()


async def timed(http: aiohttp.ClientSession, url: str) -> float:
    began = time.perf_counter()
    answer = await post(http, url, "print(1+1)")
    assert answer["run_result"]["stdout"] == "2\n", answer
    return time.perf_counter() - began


async def runs_a_second(http: aiohttp.ClientSession, url: str, at_once: int, seconds: float) -> float:
    done, until = 0, time.perf_counter() + seconds
    began = time.perf_counter()

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < until:
            await timed(http, url)
            done += 1

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return done / (time.perf_counter() - began)


async def bare_runs_a_second(at_once: int, seconds: float) -> float:
    done, until = 0, time.perf_counter() + seconds
    began = time.perf_counter()

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < until:
            await asyncio.to_thread(bare)
            done += 1

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return done / (time.perf_counter() - began)


async def latency(http: aiohttp.ClientSession, urls: dict[str, str], rounds: int) -> float:
    """Prints medians; returns that of `python -c`, in seconds."""
    times: dict[str, list[float]] = {"python -c": [], **{name: [] for name in urls}}
    for _ in range(rounds):
        times["python -c"].append(await asyncio.to_thread(bare))
        for name, url in urls.items():
            times[name].append(await timed(http, url))
    medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    for name, median in medians.items():
        print(f"  {name:16} {median:8.1f} ms median   {median / medians['python -c']:5.2f} x python -c")
    return medians["python -c"] / 1e3


async def storm(http: aiohttp.ClientSession, url: str, requests: int, at_once: int) -> dict[str, int]:
    """Sends all requests and checks every answer against what its program must do."""
    gate = asyncio.Semaphore(at_once)
    counts = {"right": 0, "hostile contained": 0, "wrong": 0}

    async def one(i: int) -> None:
        async with gate:
            if i % 20 == 7:
                answer = await post(http, url, HOSTILE[i // 20 % len(HOSTILE)], run_timeout=2, memory_limit_MB=128)
                contained = answer["status"] == "Failed"
                counts["hostile contained" if contained else "wrong"] += 1
                if not contained:
                    print("  not contained:", i // 20 % len(HOSTILE), str(answer)[:300])
            else:
                answer = await post(http, url, f"print({i} * 3)", run_timeout=60)
                right = answer["status"] == "Success" and answer["run_result"]["stdout"] == f"{i * 3}\n"
                counts["right" if right else "wrong"] += 1
                if not right:
                    print("  wrong:", i, str(answer)[:300])

    await asyncio.gather(*(one(i) for i in range(requests)))
    return counts


def state(server: psutil.Process) -> tuple[float, int, int]:
    """Returns the MiB of the server's own process, the number of its descendants, and the mounts of this machine."""
    with open("/proc/self/mounts", encoding="utf-8") as file:
        mounts = len(file.readlines())
    return server.memory_info().rss / (1 << 20), len(server.children(recursive=True)), mounts


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--peer", help="A Sandbox Fusion server to measure beside ours.")
    options = parser.parse_args()
    command = [sys.executable, "-m", "etude.cli.main", "sandbox", "serve", "--port", "0"]
    command += ["--workers", str(options.workers), "--max-concurrency", str(2 * options.concurrency)]
    process = subprocess.Popen(  # noqa: ASYNC220
        [*command, "--queue-seconds", "600"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        greeting = process.stdout.readline().strip()
        print(greeting)
        urls = {"etude": greeting.split()[0], **({"sandbox fusion": options.peer} if options.peer else {})}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=1200)) as http:
            await measure(http, urls, options, psutil.Process(process.pid))
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=30)
        print(f"after the server's end: {len(alive)} of its processes are left")


async def measure(http: aiohttp.ClientSession, urls: dict[str, str], options: argparse.Namespace, server) -> None:
    for url in urls.values():
        for _ in range(10):
            await timed(http, url)
    print(f"1. one after the other, {options.rounds} rounds, alternating")
    python = await latency(http, urls, options.rounds)
    print(f"2. 8 at once, {options.seconds:g} s each")
    rates = {name: await runs_a_second(http, url, 8, options.seconds) for name, url in urls.items()}
    rates["python -c"] = await bare_runs_a_second(8, options.seconds)
    for name, rate in rates.items():
        print(f"  {name:16} {rate:8.1f} runs/s   {rate / rates['python -c']:5.2f} x python -c")
    if options.peer:
        print(f"  ratio {rates['etude'] / rates['sandbox fusion']:.1f} x")
    else:
        low, high = (rates["etude"] / runs for runs in reversed(FUSION_RUNS))
        print(f"  {low:.1f} to {high:.1f} x Sandbox Fusion's published {FUSION_RUNS[0]} to {FUSION_RUNS[1]} runs/s")
        ours = rates["etude"] * python
        low, high = (ours / (runs * bare) for runs, bare in zip(reversed(FUSION_RUNS), reversed(FUSION_BARE)))
        print(f"  runs in the time of one `python -c`: {ours:.2f}, {low:.1f} to {high:.1f} x its published figures")
    print(f"3. {options.requests} requests, {options.concurrency} at once, 5 % hostile")
    await storm(http, urls["etude"], options.requests // 10, options.concurrency)  # warm-up: buffers grow to their size
    before = state(server)
    began = time.perf_counter()
    counts = await storm(http, urls["etude"], options.requests, options.concurrency)
    seconds = time.perf_counter() - began
    await asyncio.sleep(1)
    after = state(server)
    print(f"  {counts} in {seconds:.1f} s")
    print(
        f"  memory of the server {before[0]:.1f} -> {after[0]:.1f} MiB, processes {before[1]} -> {after[1]},", end=" "
    )
    print(f"mounts {before[2]} -> {after[2]}")
    assert counts["wrong"] == 0
    assert sum(counts.values()) == options.requests


if __name__ == "__main__":
    asyncio.run(main())
