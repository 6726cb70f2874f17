"""The limits of a tool's `config`, and every way in which a tool can misbehave."""

import asyncio
import logging
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_stage import Scripted, VirtualTime, call, in_virtual_time, outcome_of, run, schema, session

from etude.errors import ConfigError, InfrastructureError, MissingExtraError, ToolError
from etude.models import build_tiny_tokenizer
from etude.schemas import ToolResponse
from etude.serving.json_service import Unavailable
from etude.tools import BaseTool, BrokenCall, CallPolicy, FunctionTool, TokenLimit, ToolRuntime, ToolSession
from etude.tools.truncation import bound_text

# --- reading the keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"timeout": 0}, "config.timeout must be a number above 0, got 0"),
        ({"timeout": "soon"}, "config.timeout"),
        ({"max_retries": -1}, "config.max_retries must be a whole number of at least 0, got -1"),
        ({"max_retries": 1.5}, "config.max_retries"),
        ({"retry_delay": -1}, "config.retry_delay"),
        ({"max_concurrent_calls": 0}, "config.max_concurrent_calls.limit must be a whole number of at least 1"),
        ({"max_concurrent_calls": True}, "config.max_concurrent_calls"),
        ({"max_concurrent_calls": [4]}, "config.max_concurrent_calls must be a section of key: value"),
        ({"max_concurrent_calls": {"scope": "cluster"}}, "config.max_concurrent_calls.limit is missing"),
        (
            {"max_concurrent_calls": {"limit": 2, "scope": "clster"}},
            "config.max_concurrent_calls.scope must be one of process, cluster.*did you mean 'cluster'",
        ),
        ({"max_concurrent_calls": {"limt": 2}}, "unknown key config.max_concurrent_calls.limt; did you mean 'limit'"),
        ({"calls_per_second": float("inf")}, "config.calls_per_second"),
        ({"max_arguments_chars": "nine"}, "config.max_arguments_chars"),
        ({"max_response_chars": 1.5}, "config.max_response_chars"),
        ({"max_response_tokens": 0}, "config.max_response_tokens"),
        (
            {"tool_response_truncate_side": "centre"},
            "config.tool_response_truncate_side must be one of left, middle, right",
        ),
        ({"on_exception": "stopp"}, "did you mean 'stop'"),
        ({"cache": True}, "config.cache must be a section of key: value, got True"),
        ({"cache": {"tll": 3}}, "unknown key config.cache.tll; did you mean 'ttl'"),
        ({"cache": {"enabled": "yes"}}, "config.cache.enabled must be true or false"),
        ({"cache": {"ttl": 0}}, "config.cache.ttl must be a number above 0"),
        ({"record": ""}, "config.record must be text that is not blank"),
        ({"replay": {"mode": "order"}}, "config.replay.path is missing"),
        ({"replay": {"path": "x", "mode": "strikt"}}, "config.replay.mode must be one of strict, order.*did you mean"),
        ({"replay": "x", "record": "y"}, "exclude each other"),
        ({"faults": {"timeout": 2}}, "config.faults.timeout must be a number from 0 to 1"),
        ({"faults": {"error": 0.6, "garbage": 0.6}}, "together must not exceed 1"),
        ({"faults": {"crash": 0.1}}, "unknown key config.faults.crash"),
    ],
)
def test_a_key_that_makes_no_sense_is_named(config, told):
    with pytest.raises(ConfigError, match=f"tool 't': .*{told}"):
        CallPolicy.from_config(config, "t")


def test_absent_and_null_mean_the_default_and_other_keys_are_the_tools():
    assert CallPolicy.from_config(None, "t") == CallPolicy()
    nulls = dict.fromkeys(("timeout", "max_retries", "cache", "record", "replay", "faults", "on_exception"))
    assert CallPolicy.from_config(nulls | {"api_key": "k"}, "t") == CallPolicy()
    assert CallPolicy.from_config({"cache": {"enabled": False}, "faults": {"error": 0}}, "t") == CallPolicy()


def test_one_policy_object_a_tool_lives_as_long_as_the_tool():
    tool = Scripted()
    shared = ToolRuntime.of(tool)
    assert ToolRuntime.of(tool) is shared
    assert ToolRuntime.of(Scripted()) is not shared


# --- time ----------------------------------------------------------------------------------------------------------


def broken_call(tool, arguments="{}"):
    with pytest.raises(BrokenCall) as caught:
        outcome_of(tool, arguments)
    return caught.value


