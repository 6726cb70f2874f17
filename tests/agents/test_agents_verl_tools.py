"""Tools written for verl: what they read is there, or they are refused in a line that says what to change."""

import pytest
from agents_stage import Echo, call, roll, says

from etude.errors import ConfigError
from etude.tools import BaseTool, ToolResponse

CALL, ANSWER = call(text="seen"), "The answer is 5."


class Judge(BaseTool):
    """As of verl 0.5 and later: `create_kwargs` come as one keyword, and `execute` looks at the conversation."""

    def __init__(self):
        super().__init__({}, Echo().tool_schema)
        self.truths, self.looked = {}, []

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        if ground_truth is None:
            ground_truth = kwargs["create_kwargs"].get("ground_truth")
        self.truths[instance_id] = ground_truth
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        agent_data = kwargs["agent_data"]
        count = agent_data.extra_fields["count"] = agent_data.extra_fields.get("count", 0) + 1
        self.looked.append((agent_data.messages[-1]["role"], agent_data.request_id, count))
        return ToolResponse(text=f"{self.truths[instance_id]}"), 0.0, {}


class Nested(Judge):
    """Reads them in a helper of its own, and takes `agent_data` by name."""

    async def create(self, instance_id=None, **kwargs):
        self.truths[instance_id] = self._truth(kwargs)
        return instance_id, ToolResponse()

    def _truth(self, kwargs):
        return kwargs.get("create_kwargs", {}).get("ground_truth")

    async def execute(self, instance_id, parameters, agent_data=None):
        return await super().execute(instance_id, parameters, agent_data=agent_data)


class Plain(Echo):
    """Hands all its keywords on: to be given others than the row's would break it."""

    async def create(self, instance_id=None, **kwargs):
        self.given = kwargs
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        self.given_to_execute = kwargs
        return await super().execute(instance_id, parameters)


@pytest.mark.parametrize("kind", [Judge, Nested])
def test_tools_that_read_create_kwargs_and_agent_data(kind):
    tool = kind()
    kwargs = {"echo": {"create_kwargs": {"ground_truth": "72"}}}
    for row in ({"tools_kwargs": kwargs}, {}):
        trajectory, _ = roll([says(CALL), says(CALL), says(ANSWER)], [tool], row=row)
        truth = "72" if row else "None"
        assert [(record.response, record.error) for record in trajectory.tool_calls] == [(truth, None)] * 2
    assert tool.looked == [("assistant", "r", 1), ("assistant", "r", 2)] * 2
    assert trajectory.extra_fields == {"count": 2}


def test_other_tools_are_handed_the_rows_keywords_alone():
    tool = Plain()
    kwargs = {"echo": {"create_kwargs": {"ground_truth": "72"}, "execute_kwargs": {"limit": 3}}}
    roll([says(CALL), says(ANSWER)], [tool], row={"tools_kwargs": kwargs})
    assert (tool.given, tool.given_to_execute) == ({"ground_truth": "72"}, {"limit": 3})


def test_a_calc_reward_of_several_values_is_refused():
    """It was counted as broken infrastructure, and every trajectory was lost."""

    class Several(Echo):
        async def calc_reward(self, instance_id, **kwargs):
            return [0.5, 0.5]

    with pytest.raises(ConfigError, match="tool 'echo': calc_reward returned 2 values: return one number"):
        roll([says(CALL), says(ANSWER)], [Several()])


def test_failed_releases_are_logged_once_and_counted(caplog):
    class Leaky(Echo):
        async def release(self, instance_id, **kwargs):
            raise RuntimeError(f"no release of {instance_id}")

    tool = Leaky()
    with caplog.at_level("INFO", logger="etude"):
        counts = [roll([says(CALL), says(ANSWER)], [tool])[0].metrics["release_failures"] for _ in range(3)]
    assert counts == [1.0, 1.0, 1.0]
    levels = [record.levelname for record in caplog.records if "release failed" in record.message]
    assert levels == ["WARNING", "INFO", "INFO"]
