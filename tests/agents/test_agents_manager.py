"""The manager: one result a row, retries, drops, lanes, cancellation, streaming scores, and releases in every case."""

import asyncio
import gc
import random
from collections import Counter
from contextlib import nullcontext

import pytest
from agents_stage import CHAT, QUESTION, SAMPLING, TOKENIZER, Echo, Recorder, call, context, says

from etude.agents import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopOutput,
    Rollout,
    ToolAgentLoop,
    to_batch,
    token_level_scores,
)
from etude.chat import ParsedResponse
from etude.errors import ConfigError, EtudeError, InfrastructureError
from etude.inference import NativeEngine, NativeEngineOptions
from etude.models import TinyModelSpec, build_tiny_model
from etude.schemas import FunctionCall
from etude.trajectory import Provenance, Rewards, StopReason, Trajectory

ANSWER = [says(call(text="x")), says("5")]


def rows_of(count, **more):
    return [{"raw_prompt": QUESTION, **more} for _ in range(count)]


def numbered(rows):
    return [{"uid": f"u{i}", "rollout_index": i} | row for i, row in enumerate(rows)]


def make(script=None, tools=(), scorer=None, *, engine=None, deterministic=False, **given):
    engine = engine or Recorder(script if script is not None else ANSWER)
    return AgentLoopManager(context(tools, **given), engine, scorer, deterministic=deterministic), engine


def generate(manager, rows):
    return asyncio.run(asyncio.wait_for(manager.generate(numbered(rows), SAMPLING), 30))


def assert_balanced(engine, *tools):
    assert Counter(engine.opened) == Counter(engine.closed)
    assert max(Counter(engine.opened).values(), default=1) == 1
    for tool in tools:
        assert tool.log["create"] == tool.log["release"]


# -- results -----------------------------------------------------------------------------------------------------


class AsGiven(AgentLoopBase):
    """A turn with the sampling parameters as they are."""

    async def run(self, sampling_params, **row):
        made = Trajectory(row["request_id"], self.chat.initial_ids(row["raw_prompt"]))
        drawn = await self.server_manager.generate(prompt_ids=made.prompt_ids, sampling_params=sampling_params)
        made.append(drawn.token_ids, Provenance.SAMPLED, log_probs=drawn.log_probs)
        made.assistant_turns += 1
        return made.to_output()


def test_the_sampling_parameters_that_a_loop_is_given_allow_the_longest_response(loop_named):
    loop_named("as_given", AsGiven)
    manager, engine = make([TOKENIZER.encode("What is 2 + 3? " * 20)], response_length=16)
    [result] = generate(manager, rows_of(1, agent_name="as_given"))
    assert engine.asked[0][2].max_tokens == result.trajectory.response_length == 16


def test_one_result_a_row_in_order_whatever_order_they_end_in():
    def script(request_id, prompt, turn):
        return says(request_id) if turn == 1 else says(call(text=request_id))

    class Slow(Echo):
        async def execute(self, instance_id, parameters, **kwargs):
            await asyncio.sleep(0.002 * (9 - int(parameters["text"].split("/")[1])))
            progress.add(manager.progress)
            return await super().execute(instance_id, parameters)

    tool, progress = Slow(), set()
    manager, engine = make(script, [tool])
    results = generate(manager, rows_of(10))
    assert [r.trajectory.messages[-1]["content"] for r in results] == [f"u{i}/{i}/0" for i in range(10)]
    assert [(r.attempts, r.failures, r.dropped) for r in results] == [(1, 0, None)] * 10
    assert len(progress) > 1
    assert progress <= {(i, 10) for i in range(10)}
    assert manager.progress == (10, 10)
    assert_balanced(engine, tool)


def test_no_rows_no_results():
    manager, engine = make()
    assert generate(manager, []) == []
    assert engine.opened == engine.closed == []


@pytest.mark.parametrize("deterministic", [False, True])
def test_lanes_bound_what_is_in_flight(deterministic):
    tool, in_flight = Echo(), []

    class Watching(Recorder):
        def open(self, request_ids):
            super().open(request_ids)
            in_flight.append(len(self.opened) - len(self.closed))

    engine = Watching(ANSWER)
    manager, _ = make(tools=[tool], engine=engine, deterministic=deterministic, max_concurrent_trajectories=3)
    results = generate(manager, rows_of(10))
    assert len(results) == 10
    assert all(r.trajectory.stop_reason is StopReason.COMPLETED for r in results)
    assert max(in_flight) == 3
    assert_balanced(engine, tool)