def test_a_timeout_is_recorded_as_one():
    error = broken_call(Scripted(execute="hang"), '{"a": 1}')
    assert str(error) == "tool 't': execute failed: TimeoutError: no answer within 1 s (config.timeout)"
    record = error.record
    assert (record.name, record.arguments, record.turn, record.error) == ("t", '{"a": 1}', 0, "timeout")
    assert broken_call(Scripted(execute=OSError("gone"))).record.error == "infrastructure"


class Flaky:
    """Breaks `times` times, then works."""

    def __init__(self, times, error):
        self.left, self.error, self.at = times, error, []

    def __call__(self):
        self.at.append(asyncio.get_running_loop().time())
        self.left -= 1
        return "ok" if self.left < 0 else self.error


@pytest.mark.parametrize("error", ["hang", "stubborn", ConnectionError("x"), InfrastructureError("x"), OSError("x")])
def test_infrastructure_is_retried_on_the_same_instance(error):
    flaky = Flaky(2, error)
    tool = Scripted(config={"max_retries": 2}, execute=flaky)
    outcome = outcome_of(tool)
    assert (outcome.error, outcome.retries, outcome.reward) == (None, 2, 0.5)
    assert outcome.timeouts == (2 if isinstance(error, str) else 0)
    assert tool.count("create") == tool.count("release") == 1
    assert outcome.to_record().retries == 2


@pytest.mark.parametrize(("asked", "least"), [(20.0, 20.0), (9e9, 30.0)])
def test_a_retry_waits_as_long_as_the_service_asked(asked, least):
    flaky = Flaky(1, Unavailable("busy", asked))
    assert outcome_of(Scripted(config={"max_retries": 1, "retry_delay": 0.1}, execute=flaky)).retries == 1
    assert least < flaky.at[1] - flaky.at[0] <= least + 0.2


def test_when_the_retries_are_spent_the_call_is_broken():
    tool = Scripted(config={"max_retries": 3}, execute=ConnectionError("refused"))
    error = broken_call(tool)
    assert (tool.count("execute"), error.record.retries) == (4, 3)
    assert str(error).startswith("tool 't': execute failed: ConnectionError: refused (tests/tools/session_stage.py:")


@pytest.mark.parametrize("error", [ToolError("no"), ValueError("bad")])
def test_what_is_not_infrastructure_is_never_retried(error):
    tool = Scripted(config={"max_retries": 3}, execute=error)
    assert outcome_of(tool).error in ("tool", "exception")
    assert tool.count("execute") == 1


@pytest.mark.parametrize("method", ["create", "calc_reward", "release"])
@in_virtual_time
async def test_only_execute_is_retried(method):
    tool = Scripted(config={"max_retries": 3}, **{method: ConnectionError("x")})
    broken = pytest.raises(InfrastructureError, match=f"{method} failed")
    with nullcontext() if method == "release" else broken:
        async with session(tool, row=["t"]) as opened:
            await opened.calc_rewards()
    assert tool.count(method) == 1


def test_delays_double_differ_between_calls_and_are_the_same_in_every_run():
    def delays(request_id):
        flaky = Flaky(8, ConnectionError("x"))
        tool = Scripted(config={"max_retries": 8, "retry_delay": 1.0}, execute=flaky)

        async def main():
            async with session(tool, request_id=request_id) as opened:
                await opened.execute([call()], 0)

        run(main())
        return [b - a for a, b in zip(flaky.at, flaky.at[1:])]

    first = delays("r1")
    for retry, seconds in enumerate(first):
        longest = min(2.0**retry, 30.0)
        assert longest / 2 <= seconds <= longest + 1e-6
    assert first == pytest.approx(delays("r1"))
    assert first != pytest.approx(delays("r2"))


# --- how many at once ----------------------------------------------------------------------------------------------


class Busy(BaseTool):
    """Counts how many of its calls run at once."""

    def __init__(self, **config):
        super().__init__(config, schema("busy"))
        self.running = self.most = self.calls = 0

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(parameters.get("seconds", 1.0))
        finally:
            self.running -= 1
        return "done", 0.0, {}


async def trajectories(tool, count, **kwargs):
    async def one(i):
        async with session(tool, request_id=f"r{i}") as opened:
            return await opened.execute([call("busy", **kwargs), call("busy", **kwargs)], 0)

    return await asyncio.gather(*(one(i) for i in range(count)), return_exceptions=True)


