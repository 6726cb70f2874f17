"""Environments: RL-Factory's surface and Gymnasium's manner, turn by turn, alone, together, and when they break."""

import asyncio
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from agents_stage import CHAT, QUESTION, TOKENIZER, Echo, Recorder, call, context, roll, run, says
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_templates import HARMONY

from etude.agents import AgentLoopManager, EnvAgentLoop, Sampling
from etude.agents.batch import rows_of
from etude.agents.environments import (
    ENVIRONMENTS,
    Env,
    EnvOptions,
    QwenManager,
    RenderedPrompt,
    TextEnv,
    load_environment,
    register_env,
)
from etude.chat.parsers.rl_factory import EMPTY_TOOL
from etude.errors import ConfigError, EtudeError, InfrastructureError
from etude.models import build_tiny_tokenizer
from etude.tools import ToolResponse
from etude.trainer.rollouts import Rollouts, rollout_batch
from etude.trajectory import Provenance, StopReason


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(ENVIRONMENTS, "_items", dict(ENVIRONMENTS._items))


def environment(cls=Env, tools=(), *, lockstep=False, **options):
    ENVIRONMENTS._items.pop("mine", None)
    register_env("mine")(cls)
    return load_environment(EnvOptions("mine", **options), {t.name: t for t in tools}, lockstep=lockstep)


def play(script, cls=Env, tools=(), *, row=None, options=None, **given):
    env = environment(cls, tools, **(options or {}))
    return roll(script, tools, row=row, loop_class=EnvAgentLoop, environment=env, **given)


# -- RL-Factory's manager --------------------------------------------------------------------------------------------


def manager(*tools):
    return QwenManager({}, {tool.name: tool for tool in tools})


@pytest.mark.parametrize(
    ("response", "read"),
    [
        ("just words", ("answer", "just words")),
        (call(text="x") + "<answer> 4 </answer>", ("answer", "4")),
        (call(text="x"), ("actions", [{"name": "echo", "args": '{"text": "x"}'}])),
        ("<tool_call>{broken", ("actions", [EMPTY_TOOL])),
    ],
)
def test_responses_are_read_by_rl_factorys_rules(response, read):
    assert manager(Echo()).parse_response(response) == read


def test_a_short_name_means_the_first_servers_tool():
    tools = manager(Echo("search-query_rag"), Echo("other-query_rag"))
    assert tools.get_tool("query_rag") is tools.tool_map["search-query_rag"]
    assert tools.get_tool("nothing") is None


def test_execute_actions_runs_a_batch_without_any_loop():
    echo = Echo()
    actions, results = manager(echo).execute_actions(
        [call(text="a") + call(text="b"), "<answer>4</answer>", call("nobody"), "<tool_call>{"]
    )
    assert actions == ["actions", "answer", "actions", "actions"]
    assert [m["content"] for m in results[0]] == ["a", "b"]
    assert results[1] == "4"
    assert "Failed to find the tool 'nobody'" in results[2][0]["content"]
    assert "not read" in results[3][0]["content"]
    assert echo.log == {"create": 1, "execute": 2, "release": 1}


def test_get_prompt_renders_as_the_template_does_and_keeps_the_messages():
    tools = manager(Echo())
    first = tools.get_prompt(QUESTION, TOKENIZER)
    assert TOKENIZER.encode(first, add_special_tokens=False) == CHAT.initial_ids(
        QUESTION, [{"type": "function", "function": f} for f in tools.functions]
    )
    answer = tools.get_prompt("4", TOKENIZER, mode="tool_call")
    assert isinstance(answer, RenderedPrompt)
    assert answer.messages == [{"role": "tool", "content": "4"}]
    runs = CHAT.context_ids(answer.messages)
    assert TOKENIZER.decode([t for ids, _ in runs for t in ids]).endswith(answer)
    with pytest.raises(ConfigError, match="mode must be one of"):
        tools.get_prompt("4", TOKENIZER, mode="tol_call")