def test_a_long_prompt_is_dropped_but_no_failure():
    manager, engine = make([says("5")], prompt_length=3)
    (result,) = generate(manager, rows_of(1))
    assert (result.trajectory, result.failures, result.dropped) == (None, 0, StopReason.PROMPT_TOO_LONG)
    assert_balanced(engine)


# -- which loop --------------------------------------------------------------------------------------------------


def test_the_loop_of_a_row():
    with_tools, _ = make(tools=[Echo()])
    assert with_tools.loop_name({}) == "tool_agent"
    assert with_tools.loop_name({"active_tools": []}) == "single_turn_agent"
    assert with_tools.loop_name({"agent_name": "single_turn_agent"}) == "single_turn_agent"
    assert with_tools.loop_name({"agent_name": "mine", "active_tools": []}) == "mine"
    assert with_tools.loop_name({"agent_name": None}) == "tool_agent"
    without, _ = make()
    assert without.loop_name({}) == "single_turn_agent"
    disabled, _ = make(tools=[Echo()], multi_turn={"enable": False})
    assert disabled.loop_name({"agent_name": "tool_agent"}) == "single_turn_agent"
    assert disabled.loop_name({"agent_name": "mine"}) == "mine"


class Mine(AgentLoopBase):
    """A turn that the loop itself rewards."""

    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)

    async def run(self, sampling_params, **row):
        prompt = self.chat.initial_ids(row["raw_prompt"])
        out = await self.server_manager.generate("mine", prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(prompt, out.token_ids, [1] * len(out.token_ids), reward_score=0.5)


def test_agent_name_picks_a_registered_loop(loop_named):
    loop_named("mine", Mine)
    manager, _ = make([says("mine")])
    results = generate(manager, [*rows_of(1, agent_name="mine"), *rows_of(1)])
    assert results[0].trajectory.rewards.score == 0.5
    assert results[0].trajectory.response_log_probs == [0.0] * len(says("mine"))
    assert results[1].trajectory.rewards.score is None


def test_an_unknown_loop_is_one_line_before_any_rollout():
    manager, engine = make(tools=[Echo()])
    rows = [*rows_of(2), {"raw_prompt": QUESTION, "uid": "z", "agent_name": "tool_agnet"}]
    with pytest.raises(
        ConfigError, match="row z/2: agent_name: unknown agent loop 'tool_agnet'; did you mean"
    ) as caught:
        generate(manager, rows)
    assert "\n" not in str(caught.value)
    assert engine.opened == engine.asked == []


def test_a_wrong_output_names_its_loop(loop_named):
    class Bad(AgentLoopBase):
        async def run(self, sampling_params, **row):
            return AgentLoopOutput([1], [3, 4], [1])

    loop_named("bad", Bad)
    manager, engine = make([])
    with pytest.raises(EtudeError, match="'bad' returned a wrong AgentLoopOutput"):
        generate(manager, rows_of(2, agent_name="bad"))
    assert_balanced(engine)


def with_reward(**parts):
    return lambda made: made.rewards.__dict__.update(parts)


def set_to(**parts):
    return lambda made: made.__dict__.update(parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to(messages=None), "messages must be of type list, not NoneType"),
        (set_to(messages=["hello"]), "messages must contain Mappings only, not 'hello'"),
        (set_to(tool_calls=[{"name": "echo"}]), "tool_calls must contain ToolCallRecords only"),
        (set_to(assistant_turns=None), "assistant_turns must be of type int"),
        (set_to(stop_reason="complete"), "stop_reason: 'complete' is not a valid StopReason"),
        (set_to(rewards=1.0), "rewards must be of type Rewards, not float"),
        (with_reward(score="1"), "returned a str where a number was expected"),
        (with_reward(final=1.0), "'float' object has no attribute 'items'"),
        (with_reward(steps=[1.0]), "cannot unpack"),
        (with_reward(steps=[(0, "x", "1")]), "returned a str where a number"),
        (with_reward(steps=[(0, "x", None)]), "None is no reward"),
        (with_reward(final={"x": None}), "None is no reward"),
    ],
)
def test_a_trajectory_with_a_part_of_another_type_names_its_loop(loop_named, change, message):
    class Loop(AgentLoopBase):
        async def run(self, sampling_params, **row):
            made = Trajectory(row["request_id"], self.chat.initial_ids(row["raw_prompt"]))
            out = await self.server_manager.generate(prompt_ids=made.prompt_ids, sampling_params=sampling_params)
            made.append(out.token_ids, Provenance.SAMPLED)
            change(made)
            return made

    loop_named("bad", Loop)
    manager, engine = make([says("5")])
    with pytest.raises(EtudeError, match=f"'bad' returned a wrong Trajectory: .*{message}"):
        generate(manager, rows_of(2, agent_name="bad"))
    assert_balanced(engine)


