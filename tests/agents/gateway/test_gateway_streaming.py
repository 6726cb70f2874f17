"""Tokens go out as the engine draws them, in every interface, and nothing else changes: the pieces join to the answer, the
recording is that of the same request without a stream, and a client that hangs up ends its request."""

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

from etude.agents.gateway.streaming import LiveAnswer
from etude.agents.gateway.wire import ChatRequest
from etude.chat import HermesToolParser
from etude.errors import EtudeError
from etude.inference import SamplingParams, TokenOutput


class Gated(Recorder):
    """Draws a token each time that the test allows one more."""

    def __init__(self, script):
        super().__init__(script)
        self.allowed, self.ended = asyncio.Semaphore(0), False

    async def generate(self, request_id, prompt_ids, sampling_params, *, images=None, on_tokens=None):
        params, made = SamplingParams.of(sampling_params), []
        turn = self._turns[request_id]
        self._turns[request_id] += 1
        try:
            for token in self._script(request_id, list(prompt_ids), turn)[: params.max_tokens]:
                await self.allowed.acquire()
                if isinstance(token, Exception):
                    raise token
                made.append(token)
                if on_tokens is not None:
                    on_tokens([token])
        finally:
            self.ended = True
        return TokenOutput(made, [0.0] * len(made), "stop", [0] * len(made))

    def allow(self, count=1):
        for _ in range(count):
            self.allowed.release()


async def next_of(stream, wanted):
    """The next piece of a stream that `wanted` finds in an event."""
    async for event in stream:
        if piece := wanted(event):
            return piece
    raise AssertionError("the stream has ended")


def text_of_chunk(chunk):
    return chunk.choices and chunk.choices[0].delta.content


def test_words_arrive_while_the_rest_is_not_drawn_yet():
    ids = says("The answer is 5.")

    async def work(stage):
        asking = asyncio.ensure_future(stage.chat([USER], stream=True))
        stage.engine.allow()
        stream = await asking
        text = await next_of(stream, text_of_chunk)
        assert TOKENIZER.decode(ids).startswith(text)
        assert not stage.session.recording.turns
        stage.engine.allow(len(ids))
        messages, reasons, *_ = await joined(stream)
        assert text + messages[0]["content"] == "The answer is 5."
        assert reasons == {0: "stop"}
        assert len(stage.session.recording.turns) == 1

    talk(work, engine=Gated([ids]))


def test_every_interface_sends_its_first_words_before_the_turn_is_drawn():
    ids = says("The answer is 5.")

    async def work(stage):
        async def first(asking, wanted):
            stage.engine.allow()
            stream = await asking
            piece = await next_of(stream, wanted)
            stage.engine.allow(len(ids) - 1)
            return piece, [event async for event in stream][-1]

        asking = stage.client.responses.create(model="any", input=[USER], stream=True)
        piece, last = await first(asking, lambda event: event.type == "response.output_text.delta" and event.delta)
        assert "The answer is 5.".startswith(piece)
        assert (last.response.output_text, last.response.usage.output_tokens) == ("The answer is 5.", len(ids))
        async with anthropics(stage) as client:
            asking = client.messages.create(model="any", max_tokens=64, messages=[USER], stream=True)
            piece, _ = await first(asking, lambda event: event.type == "content_block_delta" and event.delta.text)
            assert "The answer is 5.".startswith(piece)

    talk(work, engine=Gated(lambda *_: ids))


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
    """Untrained weights draw broken characters, tags and white space; each turn is compared by its ids."""

    async def work(stage):
        given = {"max_tokens": 40, "n": choices, "seed": 3, "tools": [ECHO]}
        whole = await stage.chat([USER], **given)
        messages, reasons, _, chunks = await joined(await stage.chat([USER], stream=True, **given))
        for choice in whole.choices:
            assert messages[choice.index]["content"] == (choice.message.content or "")
            assert reasons[choice.index] == choice.finish_reason
        assert chunks > 3 * choices

    for temperature in (0.5, 1.0, 2.0):
        talk(work, engine=native(), temperature=temperature)


