"""What is refused and what breaks: each in OpenAI's error form, with the parameter or the code, and nothing left behind."""

import asyncio
import json
import re
from functools import partial

import aiohttp
import openai
import pytest
from agents_stage import CHAT, TOKENIZER, Recorder, says
from gateway_stage import ECHO, USER, answer, native, post_reward, served, session, talk
from starlette.testclient import TestClient
from wait_stage import until_async

from etude.agents.gateway import SessionRules, local
from etude.agents.gateway.local import LocalGateway
from etude.agents.gateway.request import GatewayError
from etude.agents.gateway.server import SessionStore, create_app
from etude.errors import EngineError
from etude.trajectory import StopReason

TOO_LONG = "context_length_exceeded"
SURROGATE = b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}'
LONG_USER = {"role": "user", "content": "value " * 200}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
AUDIO, UNENCODED = {"type": "input_audio", "input_audio": {}}, {"name": "f", "arguments": {}}
NOT_SAMPLED_FROM = "not supported: training needs log-probs of what was sampled from"


def tool(name="f", parameters=None, **schema):
    """A tool, with a wrong name or wrong parameters."""
    return {"type": "function", "function": {"name": name, "parameters": parameters or schema}}


def nested(depth):
    """A schema within schemas."""
    return {"properties": {"a": nested(depth - 1)}} if depth else {}


def message(role, **more):
    """A request with one message."""
    return {"messages": [{"role": role, **more}]}


async def refused(coroutine):
    """The error that a request ends with."""
    with pytest.raises(openai.APIStatusError) as caught:
        await coroutine
    error = caught.value
    assert set(error.body) == {"message", "type", "param", "code"}
    assert "\n" not in error.body["message"]
    return error