def test_at_most_so_many_calls_run_at_once_whoever_makes_them():
    tool = Busy(max_concurrent_calls=3)
    results = run(trajectories(tool, 5))
    assert (tool.calls, tool.most) == (10, 3)
    assert all(outcome.error is None for outcomes in results for outcome in outcomes)
    unlimited = Busy()
    run(trajectories(unlimited, 5))
    assert unlimited.most == 10


@pytest.mark.parametrize("scope", ["process", "cluster"])
def test_a_limit_may_say_its_scope_and_without_a_cluster_the_process_is_all_there_is(scope):
    tool = Busy(max_concurrent_calls={"limit": 2, "scope": scope}, calls_per_second=1000)
    asyncio.run(trajectories(tool, 4, arguments='{"seconds": 0.01}'))
    assert (tool.calls, tool.most) == (8, 2)


def test_a_limit_for_a_cluster_needs_ray_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"tool 'busy': config.max_concurrent_calls .*'etude\[ray\]'"):
        ToolRuntime.of(Busy(max_concurrent_calls={"limit": 2, "scope": "cluster"}))
    ToolRuntime.of(Busy(max_concurrent_calls={"limit": 2}))


def test_waiting_for_a_turn_is_not_part_of_the_time_limit():
    tool = Busy(max_concurrent_calls=1, timeout=1.5)
    results = run(trajectories(tool, 4))
    assert all(outcome.error is None for outcomes in results for outcome in outcomes)


@in_virtual_time
async def test_a_cancelled_or_late_call_gives_its_place_back():
    tool = Busy(max_concurrent_calls=2, timeout=1.0)
    hanging = await trajectories(tool, 3, arguments='{"seconds": 5}')
    assert all(isinstance(error, BrokenCall) for error in hanging)
    waiting = asyncio.ensure_future(trajectories(tool, 6, arguments='{"seconds": 0.9}'))
    await asyncio.sleep(0.5)
    waiting.cancel()
    await asyncio.wait({waiting})
    told = await trajectories(tool, 2, arguments='{"seconds": 0.1}')
    assert all(outcome.error is None for outcomes in told for outcome in outcomes)
    assert tool.most == 2


@in_virtual_time
async def test_a_call_that_waits_when_its_session_closes_never_starts():
    tool = Busy(max_concurrent_calls=1, timeout=100)
    async with session(tool, request_id="holder") as holder:
        held = asyncio.ensure_future(holder.execute([call("busy")], 0))
        await asyncio.sleep(0.1)
        async with session(tool, request_id="waiter") as waiter:
            single = asyncio.ensure_future(waiter.execute([call("busy")], 0))
            several = asyncio.ensure_future(waiter.execute([call("busy"), call("busy")], 0))
            await asyncio.sleep(0.1)
        await asyncio.sleep(0)
        assert several.cancelled()
        await held
        await asyncio.sleep(5)
        assert single.cancelled()
    assert tool.calls == 1


async def test_calls_per_second_are_spread_over_time():
    tool = Busy(calls_per_second=50)
    ToolRuntime.of(tool)
    started = time.monotonic()  # real time: the limiter's clock is not the loop's
    async with session(tool) as opened:
        outcomes = await opened.execute([call("busy", '{"seconds": 0}')] * 60, 0)
    assert all(outcome.error is None for outcome in outcomes)
    assert time.monotonic() - started >= 0.19  # a full bucket of 50 at once, the other 10 at 50 a second


# --- how much ------------------------------------------------------------------------------------------------------


@given(text=st.text(max_size=60), limit=st.integers(1, 40), side=st.sampled_from(["left", "middle", "right"]))
def test_characters_are_cut_on_one_side_and_the_mark_counts(text, limit, side):
    cut = bound_text(text, None, limit, side=side)
    if len(text) <= limit:
        assert cut == text
        return
    assert len(cut) == limit
    head, mark, tail = (cut, "", "")
    for candidate in ("...(truncated)...", "(truncated)...", "...(truncated)"):
        if candidate in cut and candidate not in text:
            head, mark, tail = cut.partition(candidate)
            break
    if mark:
        assert text.startswith(head)
        assert text.endswith(tail)
        assert {"left": head == "", "right": tail == "", "middle": len(tail) - len(head) in (0, 1)}[side]