def test_a_score_that_a_reward_manager_replaces_is_warned_of(loop_named, caplog):
    async def scorer(trajectory, row):
        trajectory.rewards.score = 1.0

    loop_named("scores_itself", Mine)
    manager, _ = make([says("5")], scorer=scorer)
    generate(manager, rows_of(2, agent_name="scores_itself"))
    assert caplog.text.count("'scores_itself' gives a score of its own") == 1


def test_what_a_loop_writes_into_its_row_no_other_rollout_or_attempt_sees(loop_named):
    seen = []

    class Writes(AsGiven):
        async def run(self, sampling_params, **row):
            seen.append((len(row["raw_prompt"]), dict(row["extra_info"]["board"]), dict(row["tools_kwargs"]["echo"])))
            row["raw_prompt"].append({"role": "user", "content": "more"})
            row["extra_info"]["board"]["moved"] = True
            row["tools_kwargs"]["echo"]["used"] = True
            if row["attempt"] == 0:
                raise InfrastructureError("once")
            return await super().run(sampling_params, **row)

    loop_named("writes", Writes)
    manager, _ = make([says("5")], infrastructure_retries=1)
    shared = {"raw_prompt": list(QUESTION), "extra_info": {"board": {}}, "tools_kwargs": {"echo": {}}}
    generate(manager, [{**shared, "agent_name": "writes"}] * 2)
    assert seen == [(len(QUESTION), {}, {})] * 4


# -- failures ----------------------------------------------------------------------------------------------------


class Fragile(Echo):
    """Fails in the ways that `fates[instance attempt]` names: {request id without attempt: [fate of attempt 0, …]}."""

    def __init__(self, fates=None, **more):
        super().__init__(**more)
        self.fates = fates or {}

    def _maybe_fail(self, event, instance_id):
        request, attempt = instance_id.removesuffix(":echo").rsplit("/", 1)
        fates = self.fates.get(request, ())
        fate = fates[int(attempt)] if int(attempt) < len(fates) else None
        if fate == event:
            raise ConnectionError(f"{event} broke")

    async def create(self, instance_id=None, **kwargs):
        self._maybe_fail("create", instance_id)
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(0)
        self._maybe_fail("execute", instance_id)
        return await super().execute(instance_id, parameters)

    async def calc_reward(self, instance_id, **kwargs):
        self._maybe_fail("calc_reward", instance_id)
        return await super().calc_reward(instance_id)

    async def release(self, instance_id, **kwargs):
        await super().release(instance_id)
        self._maybe_fail("release", instance_id)


@pytest.mark.parametrize("broken", ["create", "execute", "calc_reward"])
def test_a_tool_that_breaks_once_is_retried_and_one_that_stays_broken_is_dropped(broken):
    tool = Fragile({"u0/0": [broken], "u1/1": [broken, broken]})
    manager, engine = make(tools=[tool], infrastructure_retries=1)
    results = generate(manager, rows_of(3))
    assert [(r.attempts, r.failures, r.dropped) for r in results] == [
        (2, 1, None),
        (2, 2, StopReason.INFRASTRUCTURE),
        (1, 0, None),
    ]
    assert results[0].trajectory.request_id == "u0/0/1"
    assert results[1].trajectory is None
    assert_balanced(engine, tool)


def test_a_retry_starts_from_fresh_state_with_the_same_seed():
    tool = Fragile({"u0/0": ["calc_reward"]}, greeting="Hello.")
    manager, engine = make(tools=[tool])
    (result,) = generate(manager, rows_of(1, tools_kwargs={"echo": {}}))
    first, second = engine.asked[:2], engine.asked[2:]
    assert [name for name, _, _ in engine.asked] == ["u0/0/0"] * 2 + ["u0/0/1"] * 2
    assert [rest for _, *rest in first] == [rest for _, *rest in second]  # prompts, seeds and limits
    assert result.trajectory.messages[1]["content"].count("Hello.") == 1
    assert len(tool.events) == 8 - 1  # calc_reward broke before it was noted