@pytest.mark.parametrize(
    ("request_more", "param", "words"),
    [
        ({"tool_choice": "required"}, None, "tool_choice"),
        ({"tool_choice": "any", "tools": [ECHO]}, "tool_choice", "'required'"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [ECHO]}, None, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [ECHO]}, "tool_choice", "'required'"),
        ({"response_format": {"type": "grammar"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format", "'schema'"),
        ({"presence_penalty": 0.5}, "presence_penalty", f"{NOT_SAMPLED_FROM}; send 0"),
        ({"frequency_penalty": -1.0}, "frequency_penalty", f"{NOT_SAMPLED_FROM}; send 0"),
        ({"logit_bias": {"5": 10}}, "logit_bias", "log-probs"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "sampled tokens"),
        ({"functions": [{"name": "f"}]}, "functions", "send tools"),
        ({"modalities": ["text", "audio"]}, "modalities.1", "text"),
        ({"n": 17}, "n", "16"),
        ({"n": 0}, "n", ""),
        ({"max_tokens": 0}, "max_tokens", ""),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None, "differ"),
        ({"temperature": -1}, "temperature", ""),
        ({"top_p": 0}, "top_p", ""),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": list("abcdefghijklmnopq")}, "stop", "16"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tool 0"),
        ({"tools": [tool(5)]}, "tools", "its name must be a text"),
        ({"tools": [tool(parameters="x")]}, "tools", "parameters must be an object"),
        ({"tools": [tool(type=[["a"]])]}, "tools", "parameters.type must be"),
        ({"tools": [tool(required="a")]}, "tools", "parameters.required must be"),
        ({"tools": [tool(properties=[1])]}, "tools", "parameters.properties must be an object"),
        ({"tools": [tool(properties={"a": "string"})]}, "tools", "parameters.properties.a must be an object"),
        ({"tools": [tool(properties={"a": {"type": 5}})]}, "tools", "parameters.properties.a.type must be"),
        ({"tools": [tool(properties={"a": {"enum": 5}})]}, "tools", "parameters.properties.a.enum must be a list"),
        ({"tools": [tool(anyOf=[{"type": {}}])]}, "tools", "parameters.anyOf.0.type must be"),
        ({"tools": [tool(**nested(65))]}, "tools", "nested 64 deep"),
        ({"extra_body": {"tempeature": 1}}, "tempeature", "did you mean 'temperature'?"),
        ({"messages": []}, "messages", ""),
        (message("function", content=""), "messages.0.role", "must be one of"),
        (message("user", content=5), "messages.0.content", "text"),
        (message("user", content=[AUDIO]), "messages.0.content", "only parts of type 'text' and 'image_url' are read"),
        (message("user", content=[IMAGE]), "messages", "messages.0: this policy takes no images"),
        (message("user", content="", tool_calls=[{}]), "messages.0.tool_calls", "assistant"),
        (message("assistant", tool_calls=[{}]), "messages.0.tool_calls.0", "function"),
        (message("assistant", tool_calls=[{"function": UNENCODED}]), "messages.0.tool_calls.0", "JSON"),
        (message("assistant", function_call={"name": "f"}), "messages.0.function_call", "tool_calls"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(request_more, param, words):
    async def work(stage):
        error = await refused(stage.chat(request_more.pop("messages", [USER]), **request_more))
        return error, stage.engine.asked, stage.session.trajectories()

    error, asked, [trajectory] = talk(work, [says("5")])
    assert (error.status_code, error.body["type"], error.param) == (400, "invalid_request_error", param)
    assert words in error.body["message"]
    assert asked == []
    assert trajectory.segments == []


def test_hints_and_settings_that_ask_for_nothing_are_accepted():
    async def work(stage):
        return await stage.chat(
            [USER],
            user="me",
            store=False,
            metadata={"a": "b"},
            presence_penalty=0,
            frequency_penalty=0.0,
            logit_bias={},
            n=1,
            response_format={"type": "text"},
            parallel_tool_calls=True,
            tools=[
                ECHO | {"function": ECHO["function"] | {"strict": True}},
                {"type": "function", "function": {"name": "bare"}},
                tool(properties={"a": True, "b": {"type": ["string", "null"], "enum": ["x", None]}}, required=["a"]),
                tool(**nested(64)),
            ],
            tool_choice="auto",
            reasoning_effort="low",
            modalities=["text"],
            top_logprobs=0,
            service_tier="auto",
        )

    assert talk(work, [says("5")]).choices[0].message.content == "5"


def test_bodies_that_are_no_requests(monkeypatch):
    monkeypatch.setattr(local, "_MOST_REQUEST_MB", 1)

    async def work(stage):
        url, headers = f"{stage.url}/chat/completions", {"Authorization": f"Bearer {stage.key}"}
        found = []
        async with aiohttp.ClientSession(headers=headers) as session:
            for data in (
                b"",
                b"{",
                b"[1]",
                b"[" * 100_000,
                b"\xff\xfe",
                SURROGATE,
                '{"messages": []}'.encode("utf-16"),
            ):
                async with session.post(url, data=data) as response:
                    found.append((response.status, (await response.json())["error"]["type"]))
            async with session.get(url) as response:
                found.append((response.status, (await response.json())["error"]["type"]))
            async with session.get(f"{stage.root}/nowhere") as response:
                found.append((response.status, (await response.json())["error"]["type"]))
            async with session.post(url, data=b" " * (2 << 20)) as response:
                found.append((response.status, (await response.json())["error"]["type"]))
        return found

    wrong = (400, "invalid_request_error")
    assert talk(work, []) == [wrong] * 7 + [(405, wrong[1]), (404, "not_found_error"), (413, wrong[1])]


@pytest.mark.parametrize(("text", "status"), [('"\\ud83d"', 400), ('"\\ud83d\\ude42"', 200), ('"\\\\ud83d"', 200)])
def test_half_a_character_is_refused(text, status):
    async def work(stage):
        body = '{"messages": [{"role": "user", "content": ' + text + "}]}"
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {stage.key}"}) as session,
            session.post(f"{stage.url}/chat/completions", data=body) as response,
        ):
            return response.status

    assert talk(work, [says("5")]) == status


def test_only_the_sessions_own_key_opens_it():
    async def work(stage):
        stranger = stage.client.with_options(api_key="guess")
        error = await refused(stranger.chat.completions.create(model="m", messages=[USER]))
        assert (error.status_code, error.code) == (401, "invalid_api_key")
        elsewhere = stage.client.with_options(base_url=f"{stage.root}/s/other/v1")
        error = await refused(elsewhere.chat.completions.create(model="m", messages=[USER]))
        assert (error.status_code, error.code) == (404, "session_not_found")
        alone = stage.client.with_options(base_url=f"{stage.root}/v1")
        error = await refused(alone.chat.completions.create(model="m", messages=[USER]))
        assert (error.status_code, error.code) == (404, "session_not_found")
        return stage.engine.asked

    assert talk(work, []) == []


def test_a_session_that_is_over_answers_no_more():
    async def work(stage):
        await stage.session.close()
        return await refused(stage.chat([USER]))

    assert talk(work, [says("5")]).code == "session_not_found"


# -- limits --------------------------------------------------------------------------------------------------------


def test_a_first_prompt_that_is_too_long_ends_the_trajectory_before_it_began():
    async def work(stage):
        error = await refused(stage.chat([LONG_USER]))
        return error, stage.session.trajectories()

    error, [trajectory] = talk(work, [says("5")], prompt_length=50)
    assert (error.status_code, error.code) == (400, TOO_LONG)
    assert "maximum context length" in error.body["message"]
    assert trajectory.stop_reason is StopReason.PROMPT_TOO_LONG


def test_what_is_too_long_later_ends_it_unless_the_agent_makes_room():
    async def work(stage):
        first = await stage.chat([USER])
        history = [USER, answer(first.choices[0])]
        assert (await refused(stage.chat([*history, LONG_USER]))).code == TOO_LONG
        assert stage.session.trajectories()[-1].stop_reason is StopReason.RESPONSE_LENGTH
        await stage.chat([{"role": "user", "content": "In short: five."}])
        return stage.session.trajectories()

    first, second = talk(work, [says("5"), says("five")], prompt_length=60, response_length=40)
    assert (first.stop_reason, second.stop_reason) == (StopReason.COMPLETED, StopReason.COMPLETED)


def test_the_answer_fills_what_room_there_is_and_no_more():
    async def work(stage):
        history = [USER, answer((await stage.chat([USER], max_tokens=2)).choices[0]), USER]
        second = (await stage.chat(history, max_tokens=1000)).choices[0]
        error = await refused(stage.chat([*history, answer(second), USER]))
        return second, error, stage.session.trajectories()

    second, error, [trajectory] = talk(work, lambda *_: says("value " * 50), response_length=40, prompt_length=40)
    assert second.finish_reason == "length"
    assert trajectory.response_length == 40
    assert (trajectory.stop_reason, error.code) == (StopReason.RESPONSE_LENGTH, TOO_LONG)


def test_max_model_len_counts_prompt_and_answers():
    prompt = len(CHAT.initial_ids([USER]))

    async def work(stage):
        await stage.chat([USER])
        return stage.session.trajectories()

    [trajectory] = talk(work, lambda *_: says("value " * 50), max_model_len=prompt + 7)
    assert trajectory.response_length == 7
    assert trajectory.stop_reason is StopReason.CONTEXT_LENGTH


def test_room_for_an_answer_is_kept_behind_tools():
    reserve = 30

    async def work(stage):
        first = (await stage.chat([USER])).choices[0]
        return await refused(stage.chat([USER, answer(first), USER]))

    limits = {"response_length": 40, "multi_turn": {"min_answer_tokens": reserve}}
    assert talk(work, [says("5"), says("5")], **limits).code == TOO_LONG


def test_turns_and_seconds_are_limited_as_in_any_loop():
    async def turns(stage):
        await stage.chat([USER])
        await stage.chat([USER], n=2)
        return await refused(stage.chat([USER])), stage.session.trajectories()

    error, trajectories = talk(turns, lambda *_: says("5"), multi_turn={"max_assistant_turns": 2})
    assert error.code == "max_assistant_turns"
    assert trajectories[-1].stop_reason is StopReason.MAX_ASSISTANT_TURNS
    error, _ = talk(turns, lambda *_: says("5"), rules=SessionRules(max_turns=2))
    assert error.code == "max_assistant_turns"

    async def seconds(stage):
        await stage.chat([USER])
        stage.session.started -= 6
        return await refused(stage.chat([USER])), stage.session.trajectories()

    error, trajectories = talk(seconds, lambda *_: says("5"), multi_turn={"max_seconds": 5.0})
    assert (error.code, trajectories[-1].stop_reason) == ("time_limit", StopReason.TIME_LIMIT)


def test_requests_at_once_share_the_turns_that_are_left():
    async def work(stage):
        made = await asyncio.gather(*[stage.chat([USER]) for _ in range(9)], return_exceptions=True)
        return [each.code for each in made if isinstance(each, Exception)], stage.session.trajectories()

    engine = Recorder(lambda *_: says("5"), latency=0.05)
    codes, trajectories = talk(work, engine=engine, multi_turn={"max_assistant_turns": 2})
    assert codes == ["max_assistant_turns"] * 7
    assert len(trajectories) == 2
    assert trajectories[-1].stop_reason is StopReason.MAX_ASSISTANT_TURNS


def test_a_request_that_fails_uses_up_no_turn():
    script = iter([EngineError("gone"), says("5")])

    async def work(stage):
        await refused(stage.chat([USER]))
        return await stage.chat([USER])

    made = talk(work, lambda *_: next(script), multi_turn={"max_assistant_turns": 1})
    assert made.choices[0].message.content == "5"


SCHEMA = {"type": "object", "description": "a" * 3200}
PARTS = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "b" * 3200})}}