@pytest.mark.parametrize(
    ("side", "shown"),
    [("left", "(truncated)...6789"), ("right", "0123...(truncated)"), ("middle", "01...(truncated)...89")],
)
def test_the_side_of_the_configuration_is_cut_away(side, shown):
    text = "0123" + "x" * 50 + "6789" if side != "middle" else "01" + "x" * 50 + "89"
    config = {"max_response_chars": len(shown), "tool_response_truncate_side": side}
    assert outcome_of(Scripted(config=config, execute=(text, 0.0, {}))).response.text == shown


TOKENIZER = build_tiny_tokenizer(
    ["start the quick brown fox end", "...(truncated)...", "Error in the call of"] * 9, 400
)


def tokens(text):
    return len(TOKENIZER.encode(text, add_special_tokens=False))


def shown_of(config, text, *, limit=20, side="middle", arguments="{}"):
    tool = Scripted(config=config, create=("i", ToolResponse(text=text)), execute=(text, 0.0, {}))
    allowed = TokenLimit(limit, side, TOKENIZER, tokens)

    async def main():
        async with ToolSession({"t": tool}, {"t": {}}, request_id="r", token_limit=allowed) as opened:
            (outcome,) = await opened.execute([call(arguments=arguments)], 0)
            return opened.initial_responses[0].text, outcome

    return run(main())


@pytest.mark.parametrize(("own", "expected"), [(None, 20), (14, 14), (500, 20)])
def test_tokens_are_limited_by_the_tool_and_by_the_conversation(own, expected):
    text = "start " + "the quick brown fox " * 50 + "end"
    greeting, outcome = shown_of({"max_response_tokens": own}, text)
    for shown in (greeting, outcome.response.text):
        assert expected - 5 <= tokens(shown) <= expected
        assert shown.startswith("start")
        assert shown.endswith("end")
    _, left = shown_of({"max_response_tokens": own, "tool_response_truncate_side": "left"}, text)
    assert left.response.text.startswith("(truncated)...")
    assert left.response.text.endswith("end")


def test_arguments_are_limited_in_tokens():
    _, outcome = shown_of({"max_arguments_tokens": 8}, "x", limit=99, arguments='{"a": "' + "fox " * 20 + '"}')
    assert outcome.response.text == "Error in the call of 't': the arguments are longer than 8 tokens."
    assert shown_of({"max_arguments_tokens": 8}, "x", arguments='{"a": 1}')[1].error is None


# --- every way to misbehave, while others go on --------------------------------------------------------------------

MISBEHAVIOUR = {
    "raises": (ValueError("bad"), "exception"),
    "raises nothing sensible": (Exception(), "exception"),
    "base exception": (BaseException("odd"), "exception"),
    "exits": (SystemExit(3), "exception"),
    "tells": (ToolError("no"), "tool"),
    "returns None": ([None], ConfigError),
    "hangs": ("hang", BrokenCall),
    "ignores cancellation": ("stubborn", BrokenCall),
    "cancels itself": ("cancels_itself", BrokenCall),
    "is unreachable": (ConnectionError("refused"), BrokenCall),
    "recurses": ("recurse", "exception"),
    "reward is infinite": ([("x", float("inf"), {})], BrokenCall),
}


class Misbehaving(Scripted):
    async def play(self, method, result):
        action = self.script.get(method)
        if isinstance(action, list):
            return action[0]
        if isinstance(action, BaseException):
            raise action
        if action == "recurse":
            return await self.play(method, result)
        return await super().play(method, result)


@pytest.mark.parametrize("name", MISBEHAVIOUR)
@in_virtual_time
async def test_a_misbehaving_tool_harms_no_other_trajectory(name, caplog):
    action, expected = MISBEHAVIOUR[name]
    bad, good = Misbehaving("bad", execute=action), Scripted("good", execute="slow")

    async def trajectory(i):
        async with session(bad, good, row=["good"], request_id=f"r{i}") as opened:
            if i == 0:
                return (await opened.execute([call("bad"), call("good")], 0))[0], await opened.calc_rewards()
            first = await opened.execute([call("good")], 0)
            second = await opened.execute([call("good")], 1)
            return first[0], second[0], await opened.calc_rewards()

    with caplog.at_level(logging.CRITICAL):
        first, *others = await asyncio.gather(*(trajectory(i) for i in range(4)), return_exceptions=True)
    if isinstance(expected, str):
        assert first[0].error == expected
        assert "\n" not in first[0].response.text
        assert first[1] == {"bad": 1.0, "good": 1.0}
    else:
        assert isinstance(first, expected)
    for one, two, rewards in others:
        assert (one.error, two.error, rewards) == (None, None, {"good": 1.0})
    for tool in (bad, good):
        assert tool.count("create") == tool.count("release")
        assert tool.count("release done") == tool.count("create done")