def test_get_prompt_answers_calls_where_the_template_wants_some():
    tokenizer = build_tiny_tokenizer(["What is 2 + 3?"] * 4, 400)
    tokenizer.chat_template = HARMONY
    answer = manager(Echo()).get_prompt("4", tokenizer, mode="tool_call")
    assert str(answer).endswith('to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant')
    assert answer.messages == [{"role": "tool", "content": "4"}]


def test_step_gives_the_four_lists():
    env = Env({"_tools": {"echo": Echo()}})
    observations, dones, valid, is_tool = env.step([call(text="a"), "<answer>4</answer>"], TOKENIZER)
    assert "a" in observations[0]
    assert observations[1] == ""
    assert (dones, valid, is_tool) == ([False, True], [1, 1], [1, 0])
    assert env.observed(["error"], ["try again"])[1:] == ([False], [0], [0])
    with pytest.raises(ValueError, match="unknown action 'walk'"):
        env.observed(["walk"], [""])


# -- an Env as an agent loop -----------------------------------------------------------------------------------------


def test_the_base_env_runs_tools_until_the_answer():
    echo = Echo(reward=0.5, final=0.25)
    trajectory, engine = play([says(call(text="5")), says("<answer>5</answer>")], tools=[echo])
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert [m["role"] for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.rewards.steps == [(0, "echo", 0.5)]
    assert trajectory.rewards.final == {"echo": 0.25}
    assert [c.response for c in trajectory.tool_calls] == ["5"]
    assert echo.log == {"create": 1, "execute": 1, "calc_reward": 1, "release": 1}
    assert engine.asked[1][1] == [*trajectory.prompt_ids, *trajectory.response_ids[: -len(says("<answer>5</answer>"))]]
    assert sum(trajectory.response_mask) == len(says(call(text="5"))) + len(says("<answer>5</answer>"))


def test_every_turn_is_sampled_with_the_runs_temperature():
    _, engine = play([says(call(text="5")), says("<answer>5</answer>")], tools=[Echo()])
    assert [params.temperature for _, _, params in engine.asked] == [1.0, 1.0]


class Strict(Env):
    """RL-Factory's documented step, written out; process rewards, verification and a rule."""

    use_verify_tool = True

    def step(self, responses, tokenizer=None):
        actions, tool_results = self.tool_manager.execute_actions(responses=responses)
        next_obs, dones, valid, is_tool = [], [], [], []
        for action, result in zip(actions, tool_results):
            done = action == "answer"
            prompt = (
                "" if done else self.tool_manager.get_prompt(input_data=result, tokenizer=tokenizer, mode="tool_call")
            )
            next_obs.append(prompt)
            dones.append(done)
            valid.append(1)
            is_tool.append(int(not done))
        return next_obs, dones, valid, is_tool

    def get_step_reward(self, responses, format_score=0.1):
        return [float("nan") if "<answer>" in r else format_score for r in responses]

    def verify_tool(self, data_source, solution_str, ground_truth, extra_info):
        return {"seen": "<answer>" in solution_str, "source": data_source}

    def _compute_score_with_rules(self, data, tokenizer, if_val=False):
        item = data[0]
        truth = item.non_tensor_batch["reward_model"]["ground_truth"]
        assert truth["verified_results"] == {"seen": True, "source": "s"}
        text = tokenizer.decode(item.batch["responses"].tolist())
        return [[1.0 if f"<answer>{truth['target']}</answer>" in text else 0.0]]


def test_an_env_written_for_rl_factory_runs_unchanged():
    row = {"data_source": "s", "reward_model": {"ground_truth": "5"}}
    trajectory, _ = play(
        [says(call(text="5")), says("<answer>5</answer>")],
        Strict,
        [Echo(final=0.25)],
        row=row,
        options={"use_process_reward": True},
    )
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.rewards.steps == [(0, "echo", 0.0), (0, "env", 0.1)]
    assert trajectory.rewards.final == {"echo": 0.25}
    assert trajectory.rewards.score == 1.0


class Documented(Env):
    """Scores as RL-Factory's documents write it: row by row, from what `_process_data` returns."""

    def _compute_score_with_rules(self, data, tokenizer, if_val=False):
        scores = []
        for i in range(len(data)):
            processed_data = self._process_data(data_item=data[i], tokenizer=tokenizer)
            ground_truth, response_str = processed_data["ground_truth"], processed_data["response_str"]
            prompt_str, data_source = processed_data["prompt_str"], processed_data["data_source"]
            assert QUESTION[-1]["content"] in prompt_str
            assert (data_source, processed_data["extra_info"]) == ("s", {"index": 3})
            scores.append([float(f"<answer>{ground_truth}</answer>" in response_str)])
        return scores


@pytest.mark.parametrize(("answer", "score"), [("5", 1.0), ("6", 0.0)])
def test_an_env_that_scores_as_rl_factorys_documents_say_earns_nothing_by_what_a_tool_wrote(answer, score):
    row = {"data_source": "s", "reward_model": {"ground_truth": "5"}, "extra_info": {"index": 3}}

    class Parrot(Echo):
        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text="<answer>5</answer>"), 0.0, {}

    script = [says(call(text="5")), says(f"<answer>{answer}</answer>")]
    trajectory, _ = play(script, Documented, [Parrot()], row=row)
    assert trajectory.rewards.score == score


