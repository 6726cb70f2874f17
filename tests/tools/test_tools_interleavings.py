"""Many trajectories at once over the same tools, with failures, cancellations, limits, caches and faults: the lifecycle.

Everything happens in virtual time; a schedule is drawn by Hypothesis, so that a failure shrinks to the few events that
matter. The promise is read off what each instance of each tool saw.
"""

import asyncio
import json
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_stage import ignore_cancellation, run, schema

from etude.errors import EtudeError, InfrastructureError, ToolError
from etude.schemas import FunctionCall, ToolResponse
from etude.tools import BaseTool, ToolSession

TIMEOUT = 1.0
METHODS = ["create", "execute", "calc_reward", "release"]


class Witness(BaseTool):
    """Acts on each instance as the next action of its plan says, and writes down what happened to whom and when."""

    def __init__(self, name, config, plan):
        super().__init__({"timeout": TIMEOUT, "retry_delay": 0.1} | config, schema(name))
        self.plan, self.acted = plan, 0
        self.story = defaultdict(list)
        self.running = self.most = 0

    async def act(self, method, instance_id, result):
        action = self.plan[self.acted % len(self.plan)] if self.plan else "ok"
        self.acted += 1
        self.story[instance_id].append((method, "begins"))
        try:
            if isinstance(action, Exception):
                raise action
            if action == "cancel":
                raise asyncio.CancelledError
            if action == "exit":
                raise SystemExit
            if action == "nonsense":
                result = 3
            elif action == "stubborn":
                await ignore_cancellation(30)
            elif action != "ok":
                await asyncio.sleep(action)
            self.story[instance_id].append((method, "succeeds"))
            return result
        finally:
            self.story[instance_id].append((method, "ends"))

    async def create(self, instance_id=None, **kwargs):
        return await self.act("create", instance_id, (instance_id, ToolResponse(text="hello")))

    async def execute(self, instance_id, parameters, **kwargs):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.act("execute", instance_id, ("text", 0.5, {}))
        finally:
            self.running -= 1

    async def release(self, instance_id, **kwargs):
        await self.act("release", instance_id, None)


class Scorer(Witness):
    async def calc_reward(self, instance_id, **kwargs):
        return await self.act("calc_reward", instance_id, 1.0)


ACTIONS = [
    "ok", "ok", "ok", "ok", 0.2, 0.7, 5.0, "stubborn", "cancel", "exit", "nonsense",
    ToolError("no"), ValueError("bad"), InfrastructureError("down"), ConnectionError("reset"),
]  # fmt: skip
plans = st.lists(st.sampled_from(ACTIONS), max_size=6)
limits = st.fixed_dictionaries(
    {},
    optional={
        "max_retries": st.integers(1, 2),
        "max_concurrent_calls": st.integers(1, 2),
        "faults": st.fixed_dictionaries({"timeout": st.just(0.2), "error": st.just(0.2), "garbage": st.just(0.1)}),
        "on_exception": st.sampled_from(["tell", "infrastructure", "stop"]),
    },
)
tools = st.tuples(st.booleans(), limits, st.booleans(), plans)  # scores?, config, cache?, plan
trajectory_plans = st.fixed_dictionaries(
    {
        "starts": st.floats(0, 2),
        "named": st.sets(st.integers(0, 2)),
        "turns": st.lists(
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=3), max_size=3
        ),
        "thinks": st.floats(0, 0.5),
        "scored": st.booleans(),
        "breaks": st.booleans(),
        "cancelled": st.lists(st.floats(0, 8), max_size=2),
    }
)


def made(number, scores, config, cached, plan):
    kind = Scorer if scores and not cached else Witness
    return kind(f"t{number}", config | ({"cache": {"ttl": 3}} if cached else {}), plan)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    toolbox=st.lists(tools, min_size=1, max_size=3),
    trajectories=st.lists(trajectory_plans, min_size=1, max_size=5),
)
def test_the_lifecycle_holds_in_every_interleaving(toolbox, trajectories):
    box = {f"t{i}": made(i, *description) for i, description in enumerate(toolbox)}
    endings = {}

    async def trajectory(number, plan):
        await asyncio.sleep(plan["starts"])
        rows = {f"t{i}": {} for i in plan["named"] if f"t{i}" in box}
        async with ToolSession(box, rows, request_id=f"r{number}") as session:
            for turn, calls in enumerate(plan["turns"]):
                await asyncio.sleep(plan["thinks"])
                asked = [FunctionCall(name=f"t{tool}", arguments=json.dumps({"q": q})) for tool, q in calls]
                outcomes = await session.execute(asked, turn)
                assert [outcome.requested for outcome in outcomes] == asked
            if plan["breaks"]:
                raise KeyError("the loop's own mistake")
            if plan["scored"]:
                rewards = await session.calc_rewards()
                assert set(rewards) >= set(rows)
                endings[number] = rewards

    async def everything():
        loop = asyncio.get_running_loop()
        tasks = [asyncio.ensure_future(trajectory(i, plan)) for i, plan in enumerate(trajectories)]
        for task, plan in zip(tasks, trajectories):
            for moment in plan["cancelled"]:
                loop.call_later(moment, task.cancel)
        await asyncio.wait(tasks)
        ended = loop.time()
        await asyncio.sleep(1000)  # for what ignored its cancellation
        return tasks, ended

    tasks, ended = run(everything())
    assert ended < 600  # nothing waits for ever
    for task, plan in zip(tasks, trajectories):
        if task.cancelled():
            assert plan["cancelled"]
        elif task.exception() is not None:
            assert isinstance(task.exception(), InfrastructureError | EtudeError | KeyError)
            assert not isinstance(task.exception(), KeyError) or plan["breaks"]
    for tool in box.values():
        check(tool, endings)


def check(tool, endings):
    """The promise, for every instance of a tool."""
    limit = tool.config.get("max_concurrent_calls")
    assert limit is None or "stubborn" in tool.plan or tool.most <= limit
    for instance_id, story in tool.story.items():
        count = Counter(story)
        number = int(instance_id.partition(":")[0][1:])
        created = count["create", "succeeds"]
        assert count["create", "begins"] == 1
        assert count["release", "begins"] == created
        assert count["calc_reward", "begins"] <= 1
        if number in endings and isinstance(tool, Scorer):
            assert count["calc_reward", "succeeds"] == 1
        begun = [method for method, what in story if what == "begins"]
        assert begun == sorted(begun, key=METHODS.index)
        if count["execute", "begins"]:
            assert story.index(("create", "succeeds")) < story.index(("execute", "begins"))
        if count["release", "begins"] and "stubborn" not in tool.plan:
            before = Counter(story[: story.index(("release", "begins"))])
            assert before["execute", "begins"] == before["execute", "ends"]
            assert before["calc_reward", "begins"] == before["calc_reward", "ends"]
        if not created:
            assert begun == ["create"]
