"""The interfaces beside chat completions, as the real `openai` and `anthropic` clients ask them: the same conversation, the
same recording."""

import asyncio
import base64
import json

import anthropic
import httpx
import openai
import pytest
from agents_stage import CHAT, Recorder, call, says
from gateway_stage import ECHO, PATIENCE, USER, talk

from etude.agents.gateway.messages_api import MESSAGES
from etude.agents.gateway.request import GatewayError, read_request
from etude.agents.gateway.responses_api import RESPONSES

PARAMETERS = ECHO["function"]["parameters"]
RESPONSES_ECHO = {"type": "function", "name": "echo", "description": "Repeats a text.", "parameters": PARAMETERS}
MESSAGES_ECHO = {"name": "echo", "description": "Repeats a text.", "input_schema": PARAMETERS}
TURNS = [says("Well. " + call(text="fünf")), says("It is five.")]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def anthropics(stage):
    return anthropic.AsyncAnthropic(
        base_url=stage.url.removesuffix("/v1"), api_key=stage.key, max_retries=0, timeout=PATIENCE
    )


async def ask_chat(stage):
    first = (await stage.chat([USER], tools=[ECHO])).choices[0].message
    given = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "five"}
    return (await stage.chat([USER, first.model_dump(), given], tools=[ECHO])).choices[0].message.content


async def ask_responses(stage, *, continued=False):
    items = [{"role": "user", "content": [{"type": "input_text", "text": USER["content"]}]}]
    first = await stage.client.responses.create(model="any", input=items, tools=[RESPONSES_ECHO])
    said, made = first.output
    assert (said.type, said.content[0].text, made.type) == ("message", "Well.", "function_call")
    assert (made.name, json.loads(made.arguments), first.status) == ("echo", {"text": "fünf"}, "completed")
    given = {"type": "function_call_output", "call_id": made.call_id, "output": "five"}
    more = {"input": [*items, *(item.model_dump() for item in first.output), given]}
    if continued:
        more = {"input": [given], "previous_response_id": first.id}
    return (await stage.client.responses.create(model="any", tools=[RESPONSES_ECHO], **more)).output_text


async def ask_continued(stage):
    return await ask_responses(stage, continued=True)


async def ask_messages(stage, **more):
    async with anthropics(stage) as client:
        asked = {"model": "any", "max_tokens": 64, "tools": [MESSAGES_ECHO], **more}
        first = await client.messages.create(messages=[USER], **asked)
        said, made = first.content
        assert (said.type, said.text, made.type, first.stop_reason) == ("text", "Well.", "tool_use", "tool_use")
        assert (made.name, made.input) == ("echo", {"text": "fünf"})
        given = {"type": "tool_result", "tool_use_id": made.id, "content": [{"type": "text", "text": "five"}]}
        messages = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [given]}]
        second = await client.messages.create(messages=messages, **asked)
        assert second.stop_reason == "end_turn"
        return second.content[0].text


def test_a_conversation_with_a_tool_is_the_same_sequence_in_every_dialect():
    recorded = []
    for ask in (ask_chat, ask_responses, ask_continued, ask_messages):

        async def work(stage, ask=ask):
            return await ask(stage), stage.session.trajectories(), [ids for _, ids, _ in stage.engine.asked]

        text, [trajectory], asked = talk(work, TURNS)
        assert text == "It is five."
        recorded.append((asked, trajectory.prompt_ids, trajectory.response_ids, trajectory.response_mask))
        assert [(c.name, c.response) for c in trajectory.tool_calls] == [("echo", "five")]
    assert all(each == recorded[0] for each in recorded)
    assert recorded[0][1] == CHAT.initial_ids([USER], [ECHO])


