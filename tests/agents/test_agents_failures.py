"""The failure suite: whatever breaks, and wherever a rollout is cancelled, nothing leaks, nothing hangs, and what was not
finished is neither scored nor trained on."""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import psutil
import pytest
from agents_stage import QUESTION, SAMPLING, Recorder, call, context, run, says
from failure_stage import ENGINES, PATIENCE, Gate, Native, World, assert_dropped, cancel_once

from etude.agents import AgentLoopManager, AgentState
from etude.agents.environments import ENVIRONMENTS, EnvOptions, TextEnv, load_environment, register_env
from etude.sandbox import RunRequest, SandboxUnavailableError
from etude.tools.builtin.code_interpreter import SandboxFusionTool
from etude.trajectory import Provenance, StopReason

POINTS = {
    "create": AgentState.PENDING,
    "start_interaction": AgentState.PENDING,
    "create again": AgentState.PENDING,  # of the second attempt, after an infrastructure failure of the first
    "generate 0": AgentState.GENERATING,
    "generate 1": AgentState.GENERATING,  # with a tool's answer in its context
    "execute": AgentState.PROCESSING_TOOLS,
    "generate_response": AgentState.INTERACTING,
    "finalize_interaction": AgentState.TERMINATED,
    "calc_reward": AgentState.TERMINATED,
    "release": AgentState.TERMINATED,
    "score": AgentState.TERMINATED,
}
BRIEF = {"timeout": 0.2}  # of what cleans up, which is waited for


def test_every_state_is_stood_in():
    # a summary is asked of the engine as a turn is; what happens around it: test_agents_compaction.py
    assert {*POINTS.values(), AgentState.COMPACTING} == set(AgentState)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_suites_conversation_goes_through_every_state_when_nobody_stops_it(engine):
    world = World(engine=engine)
    results = world.run()
    world.assert_nothing_is_left()
    for result in results:
        trajectory = result.trajectory
        assert (trajectory.stop_reason, trajectory.assistant_turns) == (StopReason.COMPLETED, 3)
        owners = {segment.provenance for segment in trajectory.segments}
        assert owners == set(Provenance)
        assert trajectory.rewards.total() == 0.5 + 2 * 0.25 + 1.0 + 1.0
    assert sorted(world.scored) == ["u0/0/0", "u1/1/0", "u2/2/0"]


# -- cancellation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("point", POINTS)
def test_cancellation_in_any_state_leaves_nothing(point, engine):
    cleans_up = point in ("release", "finalize_interaction")
    world = World(point, engine, limits=BRIEF if cleans_up else None)

    async def main():
        await world.cancelled()
        return [left for left in asyncio.all_tasks() if left is not asyncio.current_task()]

    assert asyncio.run(main()) == []
    world.assert_nothing_is_left()
    assert world.scored == []
    judged = world.tool.log["calc_reward"]  # by the session, of trajectories that had ended before
    assert judged == (3 if point in ("release", "finalize_interaction", "score") else 0)


@pytest.mark.parametrize("engine", ["native", "deterministic"])
def test_an_engine_whose_requests_were_cancelled_samples_as_a_new_one(engine):
    world = World("generate 1", engine)

    async def main():
        await world.cancelled()
        world.gate.point = "nowhere"
        for row in world.rows:
            row["long_turn"] = None
        return await world.generate()

    after = asyncio.run(main())
    fresh = World(engine=engine).run()
    assert [r.trajectory.response_ids for r in after] == [r.trajectory.response_ids for r in fresh]


