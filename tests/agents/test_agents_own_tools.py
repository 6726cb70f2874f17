"""A loop of the user's that runs tools: its step rewards arrive, and its prompt shows the tools or the run says so."""

import pytest
from agents_stage import CHAT, QUESTION, Echo, call, run, says

from etude.agents import AGENT_LOOPS, AgentLoopBase
from etude.agents.base import ConfiguredLoop
from etude.agents.validation import _warn_of_final_reward
from etude.errors import EtudeError
from etude.schemas import FunctionCall
from etude.tools import ToolSession
from etude.trajectory import Provenance, Trajectory


@pytest.fixture
def roll(monkeypatch):
    """Rolls a row out with an own loop of one call; returns the trajectory. `own` does something with it and the session."""
    monkeypatch.setattr(AGENT_LOOPS, "_items", dict(AGENT_LOOPS._items))

    def roll(own=None, prompt=lambda loop, row: loop.render_prompt(row), tools=None, by_file=False, name=None, **row):
        class Own(AgentLoopBase):
            async def run(self, sampling_params, **row):
                made = Trajectory(row["request_id"], prompt(self, row))
                async with ToolSession(self.tools, None, request_id=name or row["request_id"]) as session:
                    output = await self.server_manager.generate(
                        prompt_ids=made.prompt_ids, sampling_params=sampling_params
                    )
                    made.append(output.token_ids, Provenance.SAMPLED)
                    made.assistant_turns += 1
                    parsed = await self.context.parser.parse_ids(output.token_ids)
                    outcomes = await session.execute(parsed.calls, turn=0)
                    if own is not None:
                        own(made, session, outcomes)
                return made

        AGENT_LOOPS.register("own_tools")(ConfiguredLoop(Own, {}) if by_file else Own)
        [rollout], _ = run("own_tools", 1, [says(call(text="x"))], tools or [Echo(reward=0.5)], row=row)
        return rollout.trajectory

    return roll


@pytest.mark.parametrize("name", [None, "7f3c"])
def test_step_rewards_and_records_of_a_session_reach_the_trajectory_whatever_its_id(roll, name):
    made = roll(name=name)
    assert made.rewards.steps == [(0, "echo", 0.5)]
    assert [(record.name, record.reward) for record in made.tool_calls] == [("echo", 0.5)]


def test_a_session_that_a_tool_opens_is_the_tools_own(roll):
    class Delegate(Echo):
        async def execute(self, instance_id, parameters, **kwargs):
            async with ToolSession({"echo": self}, None, request_id="sub") as session:
                self.execute = super().execute
                await session.execute([FunctionCall(name="echo", arguments='{"text": "y"}')], turn=5)
            return await super().execute(instance_id, parameters, **kwargs)

    assert roll(tools=[Delegate(reward=0.5)]).rewards.steps == [(0, "echo", 0.5)]


def test_a_final_reward_that_the_loop_never_asks_for_is_warned_of(roll, caplog):
    _warn_of_final_reward.cache_clear()  # it is said once a process
    roll(tools=[Echo(final=1.0)])
    assert "never calls session.calc_rewards(): what calc_reward of 'echo' gives is no reward" in caplog.text


def record_alone(made, session, outcomes):
    made.add_step_reward("echo", 0.25)


def record_under_another_name(made, session, outcomes):
    made.add_step_reward("mine", outcomes[0].reward)


def leave_out(made, session, outcomes):
    session.outcomes.clear()


@pytest.mark.parametrize(
    ("own", "steps"),
    [
        (record_alone, [(0, "echo", 0.25)]),
        (record_under_another_name, [(0, "mine", 0.5)]),
        (leave_out, []),
    ],
)
def test_what_a_loop_recorded_itself_is_not_added_again(roll, own, steps):
    assert roll(own).rewards.steps == steps


def plain(loop, row):
    return loop.chat.initial_ids(row["raw_prompt"])


@pytest.mark.parametrize("by_file", [False, True])
def test_a_loop_that_runs_tools_and_shows_none_is_an_error_that_says_what_to_write(roll, by_file):
    with pytest.raises(EtudeError, match=r"own_tools.*\(echo\).*self\.render_prompt\(row\)"):
        roll(prompt=plain, by_file=by_file)


@pytest.mark.parametrize("said", ["Which echoes?", "echo_all is no tool."])
def test_another_word_does_not_name_a_tool(roll, said):
    with pytest.raises(EtudeError, match=r"does not show the model its tools \(echo\)"):
        roll(prompt=plain, raw_prompt=[{"role": "user", "content": said}])


@pytest.mark.parametrize("said", ["Call echo.", "请用echo工具回答。", "`echo(text)`"])
def test_messages_that_name_the_tools_show_them(roll, said):
    messages = [{"role": "user", "content": said}]
    assert roll(prompt=plain, raw_prompt=messages).prompt_ids == CHAT.initial_ids(messages)


def test_tools_that_a_row_may_not_use_need_not_be_shown(roll):
    assert roll(prompt=plain, active_tools=[]).prompt_ids == CHAT.initial_ids(QUESTION)


def test_render_prompt_shows_the_tools_of_the_row(roll):
    shown, other = Echo(), Echo("other")
    schemas = [tool.get_openai_tool_schema().to_openai() for tool in (shown, other)]
    assert roll(tools=[shown, other]).prompt_ids == CHAT.initial_ids(QUESTION, schemas)
    assert roll(tools=[shown, other], active_tools=["echo"]).prompt_ids == CHAT.initial_ids(QUESTION, schemas[:1])