@pytest.mark.parametrize(
    ("request_more", "length"),
    [
        ({"messages": [{"role": "user", "content": "a" * 3200}]}, r"\d+ characters"),
        ({"tools": [tool(parameters=SCHEMA)]}, r"\d+ characters"),
        ({"tools": [tool(parameters=PARTS)]}, r"\d+ characters"),
        ({"tools": [tool(parameters={**SCHEMA, "url": "data:image/png;base64," + "a" * 3200})]}, r"\d+ characters"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]}, r"\d+ characters"),
        ({"messages": [{"role": "user", "content": "a", "name": "b" * 3200}]}, r"\d+ characters"),
        ({"messages": [{"role": "user", "content": "a"}] * 101}, "101 messages"),
        ({"messages": [{"role": "user", "content": "a"}] * 1000}, r"\d+ bytes without its images"),
        ({"messages": [USER], "metadata": {"a": "b" * 20_000}}, r"\d+ bytes without its images"),
    ],
)
def test_what_no_tokenizer_makes_short_enough_is_refused_unread(monkeypatch, request_more, length):
    def initial_ids(*_):
        raise AssertionError("it was read")

    monkeypatch.setattr(type(CHAT), "initial_ids", initial_ids)

    async def work(stage):
        request = {"messages": [USER], **request_more}
        error = await refused(stage.chat(request.pop("messages"), **request))
        return error, stage.session.trajectories()

    error, [trajectory] = talk(work, [], prompt_length=60, response_length=40)
    assert (error.code, trajectory.stop_reason) == (TOO_LONG, StopReason.PROMPT_TOO_LONG)
    assert re.search(f"these messages have {length}\\.$", error.body["message"])


