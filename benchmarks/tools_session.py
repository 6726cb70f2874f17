"""What the session layer costs a tool call, in CPU time, and whether one turn's calls overlap.

    python benchmarks/tools_session.py [--trajectories 1000] [--turns 3] [--repeats 5]

Both ways of the first part run in turns within one process, and their medians are compared: `bare` awaits the four
methods of the tool directly, one after another, as a loop without any guarantee would; `session` does the same through
`ToolSession`. Their difference is the price of the lifecycle, the argument check, the time limit and the rest. The tool
answers at once, so nothing but CPU time passes; trajectories run concurrently. `per call` is the difference of the whole
trajectory (create, calls, calc_reward, release) divided by its calls; `per call alone` leaves out the trajectory's fixed
part, which is measured with no calls at all. The second part measures wall time, of calls that sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from etude.schemas import FunctionCall, OpenAIFunctionToolSchema, ToolResponse
from etude.tools import BaseTool, ToolSession, function_tool

SCHEMA = {
    "type": "function",
    "function": {
        "name": "counter",
        "description": "Counts.",
        "parameters": {
            "type": "object",
            "properties": {"by": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["by"],
        },
    },
}
ARGUMENTS = '{"by": 1, "note": "again"}'
CALL = FunctionCall(name="counter", arguments=ARGUMENTS)


class Counter(BaseTool):
    """A stateful tool that answers immediately; all four methods do something."""

    def __init__(self, seconds: float = 0.0, config: dict[str, Any] | None = None) -> None:
        super().__init__(config or {}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._seconds = seconds
        self._counts: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> tuple[str, ToolResponse]:
        """Starts the count at 0."""
        assert instance_id is not None
        self._counts[instance_id] = 0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Adds to the count."""
        if self._seconds:
            await asyncio.sleep(self._seconds)
        self._counts[instance_id] += parameters["by"]
        return ToolResponse(text=str(self._counts[instance_id])), 0.0, {}

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """Returns the count."""
        return float(self._counts[instance_id])

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Deletes the count."""
        del self._counts[instance_id]


@function_tool("counter", schema=SCHEMA)
async def plain_counter(by: int, note: str = "") -> str:
    """Counts without state."""
    return str(by)


async def bare(tool: BaseTool, name: str, turns: int) -> None:
    """A trajectory that calls the tool's methods directly."""
    instance_id, _ = await tool.create(name)
    for _ in range(turns):
        await asyncio.sleep(0)  # where a model would generate: lets other trajectories run
        await tool.execute(instance_id, {"by": 1, "note": "again"})
    await tool.calc_reward(instance_id)
    await tool.release(instance_id)


async def through_session(tool: BaseTool, name: str, turns: int) -> None:
    """The same trajectory through a `ToolSession`."""
    async with ToolSession({"counter": tool}, {"counter": {}}, request_id=name) as session:
        for turn in range(turns):
            await asyncio.sleep(0)
            await session.execute([CALL], turn)
        await session.calc_rewards()


Trajectory = Callable[[BaseTool, str, int], Awaitable[None]]


def cpu_seconds(trajectory: Trajectory, tool: BaseTool, trajectories: int, turns: int) -> float:
    """Returns the CPU time of this process for all trajectories at once."""

    async def all_of_them() -> float:
        gc.collect()
        started = time.process_time()
        await asyncio.gather(*(trajectory(tool, f"t{i}", turns) for i in range(trajectories)))
        return time.process_time() - started

    return asyncio.run(all_of_them())


def price(tool: BaseTool, trajectories: int, turns: int, repeats: int) -> tuple[float, float]:
    """Returns (median CPU seconds bare, median through the session), measured alternately."""
    bares, sessions = [], []
    for _ in range(repeats):
        bares.append(cpu_seconds(bare, tool, trajectories, turns))
        sessions.append(cpu_seconds(through_session, tool, trajectories, turns))
    return statistics.median(bares), statistics.median(sessions)


async def overlap(calls: int, seconds: float) -> float:
    """Returns the wall seconds of one turn with `calls` calls of `seconds` each."""
    async with ToolSession({"counter": Counter(seconds)}, {"counter": {}}, request_id="overlap") as session:
        started = time.perf_counter()
        await session.execute([CALL] * calls, 0)
        return time.perf_counter() - started


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    n, turns = options.trajectories, options.turns
    print(f"{n} concurrent trajectories x {turns} calls, medians of {options.repeats}, CPU ms")
    print(f"{'tool':<12}{'bare':>12}{'session':>12}{'per call':>12}{'per call alone':>16}{'per trajectory':>16}")
    for name, tool in (("stateful", Counter()), ("function", plain_counter)):
        without, with_session = price(tool, n, turns, options.repeats)
        fixed_without, fixed_with = price(tool, n, 0, options.repeats)
        whole, fixed = with_session - without, fixed_with - fixed_without
        figures = (without / n, with_session / n, whole / n / turns, (whole - fixed) / n / turns, fixed / n)
        milliseconds = [1000 * figure for figure in figures]
        print(f"{name:<12}" + "".join(f"{m:>{w}.4f}" for m, w in zip(milliseconds, (12, 12, 12, 16, 16))))
    print(f"16 calls of 0.5 s in one turn: {asyncio.run(overlap(16, 0.5)):.3f} s of wall time")


if __name__ == "__main__":
    main()
