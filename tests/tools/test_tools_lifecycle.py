"""The lifecycle of one trajectory's tools, in virtual time: time limits cost nothing and a deadlock is an error."""

import asyncio
import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_stage import Scripted, call, in_virtual_time, outcome_of, run, session

from etude.errors import ConfigError, DataError, EtudeError, InfrastructureError, ToolError
from etude.schemas import ToolResponse
from etude.tools import ToolSession


def fails(action):
    return isinstance(action, Exception) or action in ("hang", "stubborn", "cancels_itself", "exits")


def check_lifecycle(tool):
    """The promise, read off a tool's log after everything has ended."""
    assert tool.count("create") <= 1
    assert tool.count("release") == tool.count("create done")
    assert tool.count("calc_reward") <= 1
    begun = [event for event in tool.log if " " not in event]
    assert begun == sorted(begun, key=["create", "execute", "calc_reward", "release"].index)
    if "release" in tool.log and tool.script.get("execute") != "stubborn":
        before = Counter(tool.log[: tool.log.index("release")])
        assert before["execute"] == before["execute ended"]  # no call runs while its tool is released
    if "execute" in tool.log:
        assert tool.log.index("create done") < tool.log.index("execute")


# --- the promise, as a property ---------------------------------------------------------------------------------------

FAILURES = [
    "ok", "ok", "ok", "slow", "hang", "stubborn", "cancels_itself", "exits", "nonsense", ["nonsense"], float("nan"),
    ToolError("no"), ValueError("bad"), InfrastructureError("down"), TimeoutError(), OSError("gone"),
]  # fmt: skip
scripts = st.fixed_dictionaries(
    {method: st.sampled_from(FAILURES) for method in ("create", "execute", "calc_reward", "release")}
)


@settings(max_examples=300, deadline=None)
@given(
    tools=st.lists(scripts, min_size=1, max_size=3),
    named=st.sets(st.integers(0, 2)),
    turns=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3),
    asks_rewards=st.booleans(),
    cancellations=st.lists(st.floats(0, 3), max_size=3),
)
def test_lifecycle_holds_in_every_ending(tools, named, turns, asks_rewards, cancellations):
    tools = [Scripted(f"t{i}", **script) for i, script in enumerate(tools)]
    opened = session(*tools, row=[f"t{i}" for i in sorted(named) if i < len(tools)])

    async def trajectory():
        async with opened:
            for number, turn in enumerate(turns):
                await opened.execute([call(f"t{i}") for i in turn], number)
            return await opened.calc_rewards() if asks_rewards else None

    async def scenario():
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(trajectory())
        for moment in cancellations:
            loop.call_later(moment, task.cancel)
        await asyncio.wait({task})
        ended = loop.time()
        await asyncio.sleep(1000)  # for a create that ignored its cancellation, and its late release
        return task, ended

    task, ended = run(scenario())
    for tool in tools:
        check_lifecycle(tool)
    assert ended < 120  # nothing waits for ever
    failed_releases = [tool for tool in tools if "release" in tool.log and fails(tool.script["release"])]
    late = [tool for tool in tools if tool.script["create"] == "stubborn"]
    assert len(failed_releases) <= opened.release_failures <= len(failed_releases) + len(late)
    if not cancellations:
        assert not task.cancelled()
        error = task.exception()
        wrong = any(value in ("nonsense", ["nonsense"]) for tool in tools for value in tool.script.values())
        wrong |= any(isinstance(tool.script[name], float) for tool in tools for name in ("create", "execute"))
        assert error is None or isinstance(error, (InfrastructureError, *[ConfigError] * wrong))  # for the user to mend
        if error is None and asks_rewards:
            assert all(tool.count("calc_reward") == tool.count("create done") for tool in tools)


# --- the order of a quiet trajectory -----------------------------------------------------------------------------------