@pytest.mark.parametrize("content", ["a" * 2500, "\x01" * 2000])
def test_what_may_fit_is_counted_in_tokens_only(content):
    """Characters that JSON writes as six included."""

    async def work(stage):
        return await refused(stage.chat([{"role": "user", "content": content}]))

    error = talk(work, [], prompt_length=60, response_length=40)
    assert error.code == TOO_LONG
    assert not re.search("characters|bytes", error.body["message"])


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [EngineError("out of memory"), RuntimeError("a bug")])
def test_a_failing_engine_is_no_fault_of_the_request(failure):
    class Failing(Recorder):
        async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
            if request_id.endswith("#1"):
                raise failure
            await asyncio.sleep(0.2)
            return await super().generate(request_id, prompt_ids, sampling_params)

    async def work(stage):
        error = await refused(stage.chat([USER], n=3))
        assert stage.session.in_flight == 0
        return error, await stage.session.broken, stage.session.trajectories()

    error, broken, [trajectory] = talk(work, engine=Failing(lambda *_: says("5")))
    assert error.status_code == (503 if isinstance(failure, EngineError) else 500)
    assert error.code == "engine_failed"
    assert error.response.headers["x-should-retry"] == "false"
    assert broken is failure
    assert trajectory.segments == []


def open_requests(engine):
    return [name for name, row in engine._rows.items() if row.request is not None]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("hang_up", ["cancelled", "closed"])
