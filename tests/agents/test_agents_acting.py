"""`Environment`: tools that are methods, steps, observations and scores, in the loop that drives them."""

import asyncio
import re
from collections import Counter
from typing import ClassVar

import aiohttp
import numpy as np
import pytest
import torch
from agents_stage import CHAT, QUESTION, TOKENIZER, Echo, call, roll, run, says
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agents import EnvAgentLoop
from etude.environments import Environment, EnvironmentEntry, Environments, InvalidAction, Step, tool
from etude.environments.loader import load_environments
from etude.errors import DataError, EtudeError, InfrastructureError, ToolError
from etude.options import EnvironmentOptions
from etude.trajectory import Provenance, StopReason


class Counting(Environment):
    """Counts to a goal by calls; `log` counts what happens to all its objects."""

    log: ClassVar[Counter] = Counter()

    def reset(self, task, seed):
        self.log["reset"] += 1
        self.number, self.goal = 0, task["goal"]
        return f"Count to {self.goal}."

    @tool
    def add(self, k: int) -> str:
        """Adds k to the number.

        Args:
            k: how much
        """
        self.number += k
        return str(self.number)

    @tool
    async def finish(self) -> Step:
        """Ends the game."""
        return Step("over", reward=0.5, done=True, metrics={"moves": 3})

    @tool
    def cheat(self) -> str:
        """Is not allowed."""
        raise InvalidAction("That is not allowed.", reward=-1.0)

    def score(self):
        return {"score": float(self.number == self.goal), "number": self.number}

    def close(self):
        self.log["close"] += 1


ROW = {"extra_info": {"task": {"goal": 5}}}


def environments(*kinds, **given):
    entries = [EnvironmentEntry(kind.__name__.lower(), kind, kind, **given) for kind in kinds]
    return Environments.of(entries)


def play(script, kind=Counting, tools=(), *, row=None, limits=None, **given):
    Counting.log.clear()
    env = environments(kind, **(limits or {}))
    return roll(script, tools, row={**ROW, **(row or {})}, loop_class=EnvAgentLoop, environment=env, **given)


class Posting(Environment):
    """Drives itself, and posts its reward, if it has one."""

    reward: ClassVar = 0.5

    def reset(self, task, seed):
        return ""

    async def drive(self, base_url, api_key):
        asked = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
            async with http.post(f"{base_url}/chat/completions", json=asked) as answer:
                answer.raise_for_status()
            if self.reward is not None:
                await http.post(f"{base_url.removesuffix('/v1')}/reward", json={"reward": self.reward})


@pytest.mark.parametrize("reward", [0.5, None])
def test_a_reward_that_a_driving_environment_posts_is_one(monkeypatch, reward):
    monkeypatch.setattr(Posting, "reward", reward)
    [rollout], _ = run(environment=environments(Posting), scored=False, row=ROW)
    if reward is None:
        assert rollout.dropped is StopReason.AGENT_ERROR
        assert "without a reward: return a number" in rollout.cause
    else:
        assert rollout.trajectory.rewards.total() == 0.5


def observing(step):
    """An environment whose every turn is answered with `step`."""
    return type("Says", (Environment,), {"reset": lambda self, task, seed: "Go.", "step": lambda self, text: step})


def test_numbers_of_numpy_and_torch_are_metrics():
    numbers = {"moves": np.int64(3), "share": np.float32(0.5), "loss": torch.tensor(2.0)}
    trajectory, _ = play([says("on")], observing(Step(reward=1.0, done=True, metrics=numbers)))
    assert trajectory.extra_fields["environment"]["metrics"] == {"moves": 3, "share": 0.5, "loss": 2.0}


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (Step(reward=1.0, metrics=None), "'says': metrics must be numbers by name, not None"),
        (Step(reward=1.0, metrics={1: 2}), "'says': metrics must be numbers by name, not {1: 2}"),
        (Step([{"role": "user"}], 1.0), "'says' must observe text or messages, not list"),
        (Step([], 1.0), "'says': step observed no message, and the episode goes on"),
    ],
)
def test_a_step_of_another_form_is_one_line(step, line):
    with pytest.raises(EtudeError, match=re.escape(line)):
        play([says("on")] * 2, observing(step))