@pytest.mark.parametrize("point", ["reset", "step"])
def test_cancellation_while_an_environment_thinks_closes_it(point):
    gate, log, engine = Gate(point), Counter(), Recorder([says("1")])

    class Room(TextEnv):
        async def reset(self, *, seed=None, options=None):
            log["reset"] += 1
            await gate.at("reset")
            return "Say a number.", {}

        async def step(self, action):
            await gate.at("step")
            return "", 1.0, True, False, {}

        def close(self):
            log["close"] += 1

    register_env("failures_stage")(Room)
    try:
        environment = load_environment(EnvOptions("failures_stage"), {}, lockstep=False)
    finally:
        ENVIRONMENTS._items.pop("failures_stage")
    manager = AgentLoopManager(context(environment=environment), engine)
    rows = [{"raw_prompt": QUESTION, "uid": f"u{i}", "rollout_index": i} for i in range(3)]
    asyncio.run(cancel_once(lambda: gate.held == 3, manager.generate(rows, SAMPLING)))
    assert log == {"reset": 3, "close": 3}
    assert sorted(engine.opened) == sorted(engine.closed)


IN_THE_LOOP = [p for p, state in POINTS.items() if state is not AgentState.TERMINATED and p != "create again"]


@pytest.mark.parametrize("point", [*IN_THE_LOOP, "calc_reward"])
def test_a_trajectory_that_hangs_in_any_state_is_retried_then_dropped(point):
    world = World(point, trajectory_timeout=0.2, infrastructure_retries=1)
    results = world.run()
    world.assert_nothing_is_left()
    assert [(r.attempts, r.failures, r.dropped) for r in results] == [(2, 2, StopReason.INFRASTRUCTURE)] * 3
    assert_dropped(results)
    assert world.scored == []


def test_a_scorer_that_hangs_is_asked_again_then_its_trajectory_is_dropped():
    world = World("score", trajectory_timeout=0.2, infrastructure_retries=1)
    results = world.run()
    world.assert_nothing_is_left()
    assert [(r.attempts, r.failures) for r in results] == [(1, 2)] * 3
    assert_dropped(results)
    assert all(r.cause.endswith("no answer within 0.2 s (rollout.trajectory_timeout)") for r in results)


@pytest.mark.parametrize("point", ["release", "finalize_interaction"])
def test_what_hangs_while_cleaning_up_costs_its_time_and_nothing_else(point):
    world = World(point, limits=BRIEF)
    results = world.run()
    world.assert_nothing_is_left()
    assert [(r.attempts, r.failures, r.trajectory.rewards.score) for r in results] == [(1, 0, 1.0)] * 3


# -- the engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("step", [0, 3, 9, 15])
def test_an_engine_that_fails_once_costs_an_attempt_and_changes_no_token(step, deterministic):
    """In the first prefill, in the middle of a turn, in a turn behind a tool's answer: all rows are in flight."""
    engine = Native(Gate("nowhere"), deterministic=deterministic, failing=lambda number: number == step)
    world = World(engine=engine)
    results = world.run()
    world.assert_nothing_is_left()
    clean = World(engine="deterministic" if deterministic else "native").run()
    assert max(result.failures for result in results) == 1
    for result, expected in zip(results, clean):
        assert (result.dropped, result.attempts) == (None, 1 + result.failures)
        if result.failures:
            assert "no room for keys and values" in result.cause
        assert result.trajectory.response_ids == expected.trajectory.response_ids
        assert result.trajectory.response_log_probs == pytest.approx(expected.trajectory.response_log_probs, abs=1e-4)
        assert result.trajectory.rewards == expected.trajectory.rewards  # those of one attempt, not of two
    assert len(world.scored) == 3


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_that_keeps_failing_drops_everything_and_scores_nothing(deterministic):
    engine = Native(Gate("nowhere"), deterministic=deterministic, failing=lambda number: number % 3 == 2)
    world = World(engine=engine, rows=5, infrastructure_retries=2)
    results = world.run()
    world.assert_nothing_is_left()
    assert_dropped(results)
    assert {(r.attempts, r.failures, r.dropped) for r in results} == {(3, 3, StopReason.INFRASTRUCTURE)}
    assert world.scored == []
    assert world.tool.log["calc_reward"] == 0


# -- what the tools talk to ----------------------------------------------------------------------------------------


def roll_out(tools, script, *, rows=3, **given):
    """The results of a batch of which everything is in flight at once, and the request ids that were scored."""
    scored = []

    async def score(trajectory, row):
        scored.append(trajectory.request_id)
        trajectory.rewards.score = 1.0

    results, _ = run(None, rows, script, tools, scorer=score, **given)
    return results, sorted(scored)