@in_virtual_time
async def test_row_arguments_reach_each_method_and_a_named_tool_is_scored_without_a_call():
    called, silent = Scripted("called"), Scripted("silent")
    kwargs = {
        "called": {
            "create_kwargs": {"ground_truth": "7", "function": "f"},
            "execute_kwargs": {"seconds": 3},
            "calc_reward_kwargs": {"weight": 2},
            "release_kwargs": {"force": True},
        },
        "silent": {"create_kwargs": None},
        "absent": None,  # how a parquet file says that this row does not have the tool
    }
    tools = {"called": called, "silent": silent, "absent": Scripted("absent")}
    async with ToolSession(tools, kwargs, request_id="r1") as opened:
        [outcome] = await opened.execute([call("called", '{"a": 1}')], 0)
        rewards = await opened.calc_rewards()
    identity = called.created_with[0]
    assert called.created_with == (identity, {"ground_truth": "7", "function": "f"})
    assert called.executed_with == (identity, {"a": 1}, {"seconds": 3})
    assert called.calculated_with == (identity, {"weight": 2})
    assert called.released_with == (identity, {"force": True})
    assert silent.created_with[0] != identity
    assert rewards == {"called": 1.0, "silent": 1.0}
    assert (outcome.response.text, outcome.reward) == ('called: {"a": 1}', 0.5)
    assert (outcome.metrics, outcome.error) == ({"n": 1}, None)
    assert silent.story == "create, create done, calc_reward, calc_reward done, release, release done"


@in_virtual_time
async def test_outcomes_keep_the_order_of_the_calls_and_calls_overlap():
    slow, fast = Scripted("slow", execute="slow"), Scripted("fast")
    async with session(slow, fast) as opened:
        outcomes = await opened.execute([call("slow"), call("fast"), call("slow")], 2)
    assert [outcome.requested.name for outcome in outcomes] == ["slow", "fast", "slow"]
    assert {outcome.turn for outcome in outcomes} == {2}
    assert asyncio.get_running_loop().time() == pytest.approx(0.3)  # of virtual time: the two slow ones ran together


@in_virtual_time
async def test_a_lazy_tool_is_created_once_and_greets_its_first_call_only():
    tool = Scripted("t", create=("mine", ToolResponse(text="hello")))
    async with session(tool) as opened:
        outcomes = await opened.execute([call("t", '{"i": 1}'), call("t", '{"i": 2}')], 0)
        outcomes += await opened.execute([call("t", '{"i": 3}')], 1)
    texts = [outcome.response.text for outcome in outcomes]
    assert texts == ['hello\nt: {"i": 1}', 't: {"i": 2}', 't: {"i": 3}']
    assert tool.count("create") == 1
    assert tool.released_with[0] == "mine"  # the id that create returned


@in_virtual_time
async def test_initial_responses_without_the_empty_ones_in_row_order():
    tools = [
        Scripted("a", create=("a", "from a")),
        Scripted("b"),
        Scripted("c", create=("c", ToolResponse(image=["i"]))),
    ]
    async with session(*tools, row=["c", "b", "a"]) as opened:
        assert opened.initial_responses == [ToolResponse(image=["i"]), ToolResponse(text="from a")]


# --- what a call can come to -------------------------------------------------------------------------------------------


def test_a_tool_error_is_told_as_it_stands():
    outcome = outcome_of(Scripted(execute=ToolError("no such\nfile")))
    assert (outcome.error, outcome.response.text, outcome.reward) == ("tool", "no such\nfile", 0.0)


def test_an_exception_is_told_in_one_line_and_logged_once_with_its_place(caplog, monkeypatch):
    tool = Scripted("logged_once", execute=ValueError("bad\nvalue"))
    with caplog.at_level(logging.WARNING, logger="etude.tools"):
        outcomes = [outcome_of(tool), outcome_of(tool)]
    assert outcomes[0].error == "exception"
    assert outcomes[0].response.text == "Error executing tool 'logged_once': ValueError: bad value"
    [record] = caplog.records
    assert "tool 'logged_once' raised ValueError: bad value (tests/tools/session_stage.py:" in record.getMessage()
    assert record.exc_info is None
    monkeypatch.setenv("ETUDE_DEBUG", "1")
    outcome_of(Scripted("logged_again", execute=ValueError("bad")))
    assert caplog.records[-1].exc_info


