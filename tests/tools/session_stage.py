"""The stage of the session's tests, in virtual time: a tool that acts as its script says."""

import asyncio
import json
from collections import Counter

from virtual_time import VirtualTime, in_virtual_time, run  # noqa: F401

from etude.schemas import FunctionCall, OpenAIFunctionToolSchema, ToolResponse
from etude.tools import BaseTool, ToolSession


def schema(name, parameters=None):
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters})
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


async def ignore_cancellation(seconds):
    end = asyncio.get_running_loop().time() + seconds
    while (left := end - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            continue


class Scripted(BaseTool):
    """Does what its script says at each method, and logs what was begun and what succeeded.

    A script's value is a word, an exception to raise, something to return, or a function that gives one of these.
    """

    def __init__(self, name="t", config=None, parameters=None, **script):
        super().__init__({"timeout": 1.0} | (config or {}), schema(name, parameters))
        self.script = script
        self.log = []
        self.identities = []

    def count(self, event):
        return Counter(self.log)[event]

    @property
    def story(self):
        """What was begun and what succeeded."""
        return ", ".join(event for event in self.log if not event.endswith("ended"))

    async def act(self, method, result):
        self.log.append(method)
        try:
            return await self.play(method, result)
        finally:
            self.log.append(f"{method} ended")

    async def play(self, method, result):
        action = self.script.get(method, "ok")
        action = action() if callable(action) else action
        if isinstance(action, Exception):
            raise action
        if action == "slow":
            await asyncio.sleep(0.3)
        elif action == "hang":
            await asyncio.sleep(1e9)
        elif action == "cancels_itself":
            raise asyncio.CancelledError
        elif action == "exits":
            raise SystemExit(3)
        elif action == "stubborn":
            await ignore_cancellation(50.0)
        elif not isinstance(action, str) or action != "ok":
            result = action
        self.log.append(f"{method} done")
        return result

    async def create(self, instance_id=None, **create_kwargs):
        self.identities.append(instance_id)
        self.created_with = (instance_id, create_kwargs)
        return await self.act("create", (instance_id, ToolResponse()))

    async def execute(self, instance_id, parameters, **execute_kwargs):
        self.executed_with = (instance_id, parameters, execute_kwargs)
        return await self.act("execute", (ToolResponse(text=f"{self.name}: {json.dumps(parameters)}"), 0.5, {"n": 1}))

    async def calc_reward(self, instance_id, **calc_reward_kwargs):
        self.calculated_with = (instance_id, calc_reward_kwargs)
        return await self.act("calc_reward", 1.0)

    async def release(self, instance_id, **release_kwargs):
        self.released_with = (instance_id, release_kwargs)
        await self.act("release", None)


def call(name="t", arguments="{}"):
    return FunctionCall(name=name, arguments=arguments)


def session(*tools, row=(), request_id="r"):
    return ToolSession({tool.name: tool for tool in tools}, {name: {} for name in row}, request_id=request_id)


def outcome_of(tool, arguments="{}", name=None):
    async def main():
        async with session(tool) as opened:
            return (await opened.execute([call(name or tool.name, arguments)], 0))[0]

    return run(main())
