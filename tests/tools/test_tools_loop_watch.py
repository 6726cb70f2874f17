"""What the loop's watch notices, whom it blames, and that it costs and keeps nothing."""

import asyncio
import gc
import json
import threading
import time
import weakref

import pytest

from etude.schemas import FunctionCall, OpenAIFunctionToolSchema, ToolResponse
from etude.tools import BaseTool, ToolSession, loop_watch
from etude.tools.function_tool import FunctionTool
from etude.tools.loop_watch import LoopWatch
from etude.trainer.metrics import tool_metrics
from etude.trajectory import Trajectory

PATIENCE = 30.0  # seconds: for what takes a fraction of one, on a machine that is busy


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(loop_watch, "STALL_SECONDS", 0.06)
    monkeypatch.setattr(loop_watch, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(LoopWatch, "_warned", set())


def until(condition):
    """Blocks until `condition()`."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def noticed(count):
    """Blocks until the watch of this thread's loop has counted `count` stalls."""
    watch = LoopWatch._watches[asyncio.get_running_loop()]
    until(lambda: sum(watch._stalls.values()) >= count)


def run(tool, *turns):
    """What comes of turns of calls, each a list of arguments."""

    async def session():
        async with ToolSession({tool.name: tool}, request_id="r") as session:
            asked = [
                [FunctionCall(name=tool.name, arguments=json.dumps(arguments)) for arguments in turn] for turn in turns
            ]
            return [await session.execute(calls, number) for number, calls in enumerate(asked)]

    return asyncio.run(session())


def blocks(times=1):
    @FunctionTool
    async def blocking() -> str:
        """Blocks the loop."""
        for i in range(times):
            noticed(i + 1)
            await asyncio.sleep(0.05)
        return "done"

    return blocking


def test_a_tool_that_blocks_the_loop_is_named_once_and_counted(caplog):
    first, second = run(blocks(), [{}], [{}])
    assert [outcome.blocked_loop for outcome in (*first, *second)] == [1, 1]
    warnings = [record.getMessage() for record in caplog.records if record.name == loop_watch.__name__]
    assert len(warnings) == 1
    assert "tool 'blocking': its execute has blocked the event loop for 0.06 s" in warnings[0]
    assert "asyncio.to_thread" in warnings[0]
    assert f"{__file__}:" in warnings[0]  # the line of the tool's, not of the library's that waits


def test_each_stall_of_a_call_counts():
    ((outcome,),) = run(blocks(times=3), [{}])
    assert outcome.blocked_loop == 3


def test_the_count_reaches_the_metrics():
    ((outcome,),) = run(blocks(), [{}])
    trajectory = Trajectory("r", "i", [1])
    trajectory.tool_calls.append(outcome.to_record())
    assert tool_metrics([trajectory])["tool/blocking/blocked_loop"] == 1


def test_only_the_call_that_blocks_is_blamed(caplog):
    release = threading.Event()

    @FunctionTool
    async def mixed(how: str) -> str:
        """Waits in one way or another."""
        if how == "blocking":
            noticed(1)
            release.set()
        elif how == "thread":
            await asyncio.to_thread(release.wait, PATIENCE)
        else:
            while not release.is_set():
                await asyncio.sleep(0.01)
        return how

    (outcomes,) = run(mixed, [{"how": "thread"}, {"how": "blocking"}, {"how": "patient"}])
    assert [(outcome.response.text, outcome.blocked_loop) for outcome in outcomes] == [
        ("thread", 0),
        ("blocking", 1),
        ("patient", 0),
    ]


def test_who_waits_without_blocking_is_never_blamed(caplog):
    @FunctionTool
    async def patient() -> str:
        """Waits as it should."""
        await asyncio.sleep(0.5)
        return "a"

    @FunctionTool
    def threaded() -> str:
        """Blocks a thread of its own."""
        time.sleep(0.5)
        return "b"

    outcomes = [outcome for tool in (patient, threaded) for turn in run(tool, [{}]) for outcome in turn]
    assert [(outcome.response.text, outcome.blocked_loop) for outcome in outcomes] == [("a", 0), ("b", 0)]
    assert not [record for record in caplog.records if record.name == loop_watch.__name__]


def test_a_busy_loop_blames_nobody(caplog):
    """The loop does not turn for long, but no tool's step is what keeps it."""

    @FunctionTool
    async def innocent() -> str:
        """Is there."""
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return "here"

    ((outcome,),) = run(innocent, [{}])
    assert outcome.blocked_loop == 0
    assert not [record for record in caplog.records if record.name == loop_watch.__name__]


@pytest.mark.parametrize("method", ["create", "calc_reward", "release"])
def test_a_tools_other_methods_are_named_too(method, caplog):
    schema = {"type": "function", "function": {"name": "slow", "description": "", "parameters": {"type": "object"}}}

    async def blocking(self, *_, **__):
        until(lambda: "has blocked" in caplog.text)  # said after it is noted
        return {"create": ("i", ToolResponse()), "calc_reward": 0.0, "release": None}[method]

    async def execute(self, instance_id, parameters, **_):
        return ToolResponse(text="x"), 0.0, {}

    blocking.__name__ = method
    kind = type("Slow", (BaseTool,), {method: blocking, "execute": execute})
    tool = kind({}, OpenAIFunctionToolSchema.model_validate(schema))

    async def session():
        async with ToolSession({"slow": tool}, {"slow": {}}, request_id="r") as session:
            await session.execute([FunctionCall(name="slow", arguments="{}")], 0)
            await session.calc_rewards()

    asyncio.run(session())
    assert f"tool 'slow': its {method} has blocked" in caplog.text


def test_it_ends_with_its_loop_and_with_its_users():
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "etude-loop-watch"]

    until(lambda: not threads())

    async def one_after_the_other():
        for _ in range(20):
            async with ToolSession({}, request_id="r"):
                pass
            assert len(threads()) == 1
        loop = asyncio.get_running_loop()
        while loop in LoopWatch._watches:
            await asyncio.sleep(0.01)
        return weakref.ref(loop)

    loop = asyncio.run(one_after_the_other())
    until(lambda: not threads())
    gc.collect()
    assert loop() is None

    async def left_open():
        await ToolSession({}, request_id="r").__aenter__()

    asyncio.run(left_open())
    until(lambda: not threads())
    assert LoopWatch._watches == {}