def test_a_session_can_be_asked_in_several():
    async def work(stage):
        first = await stage.client.responses.create(model="any", input=USER["content"], instructions="Be short.")
        history = [
            {"role": "system", "content": "Be short."},
            USER,
            {"role": "assistant", "content": first.output_text},
        ]
        await stage.chat([*history, USER])
        async with anthropics(stage) as client:
            blocks = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
            messages = [*history[1:], USER, {"role": "assistant", "content": "two"}, USER]
            await client.messages.create(model="any", max_tokens=9, system=blocks, messages=messages)
        return stage.session.trajectories()

    [trajectory] = talk(work, [says("one"), says("two"), says("three")])
    assert trajectory.assistant_turns == 3


def test_codex_may_say_what_it_is():
    """What Codex CLI 0.171 sends beside the conversation."""
    told = {"client_metadata": {"x-codex-installation-id": "1"}, "prompt_cache_key": "1", "store": False}

    async def work(stage):
        asked = {"model": "any", "input": "Hi", "include": ["reasoning.encrypted_content"], "extra_body": told}
        return (await stage.client.responses.create(**asked, reasoning={"summary": "auto"})).output_text

    assert talk(work, [says("5")]) == "5"


def test_instructions_do_not_go_on_to_the_next_response():
    async def work(stage):
        first = await stage.client.responses.create(model="any", input="Hi", instructions="Be short.")
        await stage.client.responses.create(model="any", input="Go on", previous_response_id=first.id)
        return stage.engine.asked[1][1]

    asked = talk(work, [says("one"), says("two")])
    said = [("user", "Hi"), ("assistant", "one"), ("user", "Go on")]
    assert asked == CHAT.initial_ids([{"role": role, "content": content} for role, content in said])


def test_a_response_that_is_not_kept_cannot_be_continued():
    async def work(stage):
        first = await stage.client.responses.create(model="any", input="Hi", store=False)
        with pytest.raises(openai.NotFoundError, match="previous_response_id: this session has"):
            await stage.client.responses.create(model="any", input="Go on", previous_response_id=first.id)

    talk(work, [says("one")])


def test_a_history_that_is_sent_again_is_kept_once():
    async def work(stage):
        history = [USER]
        for _ in range(3):
            answer = await stage.client.responses.create(model="any", input=history)
            history += [{"role": "assistant", "content": answer.output_text}, USER]
        return list(stage.session.replies.values())

    first, second, third = talk(work, [says("one"), says("two"), says("three")])
    assert [len(each) for each in (first, second, third)] == [2, 4, 6]
    assert all(old is new for old, new in zip(second, third))


@pytest.mark.parametrize("turn", [*TURNS, says("")])
def test_a_stream_adds_up_to_the_answer(turn):
    async def work(stage):
        asked = {"model": "any", "input": [USER], "tools": [RESPONSES_ECHO]}
        whole = await stage.client.responses.create(**asked)
        async with stage.client.responses.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            summed = await stream.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        items = [
            [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in r.output]
            for r in (whole, summed)
        ]
        for item in items[1]:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        assert items[0] == items[1]
        async with anthropics(stage) as client:
            asked = {"model": "any", "max_tokens": 64, "messages": [USER], "tools": [MESSAGES_ECHO]}
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                summed = await stream.get_final_message()
        blocks = [[block.model_dump(exclude={"id", "parsed_output"}) for block in m.content] for m in (whole, summed)]
        assert blocks[0] == blocks[1]
        assert (whole.stop_reason, whole.usage.output_tokens) == (summed.stop_reason, summed.usage.output_tokens)

    talk(work, [turn] * 4)


def test_thoughts_are_items_and_blocks_that_may_come_back():
    turn = says("<think>\nHm.\n</think>\n\nFive.")

    async def work(stage):
        first = await stage.client.responses.create(model="any", input="Hi")
        assert [item.type for item in first.output] == ["reasoning", "message"]
        assert first.output[0].content[0].text == "Hm."
        items = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in first.output)]
        await stage.client.responses.create(model="any", input=[*items, {"role": "user", "content": "And?"}])
        async with anthropics(stage) as client:
            asked = {"model": "any", "max_tokens": 64}
            made = await client.messages.create(messages=[USER], **asked)
            assert [block.type for block in made.content] == ["thinking", "text"]
            said = {"role": "assistant", "content": made.content}
            await client.messages.create(messages=[USER, said, USER], **asked)
        return stage.session.trajectories()

    earlier, last = talk(work, [turn] * 4)
    assert [each.assistant_turns - each.first_turn for each in (earlier, last)] == [2, 2]