def test_a_client_that_leaves_ends_its_request(n, hang_up):
    async def work(stage):
        engine = stage.engine
        body = {"model": "m", "messages": [USER], "n": n, "max_tokens": 800}
        if hang_up == "cancelled":
            task = asyncio.ensure_future(stage.chat([USER], n=n, max_tokens=800))
            await until_async(lambda: len(open_requests(engine)) == n)
            task.cancel()
        else:
            host, _, rest = stage.url.removeprefix("http://").partition("/")
            _, writer = await asyncio.open_connection(*host.split(":"))
            text = json.dumps(body).encode()
            head = f"POST /{rest}/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {stage.key}\r\n"
            writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
            await until_async(lambda: len(open_requests(engine)) == n)
            writer.close()
        await until_async(lambda: not open_requests(engine) and not stage.session.in_flight)
        assert list(engine._rows) == ["s"]
        assert stage.session.trajectories()[0].segments == []
        made = await stage.chat([USER], max_tokens=4)  # and the session goes on
        return made.usage.completion_tokens

    assert talk(work, engine=native(), response_length=900, prompt_length=100) == 4


def test_closing_a_session_ends_what_is_under_way():
    async def work(stage):
        task = asyncio.ensure_future(refused(stage.chat([USER], n=2, max_tokens=800)))
        await until_async(lambda: len(open_requests(stage.engine)) == 2)
        await stage.session.close()
        assert open_requests(stage.engine) == []
        return (await task).code

    assert talk(work, engine=native(), response_length=900) == "session_not_found"


def test_what_was_sampled_when_the_session_ended_is_not_recorded():
    async def work(stage):
        asking = asyncio.ensure_future(refused(stage.chat([USER])))
        await until_async(lambda: stage.session.in_flight)
        [sampling] = stage.session._at_work
        sampling.add_done_callback(lambda _: stage.session.end())
        return (await asking).code, stage.session.tree.turns

    assert talk(work, engine=Recorder(lambda *_: says("5"), latency=0.05)) == ("session_not_found", [])


def test_a_request_has_a_time_limit_where_the_trajectory_has_none():
    async def work(stage):
        error = await refused(stage.chat([USER], n=2, max_tokens=800))
        assert open_requests(stage.engine) == []
        return error

    rules = SessionRules(request_seconds=0.05)
    error = talk(work, engine=native(), rules=rules, response_length=900)
    assert (error.status_code, error.code) == (504, "timeout")