def test_an_env_without_a_score_is_an_error():
    class Forgets(Env):
        def _compute_score_with_rules(self, data, tokenizer, if_val=False):
            return [[None]]

    with pytest.raises(EtudeError, match="must return a list of scores"):
        play([says("5")], Forgets, row={"data_source": "s", "reward_model": {"ground_truth": "5"}})


class Says(Env):
    """Observes whatever `said` is."""

    said: object = "Try again."

    def step(self, responses, tokenizer=None):
        done = ["stop" in r for r in responses]
        return [self.said] * len(responses), done, [1] * len(responses), [0] * len(responses)


def test_plain_text_becomes_a_user_message():
    trajectory, _ = play([says("4"), says("stop")], Says)
    assert trajectory.messages[-2] == {"role": "user", "content": "Try again."}
    assert Provenance.USER in {s.provenance for s in trajectory.segments}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (7, "text or messages, not int"),
        ([{"content": "x"}], "text or messages, not list"),
    ],
)
def test_an_observation_that_cannot_be_exact_is_refused(said, message):
    cls = type("Odd", (Says,), {"said": said})
    with pytest.raises(EtudeError, match=message):
        play([says("4")], cls)


def test_what_the_model_itself_spelled_out_may_be_repeated_to_it():
    class Echoes(Env):
        def step(self, responses, tokenizer=None):
            said = [f"I do not know {response!r}" for response in responses]
            return said, ["stop" in r for r in responses], [1] * len(responses), [0] * len(responses)

    trajectory, _ = play([says("<tool_call> <think>hm</think>"), says("stop")], Echoes)
    assert trajectory.messages[-2]["content"] == "I do not know '<tool_call> <think>hm</think>'"
    tag = TOKENIZER.convert_tokens_to_ids("<tool_call>")
    assert not any(tag in s.token_ids for s in trajectory.segments if s.provenance is Provenance.USER)


@pytest.mark.parametrize("returned", [None, ([""], [False]), ([], [], [], [])])
def test_a_step_that_returns_something_else_is_named(returned):
    class Odd(Env):
        def step(self, responses, tokenizer=None):
            return returned

    with pytest.raises(EtudeError, match="environment 'mine': step must return next_obs"):
        play([says("4")], Odd)


def test_what_a_step_raises_is_a_bug_and_what_breaks_is_infrastructure():
    def raising(error):
        class Broken(Env):
            def step(self, responses, tokenizer=None):
                raise error

        return Broken

    with pytest.raises(EtudeError, match="environment 'mine': step failed: KeyError") as raised:
        play([says("4")], raising(KeyError("x")))
    assert not isinstance(raised.value, InfrastructureError)
    with pytest.raises(InfrastructureError, match="step failed: ConnectionError"):
        play([says("4")], raising(ConnectionError("gone")))