def test_why_a_turn_ended():
    async def work(stage):
        cut = await stage.client.responses.create(model="any", input="Hi", max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        async with anthropics(stage) as client:
            asked = {"model": "any", "messages": [USER]}
            assert (await client.messages.create(max_tokens=2, **asked)).stop_reason == "max_tokens"
            made = await client.messages.create(max_tokens=64, stop_sequences=["so", "then"], **asked)
            assert (made.stop_reason, made.stop_sequence, made.content[0].text) == ("stop_sequence", "then", "Five")

    talk(work, [says("Five then so.")] * 3)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"temprature": 1},
            r"temprature: unknown parameter \(did you mean 'temperature'\?\)|temprature: unknown parameter",
        ),
        ({"background": True}, "background: only False can be kept to"),
        ({"truncation": "auto"}, "truncation: only 'disabled'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: only 'function'"),
        ({"tools": [ECHO]}, "tools.0.name: a function is {'type': 'function', 'name': …"),
        ({"tool_choice": "required"}, "tool_choice forces"),
        ({"text": {"format": {"type": "regex"}}}, "^text.format: its type"),
        ({"text": {"format": {"type": "json_schema"}}}, "^text.format: must be"),
        ({"include": ["file_search_call.results"]}, "include: only"),
        ({"input": []}, "^input: "),
        ({"max_output_tokens": 0}, "^max_output_tokens: "),
        ({"conversation": "c"}, "^conversation: not supported: send previous_response_id"),
        ({"top_logprobs": 2}, "^top_logprobs: not supported: only the sampled tokens"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type: an item of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type: a part of type"),
        ({"input": [{"role": "user", "content": [7]}]}, "input.0.content must be a list of objects"),
        ({"input": 7}, "input must be a list of objects"),
        ({"previous_response_id": {}}, "previous_response_id must be a text"),
    ],
)
def test_what_responses_refuse(more, reason):
    with pytest.raises(GatewayError, match=reason):
        parsed(RESPONSES, {"model": "any", "input": "Hi", **more})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"max_tokens": None}, "max_tokens: it must be given"),
        ({"stop_sequences": [""]}, "^stop_sequences: at most"),
        ({"n": 2}, "n: unknown parameter"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: only tools with an input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice forces"),
        ({"output_config": {"format": {"type": "text"}}}, "^output_config.format: must be"),
        ({"tool_choice": "auto"}, "tool_choice must be an object"),
        ({"tool_choice": {"type": ["auto"]}}, "tool_choice must be an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role must be 'user', 'assistant' or 'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages.0.content.0: only texts, images",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "a block of type 'image' cannot be read",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "beginning \\(prefill\\) is not continued"),
        ({"messages": "Hi"}, "messages must be a list of objects"),
        ({"messages": None}, "messages must be a list of objects"),
        ({"system": [{"type": "text"}]}, "system.0.text must be a text"),
    ],
)
def test_what_messages_refuse(more, reason):
    with pytest.raises(GatewayError, match=reason):
        parsed(MESSAGES, {"model": "any", "max_tokens": 9, "messages": [USER], **more})


def parsed(dialect, body):
    return read_request(json.dumps(body).encode(), 100_000, lambda request: dialect.read(request, {}), dialect.names)


def test_images_and_answers_in_one_message():
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": "five"},
        {"type": "image", "source": source},
        {"type": "text", "text": "And this?"},
    ]
    one = parsed(MESSAGES, {"max_tokens": 9, "messages": [USER, {"role": "user", "content": blocks}]})
    address = f"data:image/png;base64,{PIXEL}"
    parts = [
        {"type": "input_image", "image_url": address, "detail": "auto"},
        {"type": "input_text", "text": "And this?"},
    ]
    items = [
        USER,
        {"type": "function_call_output", "call_id": "a", "output": "five"},
        {"role": "user", "content": parts},
    ]
    two = parsed(RESPONSES, {"input": items})
    assert one.messages[1:] == two.messages[1:]
    assert [message["role"] for message in one.messages] == ["user", "tool", "user"]
    assert one.messages[2]["content"][0] == {"type": "image_url", "image_url": {"url": address}}


