"""Interactions: their lifecycle in every ending, what they do to a trajectory, their configuration, the bundled ones."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from agents_stage import CHAT, TOKENIZER, Echo, call, roll, run, says
from aiohttp import web

from etude.agents.interactions import (
    BaseInteraction,
    Gsm8kInteraction,
    SimulatedUser,
    load_interactions,
)
from etude.agents.interactions.base import entry_of
from etude.chat import ToolParser
from etude.environments import EnvironmentSession
from etude.errors import ConfigError, InfrastructureError
from etude.trajectory import Provenance, StopReason


class Patient(BaseInteraction):
    """Asks again until it has heard `enough` turns; `log` counts calls, `fail` names a method that fails."""

    def __init__(self, config=None):
        super().__init__({"name": "patient", **(config or {})})
        self.log = Counter()
        self.seen = []

    async def _note(self, method, instance_id):
        self.log[method] += 1
        if self.config.get("fail") == method:
            raise RuntimeError(f"{method} is broken")
        if self.config.get("hang") == method:
            await asyncio.sleep(3600)

    async def start_interaction(self, instance_id=None, **kwargs):
        self.kwargs = kwargs
        await self._note("start", instance_id)
        return f"own-{instance_id}"

    async def generate_response(self, instance_id, messages, **kwargs):
        await self._note("generate", instance_id)
        assert instance_id.startswith("own-")
        self.seen.append([dict(m) for m in messages])
        messages.clear()  # it has a copy
        turns = sum(m["role"] == "assistant" for m in self.seen[-1])
        return turns >= self.config.get("enough", 2), "Are you sure?", 0.25 * turns, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        await self._note("finalize", instance_id)


ROW = {"interaction_kwargs": {"name": "patient", "topic": "sums"}}


@asynccontextmanager
async def opened(user, kwargs, messages):
    """A session with the user, who is shown `messages`."""
    row = {"interaction_kwargs": kwargs, "request_id": "r", "group_seed": 0}
    async with EnvironmentSession(entry_of(user), row) as session:
        session.bind(SimpleNamespace(messages_for_user=lambda: messages))
        yield session


def talk(script, user, *, row=ROW, tools=(), **given):
    return roll(script, tools, row=row, interactions=[user], **given)


def test_the_user_answers_until_the_conversation_is_over():
    user = Patient()
    trajectory, engine = talk([says("4"), says("5")], user)
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert [m["role"] for m in trajectory.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert trajectory.rewards.steps == [(0, "interaction", 0.25), (1, "interaction", 0.5)]
    assert user.log == {"start": 1, "generate": 2, "finalize": 1}
    assert user.kwargs == {"topic": "sums"}
    assert trajectory.num_turns == 4
    assert (
        engine.asked[1][1]
        == trajectory.prompt_ids + trajectory.response_ids[: len(engine.asked[1][1]) - len(trajectory.prompt_ids)]
    )


def test_what_the_user_says_is_masked_and_marked_as_the_users():
    trajectory, _ = talk([says("4"), says("5")], Patient())
    said = [s for s in trajectory.segments if s.provenance is Provenance.USER]
    assert "Are you sure?" in CHAT.decode([t for s in said for t in s.token_ids])
    assert sum(trajectory.response_mask) == len(says("4")) + len(says("5"))


def test_tools_run_before_the_user_speaks():
    user, tool = Patient({"enough": 2}), Echo(respond=lambda p: "five")
    trajectory, _ = talk([says(call(text="x")), says("5")], user, tools=[tool])
    assert user.log["generate"] == 1
    assert [m["role"] for m in user.seen[0]] == ["system", "user", "assistant", "tool", "assistant"]
    assert tool.log == {"create": 1, "execute": 1, "calc_reward": 1, "release": 1}
    assert trajectory.stop_reason is StopReason.COMPLETED


def test_a_user_hears_words_and_neither_thoughts_nor_calls():
    user, tool = Patient({"enough": 2}), Echo(respond=lambda p: "secret")
    thought = "<think>a plan</think>One moment."
    talk([says(thought + call(text="x")), says("5")], user, tools=[tool])
    heard = user.seen[0]
    assert [m.get("spoken") for m in heard if m["role"] == "assistant"] == ["One moment.", "5"]
    assert "a plan" in heard[2]["content"]


def test_what_tools_answer_is_no_word_of_the_users_whatever_its_role():
    user, tool = Patient({"enough": 2}), Echo("search", respond=lambda p: "secret")
    parser = ToolParser.get_tool_parser("search_r1", TOKENIZER)
    talk([says("<search> q </search>"), says("5")], user, tools=[tool], parser=parser)
    heard = user.seen[0]
    assert [m["role"] for m in heard] == ["system", "user", "assistant", "tool", "assistant"]
    assert "secret" in heard[3]["content"]


def test_the_last_allowed_turn_is_judged_and_not_answered():
    user = Patient({"enough": 9})
    trajectory, engine = talk([says("4")] * 3, user, multi_turn={"max_assistant_turns": 2})
    assert trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert len(engine.asked) == 2
    assert len(trajectory.rewards.steps) == 2


def test_a_reply_that_leaves_no_room_for_an_answer_ends_the_trajectory():
    whole, _ = talk([says("4"), says("5")], Patient())
    reply = whole.response_length - len(says("4")) - len(says("5"))
    exact = len(says("4")) + reply + 7
    kept, _ = talk([says("4"), says("5")], Patient(), response_length=exact, multi_turn={"min_answer_tokens": 7})
    assert kept.stop_reason is StopReason.COMPLETED
    ended, _ = talk([says("4")], Patient(), response_length=exact, multi_turn={"min_answer_tokens": 8})
    assert ended.stop_reason is StopReason.TOOL_RESPONSE_OVERFLOW


@pytest.mark.parametrize("method", ["start", "generate"])
@pytest.mark.parametrize("how", ["fail", "hang"])
def test_a_broken_user_is_infrastructure_and_is_finalized(method, how):
    user = Patient({how: method, "timeout": 0.05})
    with pytest.raises(InfrastructureError, match=f"interaction 'patient': {method}"):
        talk([says("4")], user)
    assert user.log["finalize"] == 1


def test_a_finalize_that_fails_costs_nothing(caplog):
    trajectory, _ = talk([says("4"), says("5")], Patient({"fail": "finalize"}))
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert "finalize_interaction failed" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        *(None, (True, "x", 1.0), (False, None, 0.0, {}), (False, "x", float("nan"), {}), (False, "x", "much", {})),
        *(("False", "x", 1.0, {}), (None, "x", 1.0, {}), (False, "x", None, {})),
    ],
    ids=["none", "three", "no-text", "nan", "no-number", "word", "no-end", "no-reward"],
)
def test_a_user_that_returns_nonsense_is_infrastructure(answer):
    class Odd(Patient):
        async def generate_response(self, instance_id, messages, **kwargs):
            return answer

    user = Odd()
    with pytest.raises(InfrastructureError, match="generate_response"):
        talk([says("4")], user)
    assert user.log["finalize"] == 1


def test_the_manager_picks_the_loop_for_a_row_with_a_user_and_retries_a_broken_one():
    class Flaky(Patient):
        async def start_interaction(self, instance_id=None, **kwargs):
            await super().start_interaction(instance_id, **kwargs)
            if self.log["start"] == 1:
                raise ConnectionError("gone")
            return f"own-{instance_id}"

    user = Flaky()
    given = {"interactions": [user], "infrastructure_retries": 1}
    [result], _ = run(None, 1, [says("4"), says("5")], row=ROW, **given)
    assert result.trajectory is not None
    assert result.failures == 1
    assert user.log == {"start": 2, "generate": 2, "finalize": 2}


# -- the bundled ones ------------------------------------------------------------------------------------------------


def test_gsm8k_ends_with_the_right_answer():
    row = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "1,000", "query": "How many?"}}
    user = Gsm8kInteraction({"name": "gsm8k"})
    trajectory, _ = talk([says("I say #### 4"), says("1000")], user, row=row)
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert [value for _, _, value in trajectory.rewards.steps] == [0.0, 1.0]
    assert "incorrect" in trajectory.messages[-2]["content"]
    assert user._conversations == {}


def test_gsm8k_judges_what_was_said_and_not_what_was_thought():
    row = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "72"}}
    turns = ["<think>#### 72</think>It is 3.", "<think>3, or 4?</think>The answer is 72."]
    trajectory, _ = talk([*map(says, turns)], Gsm8kInteraction({"name": "gsm8k"}), row=row)
    assert [value for _, _, value in trajectory.rewards.steps] == [0.0, 1.0]


@pytest.mark.parametrize("truth", [{}, {"ground_truth": None}, {"ground_truth": ""}, {"ground_truth": float("nan")}])
def test_gsm8k_without_a_ground_truth_says_so(truth):
    with pytest.raises(InfrastructureError, match="need a 'ground_truth'"):
        talk([says("4")], Gsm8kInteraction({"name": "gsm8k"}), row={"interaction_kwargs": {"name": "gsm8k", **truth}})


async def endpoint(answers, asked):
    """A real server on a free port; `answers` are bodies or (status, body)."""

    async def complete(request):
        asked.append((dict(request.headers), await request.json()))
        answer = answers[min(len(asked), len(answers)) - 1]
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return web.Response(status=status, text=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"


def said(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def converse(answers, turns, **config):
    """(user turns, requests, user) of a conversation with a simulated user."""
    asked = []

    async def main():
        runner, url = await endpoint(answers, asked)
        try:
            user = SimulatedUser({"name": "u", "base_url": url, "model": "m", **config})
            made = []
            async with opened(user, {"name": "u", "order": "A7"}, messages := []) as session:
                for messages[:] in turns:
                    made.append((await session.step(""))[0])
            return made
        finally:
            await runner.cleanup()

    return asyncio.run(main()), asked


def test_a_simulated_user_sees_words_not_thoughts_and_ends_the_conversation():
    messages = [
        {"role": "system", "content": "You are a shop."},
        {"role": "user", "content": "Refund!"},
        {"role": "assistant", "content": "<think>no</think>Sure.<tool_call>{}</tool_call>", "spoken": "Sure."},
        {"role": "tool", "content": "secret"},
        {"role": "assistant", "content": "[f(a=1)]", "spoken": ""},
    ]
    turns, asked = converse(
        [said("Thanks"), said("###STOP###")], [messages, messages], system_prompt="Order {order}.", api_key="k"
    )
    assert [(t.done, t.observation, t.reward) for t in turns] == [(False, "Thanks", 0.0), (True, "", 0.0)]
    headers, body = asked[0]
    assert headers["Authorization"] == "Bearer k"
    assert body["messages"] == [
        {"role": "system", "content": "Order A7."},
        {"role": "assistant", "content": "Refund!"},
        {"role": "user", "content": "Sure."},
    ]


def test_what_a_simulated_user_thinks_is_neither_said_nor_an_end():
    thought = said("<think>When it is met: ###STOP###. The code is A7.</think>\n\nWhere is it?")
    [turn], _ = converse([thought], [[{"role": "assistant", "content": "hi"}]])
    assert (turn.done, turn.observation) == (False, "Where is it?")


@pytest.mark.parametrize(
    "answer",
    [(500, "{}"), "{", "{}", json.dumps({"choices": []}), said(None), said("<think>When it is met: ###STOP###")],
    ids=["500", "json", "empty", "no", "null", "thought"],
)
def test_an_endpoint_that_fails_is_infrastructure(answer):
    with pytest.raises(InfrastructureError):
        converse([answer], [[{"role": "assistant", "content": "hi"}]])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "m"}, "base_url"),
        ({"base_url": "http://127.0.0.1/v1"}, "config.model is missing"),
        ({"base_url": "http://127.0.0.1/v1", "model": "m", "temprature": 1}, "did you mean 'temperature'"),
    ],
)
def test_a_wrong_simulated_user_says_what_is_wrong(config, message):
    with pytest.raises(ConfigError, match=message):
        SimulatedUser(config)


# -- configuration ---------------------------------------------------------------------------------------------------

USER_FILE = """
from etude.agents.interactions import BaseInteraction
class WeatherInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "Thank you for your weather query!", 1.0, {}
"""


GSM8K = "etude.agents.interactions.gsm8k.Gsm8kInteraction"
SIMULATED = "etude.agents.interactions.simulated_user.SimulatedUser"


def written(tmp_path, text):
    (tmp_path / "user.py").write_text(USER_FILE)
    path = tmp_path / "interaction.yaml"
    path.write_text(text)
    return path


def test_interactions_load_by_class_and_by_file_with_the_documents_names(tmp_path):
    loaded = load_interactions(
        written(
            tmp_path,
            "interaction:\n"
            "  - class_name: etude.agents.interactions.gsm8k.Gsm8kInteraction\n"
            "    config: {}\n"
            "  - {name: sky, class_name: 'user.py:WeatherInteraction'}\n",
        )
    )
    assert list(loaded) == ["gsm8k", "sky"]
    assert loaded["sky"].name == "sky"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: []", "under the key 'interaction'"),
        ("interaction: [{name: a}]", r"interaction\[0\]: expected a mapping with the key 'class_name'"),
        ("interaction: [{class_name: 'user.py:Nobody'}]", "Nobody"),
        (
            "interaction: [{class_name: etude.tools.BaseTool}]",
            "no subclass of etude.agents.interactions.BaseInteraction",
        ),
        ("interaction: [{class_name: 'user.py:WeatherInteraction', confg: {}}]", "did you mean 'config'"),
        ("interaction: [{class_name: 'user.py:WeatherInteraction', config: {timeout: -1}}]", "config.timeout must be"),
        (f"interaction: [{{class_name: {SIMULATED}, config: {{timeout: abc}}}}]", "config.timeout must be"),
        (f"interaction: [{{class_name: {GSM8K}, config: {{method: strct}}}}]", "strict or flexible, not 'strct'"),
        (f"interaction: [{{class_name: {GSM8K}, config: {{timout: 3}}}}]", "'config.timout'; did you mean 'timeout'"),
        (
            "interaction: [{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction}]",
            f"here this class is {GSM8K}",
        ),
        ("interaction: [{class_name: verl.interactions.weather.WeatherInteraction}]", "derive your class from"),
        (
            "interaction: [{class_name: 'user.py:WeatherInteraction'}, {class_name: 'user.py:WeatherInteraction'}]",
            "the name 'weather' is taken",
        ),
    ],
)
def test_a_wrong_file_is_one_line_with_file_and_entry(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as raised:
        load_interactions(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="interaction configuration not found"):
        load_interactions(tmp_path / "none.yaml")