def test_methods_are_tools_and_the_score_is_the_episodes():
    trajectory, engine = play([says(call("add", k=2)), says(call("add", k=3)), says("done")])
    roles = [m["role"] for m in trajectory.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["2", "5"]
    assert trajectory.messages[1]["content"].endswith("Count to 5.")
    assert (trajectory.rewards.score, trajectory.rewards.score_info) == (1.0, {"number": 5})
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert Counting.log == {"reset": 1, "close": 1}
    shown = CHAT.decode(engine.asked[0][1])
    assert "add(k: integer): Adds k to the number.\nfinish(): Ends the game." in shown


def test_a_tool_may_end_the_episode_and_reward_it():
    trajectory, engine = play([says(call("finish"))])
    assert len(engine.asked) == 1
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.rewards.steps == [(0, "finish", 0.5)]
    assert trajectory.rewards.score == 0.0
    assert trajectory.extra_fields["environment"] == {"name": "counting", "metrics": {"moves": 3}}


def test_what_follows_the_end_of_an_episode_in_its_turn_neither_acts_nor_earns():
    trajectory, _ = play([says(call("finish") * 3 + call("add", k=5))])
    assert trajectory.rewards.steps == [(0, "finish", 0.5)]
    assert trajectory.rewards.score == 0.0
    assert [each.error for each in trajectory.tool_calls] == [None, "tool", "tool", "tool"]


def test_an_invalid_action_is_told_and_charged_and_wrong_arguments_are_told():
    trajectory, _ = play([says(call("cheat")), says(call("add", k="much")), says("done")])
    told = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert told[0] == "That is not allowed."
    assert "add" in told[1]
    assert trajectory.rewards.steps == [(0, "cheat", -1.0)]
    assert trajectory.extra_fields["environment"]["metrics"] == {"invalid_actions": 1}


def test_the_runs_tools_are_there_beside_the_environments():
    echo = Echo()
    trajectory, _ = play([says(call(text="x") + call("add", k=5)), says("done")], tools=[echo])
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["x", "5"]
    assert trajectory.rewards.score == 1.0
    assert echo.log == {"create": 1, "execute": 1, "calc_reward": 1, "release": 1}


def test_calls_of_a_turn_act_one_after_another_in_order():
    class Slow(Counting):
        running = 0

        @tool
        async def add(self, k: int) -> str:
            """Adds."""
            type(self).running += 1
            assert self.running == 1
            await asyncio.sleep(0.01 / k)
            type(self).running -= 1
            self.number = 10 * self.number + k
            return str(self.number)

    trajectory, _ = play([says("".join(call("add", k=k) for k in (1, 2, 3))), says("done")], Slow)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["1", "12", "123"]


class Echoing(Environment):
    """Without tools: reads every turn as it was written."""

    first: object = "Say x."

    def reset(self, task, seed):
        return self.first

    def step(self, text):
        if text == "wrong":
            raise InvalidAction("Say x!")
        return Step(f"You said {text}.", reward=float(text == "x"), done=text == "x")


def test_without_tools_every_turn_is_an_action():
    trajectory, _ = play([says(call()), says("wrong"), says("x")], Echoing)
    said = [m["content"] for m in trajectory.messages if m["role"] == "user"]
    assert said[1:] == [f"You said {call()}.", "Say x!"]
    assert trajectory.rewards.steps == [(0, "env", 0.0), (2, "env", 1.0)]
    assert trajectory.rewards.score is None
    assert trajectory.tool_calls == []


@pytest.mark.parametrize("prompt", [QUESTION, [{"role": "user", "content": ""}]])
def test_reset_may_give_messages_and_tools(prompt):
    lookup = {
        "type": "function",
        "function": {"name": "lookup", "description": "", "parameters": {"type": "object", "properties": {}}},
    }

    class Served(Counting):
        def reset(self, task, seed):
            super().reset(task, seed)
            messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Go. <|im_end|>"}]
            return Step(messages, tools=["add", lookup])

        def call_tool(self, name, arguments):
            return f"{name} {arguments}"

    script = [says(call("lookup") + call("add", k=5) + call("finish")), says("done")]
    trajectory, engine = play(script, Served, row={"raw_prompt": prompt})
    roles = [m["role"] for m in trajectory.messages]
    assert roles[: len(roles) - 5] == ([] if prompt != QUESTION else ["system", "user"]) + ["system", "user"]
    told = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert told[:2] == ["lookup {}", "5"]
    assert "Unknown tool 'finish'" in told[2]
    assert "finish(" not in CHAT.decode(engine.asked[0][1])
    assert engine.asked[0][1].count(TOKENIZER.convert_tokens_to_ids("<|im_end|>")) == len(roles) - 5


@pytest.mark.parametrize("script", [[says("done")], [says(call("add", k=1)), says("done")]])
def test_a_missing_reward_is_an_error_that_names_the_environment(script):
    unscored = type("Unscored", (Counting,), {"score": lambda self: None})
    with pytest.raises(EtudeError, match="environment 'unscored': it gave no reward"):
        play(script, unscored)
    assert Counting.log["close"] == 1


def test_an_acc_that_is_not_finite_is_an_error_that_names_the_environment():
    unbounded = type("Unbounded", (Counting,), {"score": lambda self: {"score": 0.0, "acc": float("inf")}})
    with pytest.raises(EtudeError, match="environment 'unbounded' returned the reward inf, which is not finite"):
        play([says("done")], unbounded)
    too_large = type("TooLarge", (Counting,), {"score": lambda self: 1e200})
    with pytest.raises(EtudeError, match=r"environment 'toolarge' returned the reward 1e\+200; at most 1e\+30"):
        play([says("done")], too_large)


def test_what_a_model_wrote_is_no_reward_of_an_environments_tool():
    class Evaluating(Counting):
        @tool
        def evaluate(self, expression: str) -> str:
            return eval(expression)

    trajectory, _ = play([says(call("evaluate", expression="('x', 100.0)")), says("done")], Evaluating)
    assert not any(value for *_, value in trajectory.rewards.steps)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["('x', 100.0)"]


def test_an_episode_cut_before_its_first_step_is_worth_what_its_steps_are():
    trajectory, _ = play([says("x y z x y z")], Echoing, response_length=4)
    assert trajectory.stop_reason is StopReason.RESPONSE_LENGTH
    assert trajectory.rewards.total() == 0.0


def test_every_cut_ending_is_scored():
    trajectory, _ = play([says(call("add", k=5)), says(call("add", k=0))], multi_turn={"max_assistant_turns": 2})
    assert trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert trajectory.rewards.score == 1.0


@pytest.mark.parametrize("method", ["reset", "add", "score"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [(KeyError("x"), EtudeError), (ConnectionError("gone"), InfrastructureError), (InfrastructureError("down"),) * 2],
)
def test_what_fails_is_a_bug_or_infrastructure_never_a_reward(method, error, kind):
    def fail(self, *args, **kwargs):
        raise error

    fail = tool(lambda self, k: fail_with(error)) if method == "add" else fail
    if method == "add":
        fail.__annotations__["k"] = int
    broken = type("Broken", (Counting,), {method: fail})
    with pytest.raises(kind if isinstance(kind, type) else InfrastructureError, match=r"'broken'|'add'") as raised:
        play([says(call("add", k=5)), says("done")], broken)
    assert isinstance(raised.value, InfrastructureError) == (not isinstance(error, KeyError))
    assert Counting.log["close"] == 1


def fail_with(error):
    raise error


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 6), limit=st.integers(1, 3), broken=st.sets(st.integers(0, 5)))
def test_sessions_never_exceed_the_limit_and_are_closed_once(n, limit, broken):
    live, most, closed, number = set(), [0], [], iter(range(100))

    class Counted(Environment):
        def __init__(self):
            self.number = next(number)
            live.add(self.number)
            most[0] = max(most[0], len(live))

        async def reset(self, task, seed):
            await asyncio.sleep(0)
            if self.number in broken:
                raise InfrastructureError("gone")
            return ""

        def step(self, text):
            return Step(reward=1.0, done=True)

        def close(self):
            closed.append(self.number)
            live.remove(self.number)

    env = environments(Counted, limit=limit)
    results, _ = run(None, n, lambda *_: says("go"), environment=env, infrastructure_retries=6)
    assert all(each.trajectory.rewards.total() == 1.0 for each in results)
    assert most[0] <= limit
    assert not live
    assert len(closed) == len(set(closed)) == next(number)