def test_a_broken_release_costs_nothing_but_a_count():
    tool = Fragile({"u0/0": ["release"]})
    manager, engine = make(tools=[tool])
    (result,) = generate(manager, rows_of(1))
    assert (result.failures, result.trajectory.metrics["release_failures"]) == (0, 1.0)
    assert_balanced(engine, tool)


def test_a_loop_that_ignores_its_end_cannot_sample_on(loop_named):
    asked_on = []

    class Stubborn(AgentLoopBase):
        async def run(self, sampling_params, **row):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                try:
                    await self.server_manager.generate(prompt_ids=[1], sampling_params=sampling_params)
                except InfrastructureError as error:
                    asked_on.append(str(error))
                raise

    loop_named("stubborn", Stubborn)
    manager, engine = make([says("5")], trajectory_timeout=0.02, infrastructure_retries=0)
    manager.clean_up_seconds = 0.0
    (result,) = generate(manager, rows_of(1, agent_name="stubborn"))
    assert result.dropped is StopReason.INFRASTRUCTURE
    assert result.cause.endswith("no answer within 0.02 s (rollout.trajectory_timeout)")
    assert asked_on == ["trajectory u0/0/0 is over: nothing more is sampled for it"]
    assert engine.asked == []
    assert_balanced(engine)


def test_a_loop_that_cancels_or_exits_is_a_failure_of_its_own_only(loop_named):
    class Cancels(AgentLoopBase):
        async def run(self, sampling_params, **row):
            raise asyncio.CancelledError

    loop_named("cancels", Cancels)
    manager, engine = make([says("5")])
    results = generate(manager, [*rows_of(1, agent_name="cancels"), *rows_of(1)])
    assert [r.dropped for r in results] == [StopReason.INFRASTRUCTURE, None]
    assert_balanced(engine)


def test_any_other_exception_cancels_the_rest_and_is_raised(loop_named):
    class Buggy(AgentLoopBase):
        async def run(self, sampling_params, **row):
            await asyncio.sleep(0.01)
            raise ZeroDivisionError("a bug")

    class Slow(Echo):
        async def execute(self, instance_id, parameters, **kwargs):
            await asyncio.sleep(60)

    loop_named("buggy", Buggy)
    tool = Slow()
    manager, engine = make(tools=[tool], max_concurrent_trajectories=4)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        generate(manager, [*rows_of(3), *rows_of(1, agent_name="buggy"), *rows_of(3)])
    assert tool.log["create"] == tool.log["release"] == 3
    assert Counter(engine.opened) == Counter(engine.closed)


def test_cancellation_before_the_first_step_leaves_nothing_open():
    manager, engine = make()

    async def main():
        task = asyncio.ensure_future(manager.generate(numbered(rows_of(3)), SAMPLING))
        asyncio.get_running_loop().call_soon(task.cancel)  # after the task has started its lanes, before they run
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(engine.opened) == 3
    assert_balanced(engine)


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_hundred_trajectories_with_random_failures_release_what_they_created(deterministic):
    rng = random.Random(5)
    kinds = [None, None, None, "create", "execute", "calc_reward", "release"]
    fates = {f"u{i}/{i}": [rng.choice(kinds), rng.choice(kinds)] for i in range(200)}
    tool = Fragile(fates, final=1.0)

    def script(request_id, prompt, turn):
        return RuntimeError("engine") if random.Random(f"{request_id}/{turn}").random() < 0.05 else ANSWER[turn]

    scored = Counter()

    async def scorer(trajectory, row):
        scored[row["uid"]] += 1
        if random.Random(f"{row['uid']}{scored[row['uid']]}").random() < 0.1:
            raise TimeoutError("judge")
        trajectory.rewards.score = 1.0

    manager, engine = make(script, [tool], scorer, deterministic=deterministic, max_concurrent_trajectories=16)
    results = generate(manager, rows_of(200))
    assert len(results) == 200
    dropped = [i for i, r in enumerate(results) if r.trajectory is None]
    assert 5 < len(dropped) < 100
    for i, result in enumerate(results):
        assert (result.trajectory is None) == (result.dropped is StopReason.INFRASTRUCTURE)
        if result.trajectory is not None:
            assert result.trajectory.rewards.score == 1.0
            assert result.trajectory.rewards.final == {"echo": 1.0}
            assert result.trajectory.request_id.startswith(f"u{i}/{i}/")
    assert tool.log["create"] > 200
    assert_balanced(engine, tool)