@pytest.mark.parametrize("method", ["create", "calc_reward", "release"])
@pytest.mark.parametrize("action", [SystemExit(3), BaseException("odd"), "recurse", "hang", [b"bytes"]])
@in_virtual_time
async def test_so_do_its_other_methods(method, action):
    bad, good = Misbehaving("bad", **{method: action}), Scripted("good")
    error = ConfigError if isinstance(action, list) else InfrastructureError
    broken = pytest.raises(error, match=rf"tool 'bad'.*: {method} (failed|must return|returned)")
    with nullcontext() if method == "release" else broken:
        async with session(bad, good, row=["good", "bad"]) as opened:
            await opened.execute([call("bad"), call("good")], 0)
            await opened.calc_rewards()
    assert good.count("release done") == 1
    assert bad.count("release") == (method != "create" or isinstance(action, list))  # nonsense was created all the same


def test_fifty_megabytes_are_cut_before_they_are_looked_at():
    huge = "é" * 50_000_000
    outcome = outcome_of(Scripted(execute=(huge, 0.0, {"n": 1, "log": huge, "list": [huge] * 10_000, "of": object()})))
    assert len(outcome.response.text) == 1_000_000
    assert outcome.metrics == {"n": 1, "log": "é" * 1000, "list": "<list>", "of": "<object>"}
    assert len(outcome_of(Scripted(execute=ToolError(huge))).response.text) == 1_000_000
    assert len(outcome_of(Scripted(execute=ValueError(huge))).response.text) < 500
    many = {f"k{i}": i for i in range(1000)}
    assert len(outcome_of(Scripted(execute=("x", 0.0, many))).metrics) == 64


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("sys.exit(1)", "exception"),
        ("raise KeyboardInterrupt", "exception"),
        ("raise GeneratorExit", "exception"),
        ("next(iter([]))", "exception"),
        ("time.sleep(30)", BrokenCall),
    ],
)
async def test_what_a_function_in_a_thread_does_ends_there(body, error):
    scope = {"sys": sys, "time": time}
    exec(f"def misbehave() -> str:\n    '''Acts up.'''\n    {body}\n", scope)
    tool, good = FunctionTool(scope["misbehave"], config={"timeout": 0.2}), Scripted("good")

    async def trajectory():
        async with session(tool, good, row=["good"]) as opened:
            return (await opened.execute([call("misbehave"), call("good")], 0))[0].error

    (came,) = await asyncio.gather(trajectory(), return_exceptions=True)
    assert came == error if isinstance(error, str) else isinstance(came, error)
    assert good.count("release done") == 1


def test_ctrl_c_in_the_middle_of_a_call_releases_the_tools():
    program = """
        import asyncio, os, signal
        from etude.schemas import FunctionCall, OpenAIFunctionToolSchema
        from etude.tools import BaseTool, ToolSession

        class Slow(BaseTool):
            async def execute(self, instance_id, parameters, **kwargs):
                asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
                await asyncio.sleep(60)
            async def release(self, instance_id, **kwargs):
                print("released", flush=True)

        async def main():
            tool = Slow({}, OpenAIFunctionToolSchema.model_validate({"function": {"name": "slow"}}))
            async with ToolSession({"slow": tool}, request_id="r") as session:
                await session.execute([FunctionCall(name="slow", arguments="{}")], 0)

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["released", "interrupted"]
    assert done.stderr == ""


def test_virtual_time_finds_a_deadlock():
    async def waits_for_ever():
        await asyncio.get_running_loop().create_future()

    loop = VirtualTime()
    with pytest.raises(RuntimeError, match="deadlock"):
        loop.run_until_complete(waits_for_ever())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.mark.parametrize("key", ["timout", "timeouts", "tiemout", "max_retrie", "on_exceptions", "cach"])
def test_a_key_one_edit_from_a_known_one_is_warned_of(caplog, key):
    ToolRuntime.of(Scripted(config={key: 5}))
    assert f"config.{key} means nothing to Étude; did you mean config." in caplog.text


@pytest.mark.parametrize("key", ["time", "retries", "timeout_seconds", "x"])
def test_a_key_of_the_tools_own_is_not_warned_of(caplog, key):
    ToolRuntime.of(Scripted(config={key: 5, "timeout": 5}))
    assert not caplog.text