def test_the_death_of_a_tool_server_is_scored_for_nobody_who_needed_it(tmp_path):
    """A real MCP server dies in the middle of calls and stays away; a row that does not use it goes on."""
    pytest.importorskip("mcp")
    from mcp_stage import HttpServer, configured

    from etude.tools.mcp import close_connections

    server = HttpServer("streamable-http")
    try:
        tools = configured(tmp_path, {"stage": server.entry | {"connect_attempts": 2}})

        def script(request_id, prompt, turn):
            if request_id.startswith("u0/"):
                return says(call("die", after=0.3))
            return says("5") if request_id.startswith("u2/") else says(call("wait", seconds=30))

        results, scored = roll_out(tools.values(), script, infrastructure_retries=1)
        assert_dropped(results[:2])
        assert [(r.attempts, r.failures) for r in results] == [(2, 2), (2, 2), (1, 0)]
        assert all("MCP server 'stage'" in r.cause and "cannot connect" in r.cause for r in results[:2])
        assert scored == ["u2/2/0"]
    finally:
        close_connections()
        server.close()


@pytest.fixture
def processes():
    """The processes that a test starts: none may be left of them."""
    before = set(psutil.Process().children(recursive=True))
    started = lambda: set(psutil.Process().children(recursive=True)) - before  # noqa: E731
    yield started
    _, alive = psutil.wait_procs(started(), PATIENCE)
    assert alive == []


@pytest.fixture
def interpreter(processes):
    """`interpreter(**config)`: the real code tool, with a sandbox of its own that is closed after the test."""
    made = []

    def make(**config):
        made.append(SandboxFusionTool({"num_workers": 3, "enable_global_rate_limit": False, **config}))
        if "sandbox_fusion_url" not in config:
            try:
                made[0]._sandbox().run_blocking(RunRequest("print(1)"))
            except SandboxUnavailableError as error:
                pytest.skip(str(error))
        return made[0]

    yield make
    for tool in made:
        assert tool._instance_dict == {}
        assert (tool._here.held, tool._here.waiting) == (0, 0)
        if tool._client is not None:
            tool._client.close()


def kill_jail(tool):
    """Kills the process that all boxes of the tool's sandbox come from; the kernel ends what is inside."""
    signal.pidfd_send_signal(tool._client._sandbox._executor._fork_server._pidfd, signal.SIGKILL)


def kill_in_mid_call(tool, kill, times):
    """Wraps the tool's `execute`: each time all three rows wait for their program, `kill` strikes."""
    execute, waiting = tool.execute, []

    async def watched(instance_id, parameters, **kwargs):
        if "sleep" in parameters["code"]:
            waiting.append(instance_id)
            if len(waiting) % 3 == 0 and len(waiting) // 3 <= times:
                asyncio.get_running_loop().call_later(0.5, kill)
        return await execute(instance_id, parameters, **kwargs)

    tool.execute = watched


def keep_killing(tool, kill):
    """Wraps the tool's `execute`: while programs sleep, `kill` strikes, however long a box takes to start."""
    execute, under_way = tool.execute, set()

    def strike():
        with suppress(AttributeError, OSError):  # the next one is not there yet
            kill()
        if under_way:
            asyncio.get_running_loop().call_later(0.5, strike)

    async def watched(instance_id, parameters, **kwargs):
        if "sleep" in parameters["code"]:
            if not under_way:
                asyncio.get_running_loop().call_later(0.5, strike)
            under_way.add(instance_id)
        try:
            return await execute(instance_id, parameters, **kwargs)
        finally:
            under_way.discard(instance_id)

    tool.execute = watched