def test_calls_are_held_until_they_are_certain():
    ids = TURNS[0]

    async def work(stage):
        asking = asyncio.ensure_future(stage.chat([USER], stream=True, tools=[ECHO]))
        stage.engine.allow(len(ids) - 1)
        stream = await asking
        assert await next_of(stream, text_of_chunk) == "Well."
        stage.engine.allow()
        messages, reasons, *_ = await joined(stream)
        [[_, name, arguments]] = messages[0]["calls"]
        assert (name, json.loads(arguments), messages[0]["content"]) == ("echo", {"text": "fünf"}, "")
        assert reasons == {0: "tool_calls"}

    talk(work, engine=Gated([ids]))


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\nSo: <tool_call>{", "Hm.", "So: <tool_call>{"),
        ("Hm.</think>So", "", "Hm.</think>So"),
        ("<think>a</think>b<think>c</think>d", "a\nc", "bd"),
        ("<think>cut", "cut", ""),
        ("a <tool_call>x</tool_call> b", "", "a <tool_call>x</tool_call> b"),
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
        assert "\n".join(each.thinking.strip() for each in blocks if each.type == "thinking") == reasoning
        asked = {"model": "any", "input": [USER], "tools": [RESPONSES_ECHO]}
        async with stage.client.responses.stream(**asked) as stream:
            response = await stream.get_final_response()
        assert response.output_text == content
        assert len({item.id for item in response.output}) == len(response.output)

    talk(work, lambda *_: says(text))


def test_a_thought_that_the_prompt_opens_is_streamed_as_one():
    class Thinking(type(CHAT)):
        def initial_ids(self, *given):
            return [*super().initial_ids(*given), *TOKENIZER("<think>\n", add_special_tokens=False)["input_ids"]]

    chat = Thinking.__new__(Thinking)
    chat.__dict__.update(CHAT.__dict__)

    async def work(stage):
        whole = (await stage.chat([USER])).choices[0].message
        messages, *_ = await joined(await stage.chat([USER], stream=True))
        return whole.reasoning_content, whole.content, messages[0]["reasoning"], messages[0]["content"]

    found = talk(work, lambda *_: says("Hm.\n</think>\n\nFive."), chat=chat)
    assert found == ("Hm.", "Five.", "Hm.", "Five.")
    cut = talk(work, lambda *_: says("Hm. And"), chat=chat)
    assert cut == ("Hm. And", None, "Hm. And", "")


def test_a_text_of_stop_does_not_go_out():
    async def work(stage):
        whole = (await stage.chat([USER], stop=["is 5", "."])).choices[0].message.content
        messages, *_ = await joined(await stage.chat([USER], stop=["is 5", "."], stream=True))
        return whole, messages[0]["content"]

    assert talk(work, lambda *_: says("The answer is 5. Yes.")) == ("The answer", "The answer")
    assert talk(work, lambda *_: says("The answer is so")) == ("The answer is so", "The answer is so")


def test_no_piece_ends_within_a_character():
    """Each piece is valid by itself, though these characters are several tokens each."""

    async def work(stage):
        pieces = []
        async for chunk in await stage.chat([USER], stream=True):
            pieces += [piece] if (piece := text_of_chunk(chunk)) else []
        return pieces

    pieces = talk(work, lambda *_: says("日本語 🙂🙃 é"))
    assert "".join(pieces) == "日本語 🙂🙃 é"
    assert len(pieces) > 3
    assert not any("\ufffd" in piece for piece in pieces)


def test_broken_bytes_are_bounded_work():
    broken = TOKENIZER("日", add_special_tokens=False)["input_ids"][0]
    assert TOKENIZER.decode([broken]) == "\ufffd"
    given = [broken] * 200

    async def work(stage):
        whole = (await stage.chat([USER])).choices[0].message.content
        messages, *_ = await joined(await stage.chat([USER], stream=True))
        return whole, messages[0]["content"]

    whole, content = talk(work, lambda *_: given)
    assert content == whole
    assert set(whole) == {"\ufffd"}


# -- endings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_client_that_hangs_up_midway_ends_its_request(path):
    body = {"model": "any", "stream": True, "max_tokens": 64, "messages": [USER]}
    if path == "responses":
        body = {"model": "any", "stream": True, "input": [USER]}

    async def work(stage):
        headers = {"authorization": f"Bearer {stage.key}"}
        stage.engine.allow(2)
        async with (
            httpx.AsyncClient(timeout=30) as client,
            client.stream("POST", f"{stage.url}/{path}", json=body, headers=headers) as response,
        ):
            async for line in response.aiter_lines():
                if "The" in line:
                    break
            assert not stage.engine.ended
        await until_async(lambda: stage.engine.ended and not stage.session.in_flight)
        assert not stage.session.recording.turns
        assert not stage.session.broken.done()

    talk(work, engine=Gated(lambda *_: says("The answer is 5.")))


def test_an_engine_that_fails_midway_is_an_error_in_the_stream():
    ids = [*says("The answer")[:3], RuntimeError("out of memory"), *says("never")]

    async def work(stage):
        stage.engine.allow(100)
        with pytest.raises(openai.APIError, match="RuntimeError: out of memory"):
            await joined(await stage.chat([USER], stream=True))
        with pytest.raises(openai.APIError, match="out of memory"):
            [_ async for _ in await stage.client.responses.create(model="any", input=[USER], stream=True)]
        async with anthropics(stage) as client:
            given = {"model": "any", "max_tokens": 64, "messages": [USER]}
            with pytest.raises(anthropic.APIError, match="out of memory"):
                [_ async for _ in await client.messages.create(stream=True, **given)]
        assert stage.session.broken.done()
        assert not stage.session.recording.turns

    talk(work, engine=Gated(lambda *_: ids))


def test_what_fails_before_the_first_token_is_an_answer_of_its_own():
    async def work(stage):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await stage.chat([USER | {"content": "x " * 5000}], stream=True)
        with pytest.raises(openai.APIStatusError) as caught:
            await stage.chat([USER], stream=True)
        assert caught.value.status_code == 503

    talk(work, lambda *_: ConnectionError("gone"))


def test_a_streamed_response_can_be_continued():
    async def work(stage):
        stage.engine.allow(100)
        response = await stage.client.responses.create(model="any", input="Hi", stream=True)
        last = [event async for event in response][-1].response
        assert set(stage.session.replies) == {last.id}
        again = await stage.client.responses.create(model="any", input="More", previous_response_id=last.id)
        assert again.output_text == "five"

    talk(work, engine=Gated(lambda *_: says("five")))


def test_an_engine_that_does_not_tell_is_streamed_at_the_end():
    class Silent(Recorder):
        async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
            return await super().generate(request_id, prompt_ids, sampling_params)

    async def work(stage):
        messages, *_ = await joined(await stage.chat([USER], stream=True))
        return messages[0]["content"]

    assert talk(work, engine=Silent([says("It is five.")])) == "It is five."


def test_a_turn_that_was_told_otherwise_than_it_is_read_fails():
    live = LiveAnswer()
    asked = type("RenderedRequest", (), {"request": ChatRequest(messages=[USER])})()
    [take] = live.begin(asked, HermesToolParser(TOKENIZER), False)
    take(TOKENIZER("five ", add_special_tokens=False)["input_ids"])
    assert [text for _, _, text in live.pieces()] == ["five"]
    turn = type("Turn", (), {"message": {"content": "six"}})()
    with pytest.raises(EtudeError, match="does not begin with what was sent of it: 'five'"):
        list(live.remaining([turn]))


def test_calls_of_a_stream_continue_the_conversation():
    async def work(stage):
        made, *_ = await joined(await stage.chat([USER], tools=[ECHO], stream=True))
        [[name, *_]] = made[0]["calls"]
        calls = [{"id": name, "type": "function", "function": {"name": "echo", "arguments": made[0]["calls"][0][2]}}]
        said = {"role": "assistant", "content": made[0]["content"], "tool_calls": calls}
        given = {"role": "tool", "tool_call_id": name, "content": "five"}
        await joined(await stage.chat([USER, said, given], tools=[ECHO], stream=True))
        return stage.session.trajectories()

    [trajectory] = talk(work, [says("Well. " + call(text="fünf")), says("It is five.")])
    assert [(c.name, c.response) for c in trajectory.tool_calls] == [("echo", "five")]
