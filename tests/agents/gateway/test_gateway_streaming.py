"""`stream=True` in every interface: the events add up to the answer, the recording is that of the same request without a
stream, a long turn is kept alive, and a client that hangs up ends its request."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
from agents_stage import CHAT, TOKENIZER, Recorder, call, says
from gateway_stage import ECHO, USER, answer, native, talk
from test_gateway_answers import joined
from test_gateway_dialects import MESSAGES_ECHO, RESPONSES_ECHO, TURNS, anthropics
from wait_stage import until_async

from etude.agents.gateway import server

PATHS = {
    "chat/completions": {"messages": [USER]},
    "responses": {"input": [USER]},
    "messages": {"max_tokens": 64, "messages": [USER]},
}


class Gated(Recorder):
    """Answers once the test opens its gate."""

    def __init__(self, script):
        super().__init__(script)
        self.gate, self.ended = asyncio.Event(), False

    async def generate(self, *given, **more):
        try:
            await self.gate.wait()
            return await super().generate(*given, **more)
        finally:
            self.ended = True


@pytest.fixture
def impatient(monkeypatch):
    """Every turn takes long."""
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.05)


def streaming(client, stage, path):
    body = {"model": "any", "stream": True, **PATHS[path]}
    return client.stream("POST", f"{stage.url}/{path}", json=body, headers={"authorization": f"Bearer {stage.key}"})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("impatient")
def test_a_long_turn_is_kept_alive_and_then_arrives_whole(path):
    async def work(stage):
        async with httpx.AsyncClient(timeout=30) as client, streaming(client, stage, path) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = []
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(lines[0]) == 3:
                    stage.engine.gate.set()
        assert lines[0].startswith(":")
        events = [line for line in lines if line and not line.startswith(":")]
        texts = [line for line in events if "The answer is 5." in line and "elta" in line]
        assert texts
        assert not any(line.startswith(":") for line in lines[lines.index(events[0]) :])
        assert len(stage.session.tree.turns) == 1

    talk(work, engine=Gated([says("The answer is 5.")]))


@pytest.mark.usefixtures("impatient")
def test_real_clients_wait_for_a_long_turn():
    async def work(stage):
        asyncio.get_running_loop().call_later(0.3, stage.engine.gate.set)
        messages, reasons, *_ = await joined(await stage.chat([USER], stream=True))
        assert (messages[0]["content"], reasons) == ("The answer is 5.", {0: "stop"})
        stage.engine.gate.clear()
        asyncio.get_running_loop().call_later(0.3, stage.engine.gate.set)
        async with stage.client.responses.stream(model="any", input=[USER]) as stream:
            assert (await stream.get_final_response()).output_text == "The answer is 5."
        stage.engine.gate.clear()
        asyncio.get_running_loop().call_later(0.3, stage.engine.gate.set)
        async with (
            anthropics(stage) as client,
            client.messages.stream(model="any", max_tokens=64, messages=[USER]) as stream,
        ):
            assert (await stream.get_final_message()).content[0].text == "The answer is 5."

    talk(work, engine=Gated(lambda *_: says("The answer is 5.")))


def conversation(stream):
    """A conversation with thoughts, several sampled turns and a tool's answer, over the real engine."""

    async def work(stage):
        messages = [USER]
        for _ in range(3):
            given = {"max_tokens": 24, "tools": [ECHO], "seed": 7}
            if stream:
                made, *_ = await joined(await stage.chat(messages, stream=True, **given))
                said = {"role": "assistant", "content": made[0]["content"]}
                assert not made[0]["calls"]
            else:
                said = answer((await stage.chat(messages, **given)).choices[0])
            messages = [*messages, said, USER]
        [trajectory] = stage.session.trajectories()
        return trajectory, messages

    return talk(work, engine=native())


