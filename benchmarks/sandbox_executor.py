"""The embedded executor beside a bare interpreter, in one run: latency, throughput, and what is left after many runs.

    OMP_NUM_THREADS=1 python benchmarks/sandbox_executor.py [--isolation auto] [--rounds 200] [--flat 2000]

Each round takes one measurement of every kind in turn, so that a busy machine slows all of them alike; quote the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import time
from pathlib import Path

import psutil

from etude.sandbox import Executor, RunRequest, jail

PROGRAM = "print(1+1)"


def bare() -> None:
    """Runs `python3 -c`, as a shell would start it."""
    finished = subprocess.run([jail.interpreter(), "-c", PROGRAM], capture_output=True, check=True)
    assert finished.stdout == b"2\n"


def state() -> tuple[int, int, int, float]:
    """Returns the executor's processes, this process's descriptors, mounts, and resident MiB in total."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    memory = 0
    for process in processes:
        try:
            memory += process.memory_full_info().pss
        except psutil.Error:
            continue
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    return len(processes), len(os.listdir("/proc/self/fd")), mounts, memory / 2**20


def report(name: str, seconds: list[float], against: float | None = None) -> float:
    """Prints a line; returns the median in ms."""
    median = statistics.median(seconds) * 1000
    p90 = statistics.quantiles(seconds, n=10)[-1] * 1000
    ratio = "" if against is None else f"   {median / against:5.2f} x bare"
    print(f"{name:34s} median {median:7.2f} ms   p90 {p90:7.2f} ms{ratio}")
    return median


async def latencies(executor: Executor, rounds: int) -> None:
    """Measures runs one after the other."""
    session = await executor.session()
    bares, runs, cells = [], [], []
    for _ in range(rounds):
        started = time.perf_counter()
        bare()
        bares.append(time.perf_counter() - started)
        started = time.perf_counter()
        result = await executor.run(RunRequest(PROGRAM))
        runs.append(time.perf_counter() - started)
        assert result.stdout == "2\n"
        started = time.perf_counter()
        cell = await executor.run_cell(session, "1 + 1")
        cells.append(time.perf_counter() - started)
        assert cell.text == "2"
    await executor.close_session(session)
    against = report("bare python3 -c", bares)
    report("embedded run", runs, against)
    report("cell of a session", cells, against)

    back_to_back = []
    for _ in range(rounds):
        started = time.perf_counter()
        await executor.run(RunRequest(PROGRAM))
        back_to_back.append(time.perf_counter() - started)
    report("embedded run, back to back", back_to_back, against)


async def throughput(executor: Executor, rounds: int) -> None:
    """Measures eight runs at once."""

    async def one() -> None:
        async with limit:
            await executor.run(RunRequest(PROGRAM))

    limit = asyncio.Semaphore(8)
    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(rounds)))
    ours = rounds / (time.perf_counter() - started)

    async def other() -> None:
        async with limit:
            process = await asyncio.create_subprocess_exec(jail.interpreter(), "-c", PROGRAM, stdout=subprocess.PIPE)
            await process.communicate()

    started = time.perf_counter()
    await asyncio.gather(*(other() for _ in range(rounds)))
    theirs = rounds / (time.perf_counter() - started)
    print(f"8 at once: {ours:.0f} runs/s, bare python3 -c {theirs:.0f}/s: {ours / theirs:.2f} x")


async def flat(executor: Executor, runs: int) -> None:
    """Measures what many runs leave behind."""
    await executor.run(RunRequest(PROGRAM))
    await asyncio.sleep(1)
    before = state()
    for _ in range(runs // 50):
        await asyncio.gather(*(executor.run(RunRequest(PROGRAM)) for _ in range(50)))
    await asyncio.sleep(1)
    after = state()
    print(f"before {runs} runs: %d processes, %d descriptors, %d mounts, %.0f MiB" % before)
    print(f"after  {runs} runs: %d processes, %d descriptors, %d mounts, %.0f MiB" % after)


async def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--flat", type=int, default=2000)
    arguments = parser.parse_args()
    started = time.perf_counter()
    async with await Executor.open(arguments.isolation) as executor:
        opened = time.perf_counter() - started
        print(f"{executor.isolation.value}: opened in {opened:.2f} s; load {os.getloadavg()[0]:.1f}")
        await latencies(executor, arguments.rounds)
        await throughput(executor, arguments.rounds)
        await flat(executor, arguments.flat)


if __name__ == "__main__":
    asyncio.run(main())