def test_a_step_that_hangs_is_infrastructure():
    class Slow(Env):
        async def step(self, responses, tokenizer=None):
            await asyncio.sleep(3600)

    with pytest.raises(InfrastructureError, match="step failed: TimeoutError"):
        play([says("4")], Slow, options={"timeout": 0.05})


def test_a_tool_that_breaks_inside_a_step_is_infrastructure_and_released():
    def gone(parameters):
        raise ConnectionError("gone")

    for cls in (Env, Strict):
        echo = Echo(respond=gone)
        with pytest.raises(InfrastructureError, match="echo"):
            play([says(call())], cls, [echo])
        assert echo.log["release"] == 1
        assert echo.log["calc_reward"] == 0


# -- together --------------------------------------------------------------------------------------------------------


class Batched(Env):
    """Notes how many responses each step saw."""

    sizes: Counter

    def step(self, responses, tokenizer=None):
        self.sizes[len(responses)] += 1
        return (
            [f"again {r}" for r in responses],
            ["stop" in r for r in responses],
            [1] * len(responses),
            [0] * len(responses),
        )


@pytest.mark.parametrize("lockstep", [False, True])
def test_the_synchronous_form_steps_all_trajectories_at_once(lockstep):
    cls = type("Sized", (Batched,), {"sizes": Counter()})
    env = environment(cls, lockstep=lockstep)

    def script(request_id, prompt, turn):
        row = int(request_id.split("/")[1])
        return says("stop" if turn == row else f"row {row}")  # row r ends in turn r

    results, _ = run(None, 3, script, environment=env)
    assert [r.trajectory.assistant_turns for r in results] == [1, 2, 3]
    assert results[2].trajectory.messages[-2]["content"] == "again row 2"
    assert cls.sizes == ({3: 1, 2: 1, 1: 1} if lockstep else {1: 6})


def test_one_broken_trajectory_does_not_hold_up_the_others():
    cls = type("Sized", (Batched,), {"sizes": Counter()})
    env = environment(cls, lockstep=True)

    def script(request_id, prompt, turn):
        if "/1/" in request_id:
            raise InfrastructureError("gone")
        return says("stop" if turn == 1 else "more")

    results, _ = run(None, 3, script, environment=env, infrastructure_retries=0)
    assert [r.trajectory is not None for r in results] == [True, False, True]


@pytest.mark.parametrize("own_step", [False, True])
def test_in_lock_step_a_broken_tool_costs_its_own_trajectory_only(own_step):
    def respond(parameters):
        if parameters.get("text") == "bad":
            raise InfrastructureError("tool down")
        return "fine"

    cls = type("Own", (Env,), {"step": lambda self, r, t=None: Env.step(self, r, t)}) if own_step else Env
    tool = Echo(respond=respond)
    env = environment(cls, [tool], lockstep=True)

    def script(request_id, prompt, turn):
        return says("<answer>4</answer>" if turn else call(text="bad" if "/1/" in request_id else "good"))

    results, _ = run(None, 4, script, [tool], environment=env, infrastructure_retries=1)
    assert [r.trajectory is not None for r in results] == [True, False, True, True]
    assert [r.failures for r in results] == ([1, 2, 1, 1] if own_step else [0, 2, 0, 0])
    assert tool.log["create"] == tool.log["release"]


# -- Gymnasium's manner ----------------------------------------------------------------------------------------------


class Guess(TextEnv):
    """Guess a number; `log` counts calls of all its objects."""

    log: ClassVar[Counter] = Counter()

    def __init__(self):
        self.log["made"] += 1

    def reset(self, *, seed=None, options=None):
        self.log["reset"] += 1
        self.number = options["number"]
        assert isinstance(seed, int)
        return "Guess a number.", {}

    def step(self, action):
        self.log["step"] += 1
        guess = int(action)
        over = guess == self.number
        return ("Yes" if over else "Higher" if guess < self.number else "Lower"), float(over), over, False, {}

    def close(self):
        self.log["close"] += 1