def test_rewards_are_numbers_for_a_turn():
    async def work(stage):
        post = partial(post_reward, stage.url, stage.key)
        early = await post({"reward": 1.0})
        assert early[0] == 400
        assert "no turn yet" in early[1]["error"]["message"]
        first = (await stage.chat([USER])).choices[0]
        assert await post({"reward": 0.25, "name": "env"}) == (200, {"rewards": 1})
        for wrong in ({}, {"reward": "1"}, {"reward": [1]}, {"reward": 1, "rewrad": 2}, [], {"reward": 1, "name": 3}):
            assert (await post(wrong))[0] == 400, wrong
        await stage.chat([USER, answer(first), USER])
        await post({"reward": -1})
        return stage.session.trajectories()

    [trajectory] = talk(work, [says("5"), says("6")])
    assert trajectory.rewards.steps == [(0, "env", 0.25), (1, "agent", -1.0)]


def test_rewards_are_bounded(monkeypatch):
    monkeypatch.setattr("etude.agents.gateway.session.MOST_REWARDS", 2)

    async def work(stage):
        await stage.chat([USER])
        for _ in range(2):
            stage.session.reward({"reward": 1})
        with pytest.raises(GatewayError, match="2 rewards are used up"):
            stage.session.reward({"reward": 1})

    talk(work, [says("5")])


# -- budgets of turn, trajectory and window -----------------------------------------------------------------------


async def hear_refusal(stage, messages, **more):
    with pytest.raises(openai.BadRequestError) as caught:
        await stage.chat(messages, **more)
    return caught.value.code


def test_a_turn_that_its_budget_cuts_ends_the_rollout_only_where_it_is_the_last():
    async def work(stage):
        first = (await stage.chat([USER])).choices[0]
        assert first.finish_reason == "length"
        cut = stage.session.trajectories()[-1].stop_reason
        await stage.chat([USER, answer(first), USER])
        return cut.value, stage.session.trajectories()[-1].stop_reason.value

    turns = [says("The answer is five."), says("5")]
    assert talk(work, turns, multi_turn={"max_turn_tokens": 3}) == ("turn_length", "completed")


def test_a_turn_that_its_own_request_cuts_is_no_complete_answer():
    async def work(stage):
        for most in (3, 64):
            reason = (await stage.chat([USER], max_tokens=most)).choices[0].finish_reason
            yield reason, stage.session.trajectories()[-1].stop_reason.value

    async def both(stage):
        return [each async for each in work(stage)]

    turns = [says("The answer is five."), says("5")]
    assert talk(both, turns) == [("length", "turn_length"), ("stop", "completed")]


def test_the_budget_of_a_rollout_counts_what_all_its_sequences_sample():
    ids = says("five")

    async def work(stage):
        await stage.chat([USER])
        other = USER | {"content": "Once more"}
        cut = (await stage.chat([other])).choices[0].finish_reason
        code = await hear_refusal(stage, [USER])
        return cut, code, [(t.stop_reason.value, t.response_length) for t in stage.session.trajectories()]

    limits = {"max_trajectory_tokens": 2 * len(ids) - 1}
    found = talk(work, lambda *_: ids, multi_turn=limits)
    assert found == ("length", "trajectory_length", [("completed", len(ids)), ("trajectory_length", len(ids) - 1)])


def test_malformed_calls_in_a_row_end_a_conversation():
    broken = says('<tool_call>\n{"name": "echo"\n</tool_call>')

    async def work(stage):
        history = [USER]
        for _ in range(2):
            made = (await stage.chat(history, tools=[ECHO])).choices[0]
            history = [*history, answer(made), USER]
        code = await hear_refusal(stage, history, tools=[ECHO])
        return code, stage.session.trajectories()[-1].stop_reason.value

    limits = {"max_consecutive_malformed_calls": 2}
    assert talk(work, lambda *_: broken, multi_turn=limits) == ("max_malformed_calls", "max_malformed_calls")


# -- sessions that are made on a request ---------------------------------------------------------------------------


@pytest.fixture
def gateway():
    """(client of an app that makes up to two sessions, the names of those that ended)."""
    ended = []
    engine = Recorder(lambda *_: says("5"))
    store = SessionStore(
        max_sessions=2, make=lambda name: session(engine, name=name), on_end=lambda each: ended.append(each.name)
    )
    with TestClient(create_app(store, TOKENIZER, export=lambda each: [each.name.encode()])) as client:
        yield client, ended