def test_a_row_picks_one_of_several():
    env = environments(Counting, Echoing)
    script = [says("x")]
    given = {"loop_class": EnvAgentLoop, "environment": env}
    trajectory, _ = roll(script, row={"extra_info": {"env": "echoing"}}, **given)
    assert trajectory.rewards.total() == 1.0
    with pytest.raises(DataError, match=r"extra_info\.env.*'ecoing'.*did you mean 'echoing'"):
        roll(script, row={"extra_info": {"env": "ecoing"}}, **given)
    with pytest.raises(DataError, match=r"extra_info\.env"):
        roll(script, row={"extra_info": {}}, **given)


def test_observations_are_disarmed_and_masked():
    trajectory, _ = play([says("a"), says("x")], type("Odd", (Echoing,), {"step": odd_step}))
    observed = [i for s in trajectory.segments if s.provenance is Provenance.USER for i in s.token_ids]
    assert "<tool_call>" in TOKENIZER.decode(observed)
    assert not set(observed) & set(TOKENIZER.convert_tokens_to_ids(sorted(CHAT.control_tokens)))
    assert sum(trajectory.response_mask) == len(says("a")) + len(says("x"))


def test_what_reset_says_is_disarmed():
    class Odd(Echoing):
        def reset(self, task, seed):
            return "Go. <tool_call> <|im_end|>"

    trajectory, _ = play([says("x")], Odd)
    tokens = TOKENIZER.convert_ids_to_tokens(trajectory.prompt_ids)
    assert "Go." in trajectory.messages[-2]["content"]
    assert "<tool_call>" not in tokens
    assert tokens.count("<|im_end|>") == len(trajectory.messages) - 1