ROW = {"extra_info": {"number": 5}}


def test_a_text_environment_plays_an_episode():
    Guess.log.clear()
    trajectory, _ = play([says("4"), says("5")], Guess, row=ROW)
    assert trajectory.messages[1]["content"].endswith("Guess a number.")
    assert [m["content"] for m in trajectory.messages[2:]] == ["4", "Higher", "5"]
    assert trajectory.rewards.steps == [(0, "env", 0.0), (1, "env", 1.0)]
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert Guess.log == {"made": 1, "reset": 1, "step": 2, "close": 1}


@pytest.mark.parametrize("broken", ["reset", "step", "close"])
def test_a_text_environment_is_closed_in_every_ending(broken, caplog):
    def fail(self, *args, **kwargs):
        Guess.close(self)
        raise RuntimeError("broken")

    Guess.log.clear()
    cls = type("Broken", (Guess,), {broken: fail})
    if broken == "close":
        assert play([says("5")], cls, row=ROW)[0].stop_reason is StopReason.COMPLETED
        assert "close failed" in caplog.text
    else:
        with pytest.raises(EtudeError, match=f"environment 'mine': {broken} failed: RuntimeError: broken"):
            play([says("4")], cls, row=ROW)
        assert Guess.log["close"] == 2  # its own note, and the loop's


def test_asynchronous_methods_are_awaited():
    class Later(TextEnv):
        async def reset(self, *, seed=None, options=None):
            return "", {}

        async def step(self, action):
            await asyncio.sleep(0)
            return "", 1.0, False, True, {}

    trajectory, _ = play([says("4")], Later)
    assert trajectory.rewards.steps == [(0, "env", 1.0)]


@settings(max_examples=10)
@given(n=st.integers(1, 4), prompts=st.integers(1, 4), batch=st.integers(0, 2**40), first=st.integers(0, 3))
def test_all_rollouts_of_a_prompt_and_their_retries_play_one_game(n, prompts, batch, first):
    played, failed = defaultdict(list), set()

    class Seeded(TextEnv):
        def reset(self, *, seed=None, options=None):
            played[options["prompt"]].append(seed)
            if options["prompt"] not in failed:  # each prompt's first rollout is retried
                failed.add(options["prompt"])
                raise InfrastructureError("gone")
            return "", {}

        def step(self, action):
            return "", 1.0, True, False, {}

    rows = [{"raw_prompt": QUESTION, "extra_info": {"prompt": k}} for k in range(prompts)]
    made = rollout_batch(rows, n=n, label="1.0", seed=batch, validate=False, first=first * n)
    agents = AgentLoopManager(context(environment=environment(Seeded)), Recorder(lambda *_: says("go")))
    results = asyncio.run(agents.generate(rows_of(made), Sampling(1.0, 1.0, -1, seed=batch)))
    assert all(each.trajectory is not None for each in results)
    assert [len(played[k]) for k in range(prompts)] == [n + 1] * prompts
    assert [len(set(played[k])) for k in range(prompts)] == [1] * prompts
    assert len({seed for seeds in played.values() for seed in seeds}) == prompts


