"""Tools that block the event loop: which calls are counted, and what is logged."""

import asyncio
import json
import time

import pytest

from etude.schemas import FunctionCall, OpenAIFunctionToolSchema, ToolResponse
from etude.tools import BaseTool, FunctionTool, ToolSession
from etude.trainer.metrics import tool_metrics
from etude.trajectory import Trajectory

STEP = 0.1  # seconds: longer than what counts as blocking here


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("etude.tools.session.BLOCKING_SECONDS", STEP / 2)


def run(tool, *turns):
    """The outcomes of turns of calls, each a list of arguments."""

    async def session():
        async with ToolSession({tool.name: tool}, request_id="r") as session:
            asked = [[FunctionCall(name=tool.name, arguments=json.dumps(each)) for each in turn] for turn in turns]
            return [await session.execute(calls, number) for number, calls in enumerate(asked)]

    return asyncio.run(session())


@FunctionTool
async def blocking(times: int) -> str:
    """Blocks the loop."""
    for _ in range(times):
        time.sleep(STEP)  # noqa: ASYNC251
        await asyncio.sleep(0)
    return "done"


def blocks(caplog):
    return [record.getMessage() for record in caplog.records if "blocked the event loop" in record.getMessage()]


def test_a_tool_that_blocks_the_loop_is_named_once_and_counted(caplog):
    first, second = run(blocking, [{"times": 1}], [{"times": 3}])
    assert [outcome.blocked_loop for outcome in (*first, *second)] == [1, 3]
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == blocks(caplog)[:1]
    assert "tool 'blocking': its execute blocked the event loop" in blocks(caplog)[0]
    trajectory = Trajectory("r", [1])
    trajectory.tool_calls += [outcome.to_record() for outcome in (*first, *second)]
    assert tool_metrics([trajectory])["tool/blocking/blocked_loop"] == 4


def test_only_the_call_that_blocks_is_blamed(caplog):
    @FunctionTool
    async def mixed(how: str) -> str:
        """Waits in one way or another."""
        if how == "blocking":
            time.sleep(STEP)  # noqa: ASYNC251
        elif how == "thread":
            await asyncio.to_thread(time.sleep, STEP)
        elif how == "beside":
            asyncio.get_running_loop().call_soon(time.sleep, STEP)
            await asyncio.sleep(0.01)
        else:
            await asyncio.sleep(2 * STEP)
        return how

    (outcomes,) = run(mixed, [{"how": how} for how in ("thread", "blocking", "patient", "beside")])
    assert [outcome.blocked_loop for outcome in outcomes] == [0, 1, 0, 0]
    assert [outcome.response.text for outcome in outcomes] == ["thread", "blocking", "patient", "beside"]


def test_a_plain_function_runs_in_a_thread_and_blocks_nothing(caplog):
    @FunctionTool
    def threaded() -> str:
        """Blocks a thread of its own."""
        time.sleep(STEP)
        return "b"

    ((outcome,),) = run(threaded, [{}])
    assert (outcome.response.text, outcome.blocked_loop) == ("b", 0)
    assert not blocks(caplog)


@pytest.mark.parametrize("method", ["create", "calc_reward", "release"])
async def test_a_tools_other_methods_are_named_too(method, caplog):
    schema = {"type": "function", "function": {"name": "slow", "description": "", "parameters": {"type": "object"}}}

    async def slow(self, *_, **__):
        time.sleep(STEP)  # noqa: ASYNC251
        return {"create": ("i", ToolResponse()), "calc_reward": 0.0, "release": None}[method]

    async def execute(self, instance_id, parameters, **_):
        return ToolResponse(text="x"), 0.0, {}

    kind = type("Slow", (BaseTool,), {method: slow, "execute": execute})
    tool = kind({}, OpenAIFunctionToolSchema.model_validate(schema))
    async with ToolSession({"slow": tool}, {"slow": {}}, request_id="r") as session:
        [outcome] = await session.execute([FunctionCall(name="slow", arguments="{}")], 0)
        await session.calc_rewards()
    assert outcome.blocked_loop == 0
    [line] = blocks(caplog)
    assert f"its {method} blocked the event loop" in line