# -- scoring -----------------------------------------------------------------------------------------------------


def test_a_trajectory_is_scored_while_another_still_runs():
    order = []

    class Waiting(Echo):
        async def execute(self, instance_id, parameters, **kwargs):
            if instance_id.startswith("u1"):
                while "scored u0" not in order:  # hangs, and the test with it, where scoring waits for the batch
                    await asyncio.sleep(0)
                order.append("u1 ends")
            return await super().execute(instance_id, parameters)

    async def scorer(trajectory, row):
        order.append(f"scored {row['uid']}")

    manager, _ = make(tools=[Waiting()], scorer=scorer)
    generate(manager, rows_of(2))
    assert order == ["scored u0", "u1 ends", "scored u1"]


def test_a_broken_scorer_is_asked_again_then_its_trajectory_is_dropped():
    asked = Counter()

    async def scorer(trajectory, row):
        asked[row["uid"]] += 1
        if row["uid"] == "u1" or (row["uid"] == "u0" and asked["u0"] == 1):
            raise InfrastructureError("judge is down")
        trajectory.rewards.score = 0.5

    manager, engine = make([says("5")], scorer=scorer)
    results = generate(manager, rows_of(3))
    assert asked == {"u0": 2, "u1": 2, "u2": 1}
    assert [(r.attempts, r.failures, r.dropped) for r in results] == [
        (1, 1, None),
        (1, 2, StopReason.INFRASTRUCTURE),
        (1, 0, None),
    ]
    assert results[1].trajectory is None
    assert len(engine.asked) == 3  # nobody rolls out again for a scorer


def test_a_bug_of_the_scorer_ends_the_rollout_at_once():
    class Slow(Echo):
        async def execute(self, instance_id, parameters, **kwargs):
            await asyncio.sleep(60)

    async def scorer(trajectory, row):
        raise KeyError("ground_truth")

    def script(request_id, prompt, turn):
        return says("5") if request_id.startswith("u0") else ANSWER[0]

    tool = Slow()
    manager, engine = make(script, [tool], scorer)
    with pytest.raises(KeyError, match="ground_truth"):
        generate(manager, rows_of(3))
    assert tool.log["create"] == tool.log["release"] == 2
    assert Counter(engine.opened) == Counter(engine.closed)


# -- batches -----------------------------------------------------------------------------------------------------


def test_columns_of_a_batch_with_a_dropped_row():
    manager, _ = make(lambda request_id, *_: says("5" * (1 + int(request_id[1]))))
    results = [*generate(manager, rows_of(2)), Rollout(dropped=StopReason.INFRASTRUCTURE)]
    first, second = (r.trajectory for r in results[:2])
    first.rewards = Rewards(score=2.0, final={"echo": 1.0})
    batch = to_batch(results, pad_token_id=0)
    columns, width = batch.batch, second.response_length
    assert (
        columns["responses"].shape == columns["response_mask"].shape == columns["rollout_log_probs"].shape == (3, width)
    )
    assert columns["input_ids"].shape == (3, len(first.prompt_ids) + width)
    assert columns["response_mask"].sum(1).tolist() == [first.response_length, width, 0]
    assert columns["attention_mask"][2].sum() == 0
    assert (
        columns["input_ids"][0][columns["attention_mask"][0].bool()].tolist() == first.prompt_ids + first.response_ids
    )
    assert columns["position_ids"][0][columns["attention_mask"][0].bool()].tolist() == list(
        range(len(first.prompt_ids) + first.response_length)
    )
    assert columns["rollout_log_probs"].dtype.is_floating_point
    assert batch.non_tensor_batch["rollout"].tolist() == results
    scores = token_level_scores(results, width, 2.0, 0.5)
    assert scores.shape == (3, width)
    assert scores.sum(1).tolist() == [3.0, 0.0, 0.0]
    assert scores[0, first.response_length - 1] == 3.0


def test_a_batch_of_dropped_rows_only():
    batch = to_batch([Rollout(dropped=StopReason.INFRASTRUCTURE)] * 2, pad_token_id=9)
    assert batch.batch["response_mask"].sum() == 0
    assert batch.batch["prompts"].tolist() == [[9], [9]]