def test_an_image_does_not_count_as_text():
    data = base64.b64encode(bytes(300_000)).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [image]}]}
    assert read_request(json.dumps(body).encode(), 100, lambda request: MESSAGES.read(request, {}), {}).messages


def test_errors_have_the_form_of_their_dialect():
    async def work(stage):
        async with anthropics(stage) as client:
            more = {"extra_body": {"top_p": 7.0}}
            with pytest.raises(anthropic.BadRequestError, match="top_p"):
                await client.messages.create(model="any", max_tokens=9, messages=[USER], **more)
        async with httpx.AsyncClient() as client:
            wrong = await client.post(f"{stage.url}/messages", json={}, headers={"x-api-key": "wrong"})
            assert wrong.status_code == 401
            assert wrong.json() == {
                "type": "error",
                "error": {"type": "authentication_error", "message": "the API key is not this session's"},
            }

    talk(work, [])


def test_requests_are_bounded_in_every_dialect():
    async def work(stage):
        long = "x" * 200_000
        async with anthropics(stage) as client:
            with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
                await client.messages.create(model="any", max_tokens=9, messages=[USER | {"content": long}])
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await stage.client.responses.create(model="any", input=long)
        assert isinstance(stage.engine, Recorder)
        assert not stage.engine.asked
        await asyncio.sleep(0)

    talk(work, [])


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_runner_runs_unchanged(stream):
    """It asks for a thread on the server first, and learns that there is none."""

    @anthropic.beta_async_tool
    async def echo(text: str) -> str:
        """Repeats a text.

        Args:
            text: the text
        """
        return f"{text}!"

    async def work(stage):
        async with anthropics(stage) as client:
            runner = client.beta.messages.tool_runner(
                model="m", max_tokens=64, messages=[USER], tools=[echo], stream=stream, container="c"
            )
            said = []
            async for message in runner:
                said.append(await message.get_final_message() if stream else message)
            return said, stage.session.trajectories()

    said, [trajectory] = talk(work, TURNS)
    assert [message.stop_reason for message in said] == ["tool_use", "end_turn"]
    assert trajectory.assistant_turns == 2
    assert [each.response for each in trajectory.tool_calls] == ["fünf!"]


def test_a_thread_that_the_server_should_hold_is_refused_by_name():
    async def work(stage):
        async with anthropics(stage) as client:
            with pytest.raises(anthropic.BadRequestError, match="thread"):
                await client.beta.messages.create(
                    model="m",
                    max_tokens=9,
                    messages=[USER],
                    thread={"type": "continue", "previous_message_id": "msg_1"},
                )

    talk(work, TURNS)


def test_a_system_message_may_stand_among_anthropics_messages():
    """Claude's Agent SDK sends reminders so."""
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}

    async def work(stage):
        async with anthropics(stage) as client:
            asked = {"model": "m", "max_tokens": 64, "extra_body": {"messages": [system, USER]}}
            first = await client.messages.create(messages=[USER], **asked)
            more = [system, USER, {"role": "assistant", "content": first.content[0].text}, system, USER]
            await client.messages.create(messages=[USER], **{**asked, "extra_body": {"messages": more}})
            with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role"):
                await client.messages.create(
                    messages=[USER], **{**asked, "extra_body": {"messages": [{"role": "x", "content": "a"}]}}
                )
            return stage.session.trajectories()[-1], stage.engine.asked

    trajectory, asked = talk(work, [says("5"), says("6")])
    assert asked[0][1] == CHAT.initial_ids([{"role": "system", "content": "Be brief."}, USER])
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["system", "user", "assistant", "system", "user", "assistant"]