@pytest.mark.parametrize("stateful", [False, True])
def test_a_sandbox_that_is_killed_costs_attempts_and_no_trajectory(interpreter, stateful):
    tool = interpreter(stateful=stateful)
    keep_killing(tool, lambda: kill_jail(tool))

    def script(request_id, prompt, turn):
        late = "import time; time.sleep(300)" if request_id.endswith("/0") else "print(6 * 7)"
        return says(call("code_interpreter", code=late)) if turn == 0 else says("42")

    results, scored = roll_out([tool], script, infrastructure_retries=5)  # the first ones may still meet dying boxes
    for result in results:
        assert result.failures == result.attempts - 1 >= 1
        assert result.dropped is None
        [record] = result.trajectory.tool_calls
        assert (record.response, record.error) == ("42", None)
    assert [name.rpartition("/")[0] for name in scored] == ["u0/0", "u1/1", "u2/2"]


def test_a_sandbox_that_is_killed_again_and_again_is_no_reward(interpreter):
    tool = interpreter()
    keep_killing(tool, lambda: kill_jail(tool))
    turn = says(call("code_interpreter", code="import time; time.sleep(300)"))
    results, scored = roll_out([tool], lambda *_: turn, infrastructure_retries=1)
    assert_dropped(results)
    assert scored == []


def test_the_death_of_a_sandbox_server_is_no_reward(interpreter, processes):
    """`etude sandbox serve` is killed while it runs three programs, and stays away; its programs die with it."""
    command = [sys.executable, "-m", "etude.cli.main", "sandbox", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            greeting = server.stdout.readline()
            if not greeting:
                pytest.skip(server.stderr.read())
            tool = interpreter(sandbox_fusion_url=greeting.split()[0])
            family = []

            def kill():
                family.extend(processes())
                server.kill()

            kill_in_mid_call(tool, kill, times=1)
            turn = says(call("code_interpreter", code="import time; time.sleep(300)"))
            results, scored = roll_out([tool], lambda *_: turn, infrastructure_retries=1)
        finally:
            server.kill()
    assert_dropped(results)
    assert {(r.attempts, r.failures) for r in results} == {(2, 2)}
    assert scored == []
    assert len(family) > 3  # the server, its jail, and a box for each program
    _, alive = psutil.wait_procs(family, PATIENCE)
    assert alive == []


# -- groups that nothing can be learnt from ------------------------------------------------------------------------


def test_what_runs_of_a_useless_group_is_cancelled_and_released():
    """Two of five answers are lost where four are needed: the two that hang and the one that waits for a lane are given
    up, and the other group goes on."""
    world = World("execute", rows=9, infrastructure_retries=0, max_concurrent_trajectories=3)
    execute = world.tool.execute

    async def act(instance_id, parameters, **kwargs):
        row = int(instance_id.split("/")[1])
        if row in (0, 1):
            await asyncio.sleep(0.01)
            raise ConnectionError("gone")
        if row >= 5:
            world.gate.point = "nowhere"
        return await execute(instance_id, parameters, **kwargs)

    world.tool.execute = act
    for i, row in enumerate(world.rows):
        row["uid"] = f"u{i // 5}"
    results = asyncio.run(asyncio.wait_for(world.manager.generate(world.rows, SAMPLING, least_group=4), PATIENCE))
    world.assert_nothing_is_left()
    lost, given_up = StopReason.INFRASTRUCTURE, StopReason.CANCELLED
    assert [r.dropped for r in results] == [lost, lost, given_up, given_up, given_up, None, None, None, None]
    assert [r.attempts for r in results] == [1, 1, 1, 1, 0, 1, 1, 1, 1]
    assert_dropped(results[:5])
    assert sorted(world.scored) == [f"u1/{i}/0" for i in range(5, 9)]


@pytest.mark.parametrize("least", [1, 3])
def test_without_a_least_group_that_there_could_be_nobody_is_given_up(least):
    world = World(rows=2, infrastructure_retries=0)

    async def breaks(instance_id, parameters, **kwargs):
        raise ConnectionError("gone")

    execute, world.tool.execute = world.tool.execute, lambda i, p, **k: (breaks if "/0/" in i else execute)(i, p, **k)
    for row in world.rows:
        row["uid"] = "u"
    results = asyncio.run(world.manager.generate(world.rows, SAMPLING, least_group=least))
    assert [r.dropped for r in results] == [StopReason.INFRASTRUCTURE, None]
