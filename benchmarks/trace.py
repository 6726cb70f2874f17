"""What tracing costs a call: off, and on with JSON lines.

    python benchmarks/trace.py [--calls 200000] [--repeats 5]

Each figure is CPU time per call of a coroutine function that does nothing, the ways in turns within one process, medians
of the repeats; `off` minus `plain` is what `@rollout_trace_op` costs when nothing is traced, `span off` what the session
and the engine's client pay for the spans that they would open.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.trace import TraceOptions, Tracer, rollout_trace_op, span


async def plain(a: int, b: str) -> int:
    """Does nothing."""
    return a


decorated = rollout_trace_op(plain)


async def with_span(a: int, b: str) -> int:
    """Does nothing, inside a span."""
    with span("tool", "nothing") as recorded:
        if recorded is not None:
            recorded.set(arguments=b)
        return a


async def cpu_per_call(function: Callable[[int, str], Awaitable[int]], calls: int) -> float:
    """Returns the CPU microseconds per call."""
    started = time.process_time()
    for _ in range(calls):
        await function(1, "b")
    return (time.process_time() - started) / calls * 1e6


async def measure(calls: int, repeats: int, folder: Path) -> None:
    """Prints a line per variant."""
    tracer = Tracer.of(TraceOptions("jsonl", path=str(folder / "traces.jsonl")), "benchmark", "trace")
    assert tracer is not None
    figures: dict[str, list[float]] = {name: [] for name in ("plain", "off", "span off", "on (jsonl)")}
    for _ in range(repeats):
        figures["plain"].append(await cpu_per_call(plain, calls))
        figures["off"].append(await cpu_per_call(decorated, calls))
        figures["span off"].append(await cpu_per_call(with_span, calls))
        with tracer.trajectory("t", {}):
            figures["on (jsonl)"].append(await cpu_per_call(decorated, max(calls // 20, 1)))
    for name, values in figures.items():
        print(f"{name:<12}{statistics.median(values):>10.3f} µs a call")


def main() -> None:
    """Parses arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options.calls, options.repeats, Path(folder)))


if __name__ == "__main__":
    main()