def test_a_streamed_rollout_is_the_one_that_is_not_streamed():
    (one, said), (two, told) = conversation(False), conversation(True)
    assert [m["content"] or "" for m in said] == [m["content"] for m in told]
    assert (one.prompt_ids, one.response_ids, one.response_mask) == (
        two.prompt_ids,
        two.response_ids,
        two.response_mask,
    )
    assert [s.log_probs for s in one.segments] == [s.log_probs for s in two.segments]
    assert one.assistant_turns == two.assistant_turns == 3


@pytest.mark.parametrize("choices", [1, 3])
def test_random_turns_of_the_real_engine_join_to_their_message(choices):
    """Untrained weights draw broken characters, tags and white space."""

    async def work(stage):
        given = {"max_tokens": 40, "n": choices, "seed": 3, "tools": [ECHO]}
        whole = await stage.chat([USER], **given)
        messages, reasons, *_ = await joined(await stage.chat([USER], stream=True, **given))
        for choice in whole.choices:
            assert messages[choice.index]["content"] == (choice.message.content or "")
            assert reasons[choice.index] == choice.finish_reason

    for temperature in (0.5, 1.0, 2.0):
        talk(work, engine=native(), temperature=temperature)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\nSo: <tool_call>{", "Hm.", "So: <tool_call>{"),
        ("Hm.</think>So", "Hm.", "So"),
        ("<think>a</think>b<think>c</think>d", "a\nc", "bd"),
        ("<think>cut", "cut", ""),
        ("a <tool_call>x</tool_call> b", "", "a <tool_call>x</tool_call> b"),
        ("日本語 🙂🙃 é", "", "日本語 🙂🙃 é"),
    ],
)
def test_odd_turns_are_the_same_streamed_or_not(text, reasoning, content):
    async def work(stage):
        whole = (await stage.chat([USER], tools=[ECHO])).choices[0].message
        assert (getattr(whole, "reasoning_content", None) or "", whole.content or "") == (reasoning, content)
        messages, *_ = await joined(await stage.chat([USER], tools=[ECHO], stream=True))
        assert (messages[0]["reasoning"], messages[0]["content"]) == (reasoning, content)
        async with anthropics(stage) as client:
            asked = {"model": "any", "max_tokens": 64, "messages": [USER], "tools": [MESSAGES_ECHO]}
            async with client.messages.stream(**asked) as stream:
                blocks = (await stream.get_final_message()).content
        assert "".join(each.text for each in blocks if each.type == "text") == content
        assert "\n".join(each.thinking for each in blocks if each.type == "thinking") == reasoning
        asked = {"model": "any", "input": [USER], "tools": [RESPONSES_ECHO]}
        async with stage.client.responses.stream(**asked) as stream:
            response = await stream.get_final_response()
        assert response.output_text == content
        assert len({item.id for item in response.output}) == len(response.output)

    talk(work, lambda *_: says(text))


def test_a_thought_that_the_prompt_opens_is_one_however_it_ends():
    class Thinking(type(CHAT)):
        def initial_ids(self, *given):
            return [*super().initial_ids(*given), *TOKENIZER("<think>\n", add_special_tokens=False)["input_ids"]]

    chat = Thinking.__new__(Thinking)
    chat.__dict__.update(CHAT.__dict__)

    async def work(stage):
        whole = (await stage.chat([USER], tools=[ECHO])).choices[0].message
        messages, *_ = await joined(await stage.chat([USER], tools=[ECHO], stream=True))
        assert (whole.content or "", getattr(whole, "reasoning_content", "")) == (
            messages[0]["content"],
            messages[0]["reasoning"],
        )
        return messages[0]["reasoning"], messages[0]["content"], len(messages[0]["calls"])

    def read(text):
        return talk(work, lambda *_: says(text), chat=chat)

    assert read("Hm.\n</think>\n\nFive.") == ("Hm.", "Five.", 0)
    assert read("Hm. And") == ("Hm. And", "", 0)
    assert read("Hm. " + call(text="a")) == ("Hm.", "", 1)
    assert read("</think>Well. " + call(text="a")) == ("", "Well.", 1)
    assert read("Hm. <tool_call>{") == ("Hm.", "<tool_call>{", 0)
    assert read("Hm.</think>So <tool_call>{") == ("Hm.", "So <tool_call>{", 0)