@settings(max_examples=20)
@given(
    seed=st.integers(0, 99), step=st.integers(1, 99), n=st.integers(1, 4), sizes=st.lists(st.integers(1, 4), min_size=1)
)
def test_a_resumed_or_a_divided_batch_plays_the_games_of_the_whole(seed, step, n, sizes):
    class Asked(Rollouts):
        def generate(self, prompts):
            return prompts, {}

    options = SimpleNamespace(rollout=SimpleNamespace(n=n, seed=seed, val_kwargs=SimpleNamespace(n=n)), min_group=1)
    rollouts = Asked(options, SimpleNamespace(rollout=None, reward=None, run=None))
    rows = [{"index": k} for k in range(sum(sizes))]

    def games(*batches):
        return [number for each in batches for number in each.non_tensor_batch["group_seed"].tolist()]

    whole = games(rollouts.training_prompts(rows, step, 0))
    assert whole == [game for game in dict.fromkeys(whole) for _ in range(n)]
    assert whole != games(rollouts.training_prompts(rows, step + 1, 0))
    sampling = {rollouts.training_prompts(rows, step, attempt).meta_info["seed"] for attempt in range(3)}
    assert len(sampling) == 3  # a step's further batches draw other numbers
    alone = [rollouts.training_prompts([row], step, 0, first=k * n) for k, row in enumerate(rows)]
    assert games(*alone) == whole
    greedy = [rollouts.baseline_prompts([row], step, 0, len(rows) * n + k, k) for k, row in enumerate(rows)]
    assert games(*greedy) == whole[::n] == games(rollouts.baseline_prompts(rows, step, 0, len(rows) * n))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    parts = [rollouts.validate_rows(rows, range(a, a + size)) for a, size in zip(starts, sizes)]
    assert games(*parts) == games(rollouts.validate_rows(rows, range(len(rows))))


# -- configuration ---------------------------------------------------------------------------------------------------