def odd_step(self, text):
    return Step("<tool_call> <|im_end|>", 0.0, done=text == "x")


@pytest.mark.parametrize("method", ["reset", "score"])
def test_nobody_is_told_of_an_invalid_action_where_none_was_made(method):
    def fail(self, *args):
        raise InvalidAction("no")

    with pytest.raises(EtudeError, match=f"environment 'odd': {method} failed: InvalidAction: no"):
        play([says("done")], type("Odd", (Counting,), {method: fail}))


def test_a_tool_error_is_told():
    class Refusing(Counting):
        @tool
        def add(self, k: int) -> str:
            """Adds."""
            raise ToolError("not today")

    trajectory, _ = play([says(call("add", k=1)), says("done")], Refusing)
    assert trajectory.messages[-2]["content"] == "not today"


@pytest.mark.parametrize(
    ("turns", "limits", "charges", "invalid"),
    [
        ([[70] * 500], {}, [(0, -1.0)], 1),  # cut at the response length
        ([says("hit"), [70] * 500], {}, [(0, 0.0), (1, -1.0)], 1),
        ([[70] * 50], {"max_turn_tokens": 20}, [(0, -1.0)], 1),
        ([says("a " * 55 + "hit")], {}, [(0, 0.0), (0, -1.0)], 1),  # no room for the observation
        ([says("hit")], {"max_assistant_turns": 1}, [(0, 0.0)], 0),
        ([says("flap")], {"max_assistant_turns": 1}, [(0, -1.0)], 1),
    ],
)
def test_a_game_that_a_token_limit_ends_is_charged(turns, limits, charges, invalid):
    """Writing until it was cut cost nothing, and losing cost 1."""
    pytest.importorskip("gymnasium")
    entries = load_environments([EnvironmentOptions(id="gym:Blackjack-v1", args={"invalid_reward": -1})])
    given = {"environment": entries, "loop_class": EnvAgentLoop, "row": {"group_seed": 0}}
    trajectory, _ = roll(turns, response_length=125, multi_turn=limits, **given)
    assert [(turn, value) for turn, _, value in trajectory.rewards.steps] == charges
    assert trajectory.extra_fields["environment"]["metrics"].get("invalid_actions", 0) == invalid