def test_a_text_of_stop_does_not_go_out():
    async def work(stage):
        whole = (await stage.chat([USER], stop=["is 5", "."])).choices[0].message.content
        messages, *_ = await joined(await stage.chat([USER], stop=["is 5", "."], stream=True))
        return whole, messages[0]["content"]

    assert talk(work, lambda *_: says("The answer is 5. Yes.")) == ("The answer", "The answer")
    assert talk(work, lambda *_: says("The answer is so")) == ("The answer is so", "The answer is so")


# -- endings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("impatient")
def test_a_client_that_hangs_up_midway_ends_its_request(path):
    async def work(stage):
        async with httpx.AsyncClient(timeout=30) as client, streaming(client, stage, path) as response:
            async for _ in response.aiter_lines():
                break
            assert not stage.engine.ended
        await until_async(lambda: stage.engine.ended and not stage.session.in_flight)
        assert not stage.session.tree.turns
        assert not stage.session.broken.done()

    talk(work, engine=Gated(lambda *_: says("The answer is 5.")))


@pytest.mark.usefixtures("impatient")
def test_an_engine_that_fails_midway_is_an_error_in_the_stream():
    async def work(stage):
        def late():
            stage.engine.gate.clear()
            asyncio.get_running_loop().call_later(0.3, stage.engine.gate.set)

        late()
        with pytest.raises(openai.APIError, match="out of memory"):
            await joined(await stage.chat([USER], stream=True))
        late()
        with pytest.raises(openai.APIError, match="out of memory"):
            [_ async for _ in await stage.client.responses.create(model="any", input=[USER], stream=True)]
        late()
        async with anthropics(stage) as client:
            given = {"model": "any", "max_tokens": 64, "messages": [USER]}
            with pytest.raises(anthropic.APIError, match="out of memory"):
                [_ async for _ in await client.messages.create(stream=True, **given)]
        assert stage.session.broken.done()
        assert not stage.session.tree.turns

    talk(work, engine=Gated(lambda *_: RuntimeError("out of memory")))


def test_what_fails_at_once_is_an_answer_of_its_own():
    async def work(stage):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await stage.chat([USER | {"content": "x " * 5000}], stream=True)
        with pytest.raises(openai.APIStatusError) as caught:
            await stage.chat([USER], stream=True)
        assert caught.value.status_code == 503

    talk(work, lambda *_: ConnectionError("gone"))


def test_a_streamed_response_can_be_continued():
    async def work(stage):
        response = await stage.client.responses.create(model="any", input="Hi", stream=True)
        last = [event async for event in response][-1].response
        assert set(stage.session.replies) == {last.id}
        again = await stage.client.responses.create(model="any", input="More", previous_response_id=last.id)
        assert again.output_text == "five"

    talk(work, lambda *_: says("five"))


def test_calls_of_a_stream_continue_the_conversation():
    async def work(stage):
        made, *_ = await joined(await stage.chat([USER], tools=[ECHO], stream=True))
        [[name, _, arguments]] = made[0]["calls"]
        assert json.loads(arguments) == {"text": "fünf"}
        calls = [{"id": name, "type": "function", "function": {"name": "echo", "arguments": arguments}}]
        said = {"role": "assistant", "content": made[0]["content"], "tool_calls": calls}
        given = {"role": "tool", "tool_call_id": name, "content": "five"}
        await joined(await stage.chat([USER, said, given], tools=[ECHO], stream=True))
        return stage.session.trajectories()

    [trajectory] = talk(work, TURNS)
    assert [(c.name, c.response) for c in trajectory.tool_calls] == [("echo", "five")]
