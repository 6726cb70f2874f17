"""The tools that judge answers: rewards of progress, order within a turn, references of every form."""

import pytest

from etude.errors import DataError, ToolError
from etude.schemas import FunctionCall
from etude.tools import ToolSession, builtin_config, load_tools
from etude.tools.builtin.geo3k import Geo3kTool
from etude.tools.builtin.gsm8k import Gsm8kTool
from etude.tools.builtin.video_answer import VideoAnswerTool


async def test_geo3k_rewards_progress_and_the_last_answer():
    (tool,) = load_tools(builtin_config("geo3k"))
    await tool.create("i", ground_truth="3 \\sqrt { 5 }")
    assert await tool.calc_reward("i") == 0.0
    response, reward, _ = await tool.execute("i", {"answer": "7"})
    assert (response.text, reward) == ("Current parsed answer='7' reward=0.0", -0.05)
    response, reward, _ = await tool.execute("i", {"answer": "\\sqrt{45}"})
    assert (response.text, reward) == ("Current parsed answer='\\\\sqrt{45}' reward=1.0", 0.0)
    assert (await tool.execute("i", {"answer": "\\boxed{3\\sqrt{5}}"}))[1] == -0.05  # right again is no progress
    assert await tool.calc_reward("i") == 1.0
    await tool.release("i")
    await tool.release("i")
    assert tool._instance_dict == {}


async def test_geo3k_takes_numbers_and_refuses_floods():
    tool = Geo3kTool({})
    await tool.create("i", ground_truth=8)
    assert (await tool.execute("i", {"answer": 8.0}))[1] == 0.0
    with pytest.raises(ToolError, match="longer than 2000 characters"):
        await tool.execute("i", {"answer": "8" * 2001})
    assert await tool.calc_reward("i") == 1.0
    with pytest.raises(DataError, match=r"calc_geo3k_reward\.create_kwargs\.ground_truth is missing"):
        await tool.create("j")
    for missing in ("", float("nan"), []):
        with pytest.raises(DataError, match="ground_truth is missing"):
            await tool.create("j", ground_truth=missing)


async def test_calls_of_one_turn_are_judged_in_their_order():
    tool = Geo3kTool({})
    row = {tool.name: {"create_kwargs": {"ground_truth": "2"}}}
    calls = [
        FunctionCall(name=tool.name, arguments=f'{{"answer": "{answer}"}}') for answer in ("\\\\frac{4}{2}", "2", "5")
    ]
    async with ToolSession({tool.name: tool}, row, request_id="t") as session:
        outcomes = await session.execute(calls, turn=0)
        assert [outcome.reward for outcome in outcomes] == [0.0, -0.05, -0.05]
        assert await session.calc_rewards() == {tool.name: 0.0}


@pytest.mark.parametrize(("reference", "reward"), [("-42", 1.0), ("42", 0.0)])
async def test_gsm8k_reads_a_typeset_minus(reference, reward):
    tool = Gsm8kTool({})
    await tool.create("i", ground_truth=reference)
    await tool.execute("i", {"answer": "−42"})
    assert await tool.calc_reward("i") == reward


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        ("B", "B", 1.0),
        ("(b) because he left", "B", 1.0),
        ("C", "B", 0.0),
        ("The answer is **B**.", "B", 1.0),
        ("", "B", 0.0),
        ("He is a ghost", "he is a ghost.", 1.0),
    ],
)
async def test_the_answer_to_a_question_on_a_video(answer, reference, reward):
    tool = VideoAnswerTool({})
    await tool.create("i", ground_truth=reference)
    step_reward = (await tool.execute("i", {"answer": answer}))[1]
    assert step_reward == (0.0 if reward else -0.05)
    assert await tool.calc_reward("i") == reward