def test_no_name_is_no_environment_and_a_tool_manager_alone_means_base():
    assert load_environment(EnvOptions(), {}, lockstep=False) is None
    assert list(load_environment(EnvOptions(tool_manager="qwen3"), {}, lockstep=False).entries) == ["base"]


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (Env, {"tool_manager": "qwen4"}, "unknown tool manager 'qwen4'.*did you mean 'qwen3'"),
        (type("Nothing", (), {}), {}, "environment 'mine' is neither an Environment"),
        (type("Fails", (Env,), {"__init__": lambda self, config: 1 / 0}), {}, "environment 'mine': ZeroDivisionError"),
    ],
)
def test_a_wrong_environment_is_one_line(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        environment(cls, **options)
    with pytest.raises(ConfigError, match="unknown environment 'yours'"):
        load_environment(EnvOptions("yours"), {}, lockstep=False)


def test_a_manager_may_make_tools_of_its_own():
    from etude.agents.environments import TOOL_MANAGERS, ToolManager, register_tool_manager

    class Own(ToolManager):
        def _build_tools(self):
            super()._build_tools()
            self._init_tool(Echo("own"))

    register_tool_manager("own")(Own)
    try:
        env = load_environment(EnvOptions(tool_manager="own"), {"echo": Echo()}, lockstep=False)
        assert list(env.tools) == ["echo", "own"]
    finally:
        TOOL_MANAGERS._items.pop("own")


def answers(script, manager_class, *tools):
    """The trajectory of a base environment with that manager."""
    from etude.agents.environments import TOOL_MANAGERS

    TOOL_MANAGERS._items["own"] = manager_class
    try:
        env = load_environment(EnvOptions(tool_manager="own"), {t.name: t for t in tools}, lockstep=False)
        return roll(script, env.tools.values(), loop_class=EnvAgentLoop, environment=env)[0]
    finally:
        del TOOL_MANAGERS._items["own"]


def test_every_method_of_a_manager_may_be_overridden():
    class Actions(QwenManager):
        def execute_actions(self, responses):
            actions, results = super().execute_actions(responses)
            return actions, [
                [{"role": "tool", "content": "mine"}] if a == "actions" else r for a, r in zip(actions, results)
            ]

    class Batch(QwenManager):
        async def _execute_tool_batch(self, action, tools):
            found = await super()._execute_tool_batch(action, tools)
            return [{**message, "content": "mine"} for message in found] if action == "actions" else found

    class Read(QwenManager):
        def parse_tools(self, response):
            return [{"name": "echo", "args": {"text": "mine"}}] if "CALL" in response else response

    script = [says(call(text="x") + "CALL"), says("<answer>5</answer>")]
    for manager_class in (Actions, Batch, Read):
        tool = Echo(respond=lambda p: p["text"])
        trajectory = answers(script, manager_class, tool)
        assert trajectory.messages[3] == {"role": "tool", "content": "mine"}, manager_class
        assert tool.log == {"create": 1, "execute": 1, "calc_reward": 1, "release": 1}


@pytest.mark.parametrize(("glue", "exact"), [("", True), ("\n(think first)", False)])
def test_a_prompt_rendered_by_an_override_is_taken_where_it_is_the_templates(glue, exact):
    class Rendered(QwenManager):
        def get_prompt(self, input_data, tokenizer, mode="initial", add_generation_prompt=True):
            return str(super().get_prompt(input_data, tokenizer, mode, add_generation_prompt)) + glue

    script = [says(call(text="x")), says("<answer>5</answer>")]
    trajectory = answers(script, Rendered, Echo())
    assert trajectory.messages[3]["role"] == ("tool" if exact else "user")
    if not exact:  # plain characters to the model
        observed = [i for each in trajectory.segments if each.provenance is Provenance.USER for i in each.token_ids]
        assert CHAT.disarm(TOKENIZER.decode(observed)) != TOKENIZER.decode(observed)
        assert not set(observed) & set(TOKENIZER.all_special_ids)


def test_a_manager_may_hold_tools_in_qwen_agents_shape():
    class Count:
        name, description, parameters = (
            "count",
            "Counts letters.",
            [{"name": "text", "type": "string", "required": True}],
        )

        def call(self, params, **kwargs):
            return f"got {params}"

    class Own(QwenManager):
        def _build_tools(self):
            self.tool_map["count"] = Count()

    trajectory = answers([says(call("count", text="x")), says("<answer>5</answer>")], Own)
    assert trajectory.messages[3]["content"] == 'got {"text": "x"}'

    class Wrong(QwenManager):
        def _build_tools(self):
            self.tool_map["count"] = 5

    with pytest.raises(ConfigError, match=r"tool_map\['count'\] is a int"):
        Wrong({})


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"reset": lambda self, **_: "hello"}, r"reset must return \(observation, info\).*'hello'"),
        ({"reset": lambda self, **_: (None, {})}, r"reset must return \(observation, info\)"),
        ({"step": lambda self, action: ("x", 1.0, True, False, "info")}, "step must return observation, reward"),
        ({"step": lambda self, action: ("x", 1.0, True, {})}, "step must return observation, reward"),
        ({"step": lambda self, action: ("x", "1.0", True, False, {})}, "environment 'mine' returned a str"),
        ({"step": lambda self, action: ("x", float("inf"), True, False, {})}, "not finite"),
        ({"step": lambda self, action: ("x", float("nan"), True, False, {})}, "not finite"),
        ({"step": lambda self, action: ({"text": "x"}, 1.0, False, False, {})}, "must observe text or messages"),
        (
            {"step": lambda self, action: ([{"role": "assistant", "content": "x"}], 1.0, False, False, {})},
            "not of the assistant",
        ),
        ({"step": lambda self, action: ("x", None, True, False, {})}, "returned no reward"),
        ({"step": lambda self, action: ("x", 1.0, "False", False, {})}, "'False' where True or False was expected"),
        ({"step": lambda self, action: ("x", 1.0, None, None, {})}, "None where True or False was expected"),
        ({"step": lambda self, action: ("x", 1.0, np.array([True, False]), False, {})}, "True or False was expected"),
    ],
)
def test_a_text_environment_that_returns_something_else_is_named(methods, message):
    with pytest.raises((EtudeError, InfrastructureError), match=message):
        play([says("1"), says("2")], type("Odd", (TextEnv,), methods))


@pytest.mark.parametrize(
    ("returned", "message"),
    [([], "get_step_reward must return one reward a response"), (["a"], "environment 'mine' returned a str")],
)
def test_a_process_reward_that_is_none_is_named(returned, message):
    cls = type("Odd", (Env,), {"get_step_reward": lambda self, responses, format_score=0.1: returned})
    with pytest.raises((EtudeError, InfrastructureError), match=message):
        play([says("<answer>4</answer>")], cls, options={"use_process_reward": True})