def test_only_a_chat_that_can_be_read_begins_a_session(gateway):
    client, ended = gateway
    for wrong in (
        client.get("/s/a/rollout"),
        client.post("/s/a/end"),
        client.post("/s/a/reward", json={"reward": 1}),
    ):
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "session_not_found")
    assert client.post("/s/a/v1/chat/completions", json={"messages": []}).status_code == 400
    assert client.post("/v1/chat/completions", json={"messages": []}).status_code == 400
    assert client.get("/health").json()["sessions"] == 0
    assert client.post("/s/a/v1/chat/completions", json={"messages": [USER]}).status_code == 200
    assert client.get("/s/a/rollout").content == b"a"
    assert client.post("/s/a/end").content == b"a"
    assert client.post("/s/a/end").status_code == 404
    assert ended == ["a"]


def test_a_wrong_base_url_is_told_what_base_urls_are(gateway):
    client, _ = gateway
    wrong = client.post("/s/a/chat/completions", json={"messages": [USER]})
    assert wrong.status_code == 404
    assert "base URLs end in /s/NAME/v1" in wrong.json()["error"]["message"]
    anthropic = client.post("/s/a/v1/v1/messages", json={"messages": [USER]}).json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "not_found_error")


def test_a_session_ends_once_and_leaves_its_successor_alone():
    ended = []
    engine = Recorder(lambda *_: says("5"))

    async def main():
        store = SessionStore(make=lambda name: session(engine, name=name), on_end=ended.append)
        first = store.get_or_make("a", "")
        store.end(first)
        second = store.get_or_make("a", "")
        store.end(first)
        assert store.get("a", "") is second
        store.end_all()
        store.end_all()
        return first, second

    first, second = asyncio.run(main())
    assert ended == [first, second]


def test_a_single_request_that_is_streamed_ends_its_session_with_the_stream(gateway):
    client, ended = gateway
    for path, body in (("chat/completions", {"messages": [USER]}), ("responses", {"input": "Hi"})):
        with client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as response:
            assert "5" in "".join(response.iter_text())
        assert response.headers["content-type"].startswith("text/event-stream")
    assert client.post("/v1/chat/completions", json={"messages": [], "stream": True}).status_code == 400
    assert client.get("/health").json()["sessions"] == 0
    assert [name.startswith("single-") for name in ended] == [True, True]


def test_single_requests_count_as_sessions(gateway):
    client, ended = gateway
    for name in ("a", "b"):
        assert client.post("/v1/chat/completions", json={"messages": [USER]}).status_code == 200
        assert client.post(f"/s/{name}/v1/chat/completions", json={"messages": [USER]}).status_code == 200
    full = client.post("/v1/chat/completions", json={"messages": [USER]})
    assert (full.status_code, full.headers["x-should-retry"]) == (429, "true")
    assert client.post("/s/c/v1/chat/completions", json={"messages": [USER]}).status_code == 429
    assert client.post("/s/a/v1/chat/completions", json={"messages": [USER]}).status_code == 200
    assert len(ended) == 2
    assert all(name.startswith("single-") for name in ended)


# -- the server inside a worker ------------------------------------------------------------------------------------


def test_the_server_is_there_as_long_as_a_session_is():
    async def main():
        gateway = LocalGateway.here()
        async with served(Recorder([says("5")])) as one:
            async with served(Recorder([says("6")]), name="t") as two:
                assert one.root == two.root
                assert (await two.chat([USER])).choices[0].message.content == "6"
            assert (await one.chat([USER])).choices[0].message.content == "5"
        assert gateway._server is None
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", int(one.root.rpartition(":")[2]))
        async with served(Recorder([says("7")])) as three:
            return (await three.chat([USER])).choices[0].message.content

    assert asyncio.run(main()) == "7"