def test_prompts_are_padded_on_the_left():
    results = [Rollout([Trajectory("a", [4, 5])]), Rollout([Trajectory("b", [6, 7, 8])])]
    batch = to_batch(results, pad_token_id=9).batch
    assert batch["prompts"].tolist() == [[9, 4, 5], [6, 7, 8]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 0], [1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 1], [0, 1, 2, 2]]


# -- the deterministic mode, end to end ----------------------------------------------------------------------------


class Dawdling(Echo):
    """Answers after a random time, at random places."""

    def __init__(self, seed):
        super().__init__(reward=0.1, final=1.0)
        self.random = random.Random(seed)

    async def create(self, instance_id=None, **kwargs):
        await asyncio.sleep(0.004 * self.random.random())
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(0.008 * self.random.random())
        return await super().execute(instance_id, parameters)

    async def release(self, instance_id, **kwargs):
        await asyncio.sleep(0.004 * self.random.random())
        await super().release(instance_id)


def test_deterministic_runs_are_bit_identical_whatever_the_tools_take(loop_named):
    """The native engine, three lanes for ten rows, and a loop that calls its tool after every turn."""

    class Talkative(ToolAgentLoop):
        async def _handle_generating_state(self, data, sampling_params):
            state = await super()._handle_generating_state(data, sampling_params)
            if state.value == "terminated" and data.trajectory.assistant_turns < 3 and self.room(data.trajectory) > 40:
                data.parsed = ParsedResponse("", [FunctionCall(name="echo", arguments='{"text": "more"}')], [])
                return type(state).PROCESSING_TOOLS
            return state

    loop_named("talkative", Talkative)
    model = build_tiny_model(
        TinyModelSpec(hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=400), TOKENIZER
    )

    def run(seed, **given):
        tool = Dawdling(seed)
        engine = NativeEngine(model, NativeEngineOptions(deterministic=True, max_num_seqs=3, admit_every=4))
        manager, _ = make(tools=[tool], engine=engine, deterministic=True, response_length=80, **given)
        shared = manager.context
        stops = [*range(100, 150), CHAT.end_of_turn_id]  # a random model ends its turns by chance, not by its template
        shared.parser.__class__ = type("Stopping", (type(shared.parser),), {"stop_token_ids": tuple(stops)})
        results = generate(manager, rows_of(10, agent_name="talkative", tools_kwargs={"echo": {}}))
        assert tool.log["create"] == tool.log["release"] == 10
        assert engine._rows == {}
        return [(r.trajectory.response_ids, r.trajectory.response_log_probs, r.trajectory.rewards) for r in results]

    first = run(1, max_concurrent_trajectories=3)
    assert sum(len(rewards.steps) for _, _, rewards in first) >= 10
    for seed in (2, 3, 4):
        assert run(seed, max_concurrent_trajectories=3) == first
    lockstep = [run(seed) for seed in (5, 6)]
    assert lockstep[0] == lockstep[1]
    assert [ids for ids, _, _ in lockstep[0]] == [ids for ids, _, _ in first]


def test_a_retried_trajectory_does_not_hold_up_the_deterministic_engine():
    model = build_tiny_model(
        TinyModelSpec(hidden_size=32, num_layers=1, intermediate_size=64, vocab_size=400), TOKENIZER
    )
    engine = NativeEngine(model, NativeEngineOptions(deterministic=True))
    tool = Fragile({"u1/1": ["create"], "u3/3": ["create", "create"], "u4/4": ["calc_reward"]})
    manager, _ = make(tools=[tool], engine=engine, deterministic=True, max_concurrent_trajectories=2, response_length=9)
    results = generate(manager, rows_of(6, tools_kwargs={"echo": {}}))
    assert [r.failures for r in results] == [0, 1, 0, 2, 1, 0]
    assert engine._rows == {}
    assert tool.log["create"] == tool.log["release"]


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_collection_is_relaxed_while_trajectories_are_in_flight(fails):
    found, seen = gc.get_threshold(), []

    def respond(arguments):
        seen.append((gc.get_threshold(), gc.get_freeze_count()))
        if fails:
            raise ValueError
        return "x"

    manager, _ = make(tools=[Echo(respond=respond, on_exception="stop")])
    with pytest.raises(EtudeError) if fails else nullcontext():
        generate(manager, rows_of(2))
    assert all(thresholds > found and frozen > 10_000 for thresholds, frozen in seen)
    assert seen
    assert gc.get_threshold() == found
    assert gc.get_freeze_count() < 10_000