@pytest.mark.parametrize(
    "error", [TimeoutError(), ConnectionError("refused"), OSError("gone"), InfrastructureError("x")]
)
def test_broken_infrastructure_ends_the_trajectory(error):
    with pytest.raises(InfrastructureError, match="tool 't': execute failed") as caught:
        outcome_of(Scripted(execute=error))
    assert caught.value.__cause__ is error


@in_virtual_time
async def test_a_timeout_really_cancels_the_call_and_its_siblings():
    hanging, sibling = Scripted("hanging", execute="hang"), Scripted("sibling", {"timeout": 100}, execute="hang")
    async with session(hanging, sibling) as opened:
        with pytest.raises(InfrastructureError, match=r"tool 'hanging'.*no answer within 1 s \(config.timeout\)"):
            await opened.execute([call("sibling"), call("hanging")], 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert "execute done" not in sibling.log


@pytest.mark.parametrize(
    ("reaction", "kind", "said", "times"),
    [("infrastructure", InfrastructureError, "tool 't'", 3), ("stop", EtudeError, "on_exception is 'stop'", 1)],
)
def test_on_exception(reaction, kind, said, times):
    tool = Scripted(config={"on_exception": reaction, "max_retries": 2, "retry_delay": 0.01}, execute=ValueError("bad"))
    with pytest.raises(kind, match=said):
        outcome_of(tool)
    assert (tool.count("execute"), tool.count("release")) == (times, 1)
    assert outcome_of(Scripted(config={"on_exception": reaction}, execute=ToolError("said"))).error == "tool"


def test_an_unknown_tool_is_answered_with_the_known_ones():
    tool = Scripted("known")
    outcome = outcome_of(tool, name="x" * 10_000)
    assert outcome.error == "unknown_tool"
    assert "Available tools: known." in outcome.response.text
    assert len(outcome.response.text) < 300
    assert tool.log == []


def test_response_text_is_bounded_and_encodable():
    tool = Scripted(config={"max_response_chars": 10}, execute=("é" * 5_000_000, 0.0, {}))
    assert outcome_of(tool).response.text == "é" * 10
    tool = Scripted(config={"max_response_chars": 10}, execute=ToolError("x" * 1_000_000))
    assert outcome_of(tool).response.text == "x" * 10
    assert outcome_of(Scripted(execute=("a\ud800b", 0.0, {}))).response.text == "a?b"


def test_record_of_an_outcome():
    record = outcome_of(Scripted(), '{"a": 1}').to_record()
    assert (record.turn, record.name, record.arguments, record.reward) == (0, "t", '{"a": 1}', 0.5)
    assert record.response == 't: {"a": 1}'


# --- endings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [ToolError("x"), ValueError("x"), "hang", "cancels_itself"])
@in_virtual_time
async def test_a_failed_create_releases_the_others(failure):
    good, bad = Scripted("good"), Scripted("bad", create=failure)
    with pytest.raises(InfrastructureError, match="tool 'bad': create failed"):
        async with session(good, bad, row=["good", "bad"]):
            raise AssertionError("not reached")
    assert good.story == "create, create done, release, release done"


@pytest.mark.parametrize("failure", [ToolError("x"), ValueError("x"), "hang", float("nan")])
@in_virtual_time
async def test_a_failed_calc_reward_is_infrastructure(failure):
    tool = Scripted(calc_reward=failure)
    with pytest.raises(InfrastructureError, match="tool 't'"):
        async with session(tool, row=["t"]) as opened:
            await opened.calc_rewards()
    assert tool.count("release") == 1


@in_virtual_time
async def test_rewards_are_calculated_once():
    async with session(Scripted(), row=["t"]) as opened:
        await opened.calc_rewards()
        with pytest.raises(RuntimeError, match="already"):
            await opened.calc_rewards()


@in_virtual_time
async def test_a_session_is_used_inside_its_block_and_entered_once():
    opened = session(Scripted())
    with pytest.raises(RuntimeError, match="async with"):
        await opened.execute([call()], 0)
    async with opened:
        pass
    with pytest.raises(RuntimeError, match="async with"):
        await opened.calc_rewards()
    with pytest.raises(RuntimeError, match="once"):
        await opened.__aenter__()


@pytest.mark.parametrize("failure", [ValueError("x"), "hang", "cancels_itself"])
@in_virtual_time
async def test_a_failing_release_is_counted_and_hides_nothing(failure, caplog):
    bad, good = Scripted("bad", release=failure), Scripted("good")
    opened = session(bad, good, row=["bad", "good"])
    with pytest.raises(KeyError, match="own error"):
        async with opened:
            raise KeyError("the trajectory's own error")
    assert opened.release_failures == 1
    assert "tool 'bad': release failed" in caplog.text
    assert good.count("release done") == 1


@pytest.mark.parametrize("cancellations", [1, 2, 6])
@in_virtual_time
async def test_cancelling_again_while_tools_are_released_skips_no_release(cancellations):
    tools = [Scripted("a", execute="hang", release="slow"), Scripted("b", execute="stubborn", release="slow")]

    async def trajectory():
        async with session(*tools, row=["a", "b"]) as opened:
            await opened.execute([call("a"), call("b")], 0)

    task = asyncio.ensure_future(trajectory())
    released = []
    task.add_done_callback(lambda _: released.extend(tool.count("release done") for tool in tools))
    await asyncio.sleep(0.5)
    for _ in range(cancellations):
        task.cancel()
        await asyncio.sleep(1.02)  # the sixth, at 5.6 s, arrives during the releases
    await asyncio.wait({task})
    assert released == [1, 1]  # at the moment the trajectory ended, not some time after
    assert task.cancelled()
    assert [tool.count("calc_reward") for tool in tools] == [0, 0]


@in_virtual_time
async def test_a_call_made_elsewhere_is_stopped_before_its_tool_is_released():
    tool = Scripted(config={"timeout": 100}, execute="hang")
    async with session(tool, row=["t"]) as opened:
        elsewhere = asyncio.ensure_future(opened.execute([call()], 0))
        await asyncio.sleep(1)
    with pytest.raises(asyncio.CancelledError):
        await elsewhere
    assert tool.log.index("execute ended") < tool.log.index("release")


@in_virtual_time
async def test_a_create_that_ignores_its_cancellation_is_released_when_it_ends():
    late = Scripted("late", create="stubborn")
    opened = session(late, row=["late"])
    with pytest.raises(InfrastructureError, match="create failed"):
        await opened.__aenter__()
    assert (late.count("release"), opened.release_failures) == (0, 1)
    await asyncio.sleep(100)
    assert late.story == "create, create done, release, release done"


@in_virtual_time
async def test_two_trajectories_never_share_an_instance():
    tool = Scripted()

    async def trajectory(request_id):
        async with session(tool, row=["t"], request_id=request_id):
            await asyncio.sleep(1)

    await asyncio.gather(trajectory("r1"), trajectory("r2"))
    assert len(set(tool.identities)) == 2


def test_a_row_that_names_nothing_known_is_a_data_error():
    with pytest.raises(DataError, match=r"'calculater'.*did you mean 'calculator'"):
        ToolSession({"calculator": Scripted("calculator")}, {"calculater": {}}, request_id="r")
    with pytest.raises(DataError, match=r"'create_kwarg'.*did you mean 'create_kwargs'"):
        ToolSession({"t": Scripted()}, {"t": {"create_kwarg": {}}}, request_id="r")
    with pytest.raises(DataError, match=r"tools_kwargs.t.release_kwargs must be a mapping"):
        ToolSession({"t": Scripted()}, {"t": {"release_kwargs": 3}}, request_id="r")
