"""Images that clients send: what the engine is shown of them, what is trained on, and what is refused."""

import asyncio
import base64
import copy
import io
from dataclasses import replace
from itertools import chain

import anthropic
import openai
import pytest
import torch
from agents_stage import SAMPLING, context
from gateway_stage import USER, answer, request_of, session, talk
from images_stage import CHAT, MODEL, NUMBER, PROCESSOR, READER, TOKENIZER, A, B, C, Recorder, digests, says
from vision_stage import picture, plain_log_probs

from etude.agents import AgentLoopManager
from etude.agents.gateway import session as gateway_session
from etude.agents.gateway.messages import ImageHeader, plain_messages, row_for_clients
from etude.agents.gateway.request import GatewayError
from etude.agents.gateway.rollout_tree import History
from etude.agents.gateway.session import SessionRules
from etude.agents.validation import check_sampled
from etude.chat import ChatTemplate, ToolParser
from etude.errors import DataError
from etude.inference import NativeEngine
from etude.models import ImageReader
from etude.tools.builtin.images import MAX_IMAGES, image_url
from etude.trajectory import Provenance, StopReason

PARSER = ToolParser.get_tool_parser("hermes", TOKENIZER)
ROOM = {"prompt_length": 500, "response_length": 500}
SIGHT = {"chat": CHAT, "images": READER, "parser": PARSER, **ROOM}


def shown(*pictures, text="What is this?", role="user"):
    parts = [{"type": "image_url", "image_url": {"url": image_url(each), "detail": "high"}} for each in pictures]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


def plain(*pictures, text="What is this?"):
    return {"role": "user", "content": [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]}


def tokens(*pictures):
    return [READER.tokens(each.size) for each in pictures]


def test_a_conversation_that_grows_shows_every_image_once_and_in_order():
    async def work(stage):
        messages = [shown(A)]
        messages += [answer((await stage.chat(messages)).choices[0]), shown(B, C, text="And these?")]
        messages += [answer((await stage.chat(messages)).choices[0]), USER]
        await stage.chat(messages)
        return stage.session.trajectories()

    engine = Recorder([says("a"), says("b"), says("c")])
    [trajectory] = talk(work, engine=engine, **SIGHT)
    prompt = CHAT.initial_ids([plain(A)], None, tokens(A))
    second = CHAT.context_ids([plain(B, C, text="And these?")], after=says("a"), image_tokens=tokens(B, C))
    third = CHAT.context_ids([USER], after=says("b"))
    parts = [prompt, says("a"), [n for run, _ in second for n in run], says("b"), [n for run, _ in third for n in run]]
    assert engine.asked == [
        (prompt, digests(A)),
        ([*chain(*parts[:3])], digests(A, B, C)),
        ([*chain(*parts)], digests(A, B, C)),
    ]
    assert [*trajectory.prompt_ids, *trajectory.response_ids] == [*chain(*parts), *says("c")]
    assert [image.digest for image in trajectory.images] == digests(A, B, C)
    placeholders = [
        segment.provenance for segment in trajectory.segments for number in segment.token_ids if number == NUMBER
    ]
    assert placeholders == [Provenance.USER] * sum(tokens(B, C))
    assert [trajectory.messages[0], trajectory.messages[2]] == [plain(A), plain(B, C, text="And these?")]


def test_another_image_in_the_history_begins_a_sequence_and_the_same_one_does_not():
    async def work(stage):
        first = answer((await stage.chat([shown(A)])).choices[0])
        await stage.chat([shown(B), first, USER])
        await stage.chat([shown(A), first, USER])
        return stage.session.trajectories()

    engine = Recorder([says("a"), says("b"), says("c")])
    earlier, main = talk(work, engine=engine, **SIGHT)
    assert [seen for _, seen in engine.asked] == [digests(A), digests(B), digests(A)]
    assert [[image.digest for image in each.images] for each in (earlier, main)] == [digests(B), digests(A)]
    assert engine.asked[2][0][: len(engine.asked[0][0])] == engine.asked[0][0]
    assert [each.assistant_turns - each.first_turn for each in (earlier, main)] == [1, 2]


def test_over_the_real_engine_a_forward_pass_gives_the_log_probs_of_every_sequence():
    engine = NativeEngine(MODEL)

    async def main():
        made = session(engine, **SIGHT)

        async def ask(*messages):
            completion = await made.complete(request_of({"messages": list(messages), "n": 2, "max_tokens": 12}))
            return completion.turns[0].message

        first = await ask(shown(A))
        second = await ask(shown(A), first, shown(B, text="And this?"))
        await ask(shown(A), first, shown(B, text="And this?"), second, shown(C, A, text="<|image_pad|> or these?"))
        await ask(shown(A), first, shown(C, text="Or this?"))
        trajectories = made.trajectories()
        check_sampled(trajectories, made._client)
        return trajectories

    trajectories = asyncio.run(main())
    assert len(trajectories) > 4
    assert {len(trajectory.images) for trajectory in trajectories} == {1, 2, 4}
    for trajectory in trajectories:
        ids = [*trajectory.prompt_ids, *trajectory.response_ids]
        assert ids.count(NUMBER) == sum(image.tokens for image in trajectory.images)
        with torch.no_grad():
            expected = plain_log_probs(MODEL, ids, trajectory.images)[len(trajectory.prompt_ids) - 1 :]
        mask = torch.tensor(trajectory.response_mask).bool()
        found = torch.tensor(trajectory.response_log_probs)
        torch.testing.assert_close(found[mask], expected[mask], atol=5e-5, rtol=0)


def vision_context():
    return replace(context(**ROOM), tokenizer=TOKENIZER, chat=CHAT, parser=PARSER, images=READER)


@pytest.mark.parametrize("form", ["picture", "bytes", "path", "address"])
def test_an_agent_asks_with_the_messages_of_its_row(loop_of, form, tmp_path):
    B.save(tmp_path / "b.png")
    file = (tmp_path / "b.png").read_bytes()
    address = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    given = {"picture": B, "bytes": {"bytes": file}, "path": str(tmp_path / "b.png"), "address": address}[form]
    rows = []

    async def run(client, row):
        rows.append(row)
        await client.chat.completions.create(model="any", messages=row["raw_prompt"])
        return 1.0

    engine = Recorder([says("a")])
    row = {"raw_prompt": [plain(A, B)], "images": [A, given], "agent_name": loop_of(run), "uid": "u"}
    [result] = asyncio.run(AgentLoopManager(vision_context(), engine).generate([row], SAMPLING))
    assert engine.asked == [(CHAT.initial_ids([plain(A, B)], None, tokens(A, B)), digests(A, B))]
    assert [image.digest for image in result.trajectory.images] == digests(A, B)
    assert result.trajectory.messages[0] == plain(A, B)
    assert "images" not in rows[0]


def test_the_images_of_a_long_history_may_be_large_files(loop_of):
    file = png(A) + bytes(12 << 20)  # three of them, in base64, are 48 MB

    async def run(client, row):
        await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": [address_of(file)] * 3}]
        )

    engine = Recorder([says("a")])
    row = {"raw_prompt": [USER], "agent_name": loop_of(run), "uid": "u"}
    asyncio.run(AgentLoopManager(vision_context(), engine).generate([row], SAMPLING))
    assert [seen for _, seen in engine.asked] == [digests(A, A, A)]


def test_a_row_whose_images_do_not_fit_its_messages_is_told_so(tmp_path):
    (tmp_path / "no.png").write_text("no")
    with pytest.raises(DataError, match="row r: 1 images for the 2 that its messages show"):
        asyncio.run(row_for_clients({"request_id": "r", "raw_prompt": [plain(A, B)], "images": [A]}))
    with pytest.raises(DataError, match=r"row r: .*no\.png.*no image of a known format"):
        asyncio.run(row_for_clients({"request_id": "r", "raw_prompt": [plain(A)], "images": [tmp_path / "no.png"]}))
    row = {"request_id": "r", "raw_prompt": [USER], "images": []}
    assert asyncio.run(row_for_clients(row)) == row


def address_of(data):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def png(image):
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def linked(url):
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([linked("https://127.0.0.1:9/x.png")], "messages.0.content.0: an image is given as a 'data:image/' address"),
        ([linked("/etc/passwd")], "nothing is fetched"),
        ([linked("file:///etc/passwd")], "nothing is fetched"),
        ([linked("data:text/plain;base64,aGk=")], "nothing is fetched"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}], "nothing is fetched"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "nothing is fetched"),
        ([linked("data:image/png;base64,!")], "messages.0: image data:image/png;base64,!: not valid base64"),
        ([linked("data:image/png;base64,aGk=")], "no image of a known format"),
        ([USER, {"role": "user", "content": [address_of(png(A)[:20])]}], "messages.1: image data:image/png"),
        ([{"role": "user", "content": [address_of(png(A)[:-400])]}], "messages: image 0: "),
        ([shown(A, role="system"), USER], "messages.0.content: only messages of users and tools show images"),
        ([USER, shown(A, role="assistant"), USER], "messages.1.content: only messages of users and tools show images"),
        ([shown(*[A] * (MAX_IMAGES + 1))], f"messages.0: at most {MAX_IMAGES} images in one message"),
    ],
)
def test_what_is_no_image_is_refused_and_leaves_nothing_behind(messages, words):
    async def work(stage):
        with pytest.raises(openai.BadRequestError) as caught:
            await stage.chat(messages)
        assert stage.session._admitted == 0
        await stage.chat([shown(A)])
        return str(caught.value), stage.session.trajectories()

    engine = Recorder([says("a")])
    message, [trajectory] = talk(work, engine=engine, **SIGHT)
    assert words in message
    assert len(engine.asked) == 1
    assert [image.digest for image in trajectory.images] == digests(A)


def test_images_that_leave_no_room_are_refused_before_they_are_decoded(monkeypatch):
    big = picture(64, 64)

    def decoded(*_):
        raise AssertionError("decoded")

    async def main():
        made = session(Recorder([]), **(SIGHT | {"prompt_length": 40, "response_length": 20}))
        monkeypatch.setattr(ImageReader, "read_file", decoded)
        with pytest.raises(GatewayError, match="maximum context length is 60 tokens"):
            await made.complete(request_of({"messages": [shown(big)]}))
        return made.trajectories()

    [trajectory] = asyncio.run(main())
    assert trajectory.stop_reason is StopReason.PROMPT_TOO_LONG


def test_a_session_keeps_no_more_pixels_than_it_may():
    ten = [picture(64, 64, seed=n) for n in range(10)]  # nearly a megabyte of pixel values

    async def main():
        engine, rules = Recorder([says("a"), says("b"), says("c")]), SessionRules(max_image_mb=1)
        made = session(engine, rules=rules, **(SIGHT | {"prompt_length": 4000}))
        answers = []
        for pictures in (ten, [*ten, ten[0]], [picture(64, 64, seed=10)], ten):
            try:
                answers.append(len((await made.complete(request_of({"messages": [shown(*pictures)]}))).turns))
            except GatewayError as error:
                answers.append(str(error))
        return answers, len(engine.asked)

    assert asyncio.run(main()) == ([1, 1, "this session's 1 MB of images are used up", 1], 3)


def test_requests_at_once_keep_no_more_pixels_than_they_may_together():
    async def main():
        rules = SessionRules(max_image_mb=1)
        made = session(Recorder([says("a")] * 9), rules=rules, **(SIGHT | {"prompt_length": 4000}))

        async def ask(seed):
            pictures = [picture(64, 64, seed=10 * seed + n) for n in range(10)]
            return await made.complete(request_of({"messages": [shown(*pictures)]}))

        answers = await asyncio.gather(*map(ask, range(5)), return_exceptions=True)
        return made, sum(isinstance(each, GatewayError) for each in answers)

    made, refused = asyncio.run(main())
    assert refused == 4
    assert sum(image.pixel_values.nbytes for turn in made.tree.turns for image in turn.images) <= 1 << 20


def test_turns_share_the_pixels_of_an_image_that_was_read_twice():
    async def main():
        made = session(Recorder([says("a")] * 3), **(SIGHT | {"images": ImageReader(PROCESSOR, remembered_bytes=1)}))
        for text in "abc":
            await made.complete(request_of({"messages": [shown(A, B, text=text)]}))
        return made.trajectories()

    first, *others = asyncio.run(main())
    assert all(each.images[n] is first.images[n] for each in others for n in (0, 1))


@pytest.mark.parametrize("stage", ["read_image_sizes", "decode_images"])
def test_a_session_that_ends_while_images_are_read_samples_nothing_more(monkeypatch, stage):
    reading = asyncio.Event()
    work = getattr(gateway_session, stage)

    async def slow(addresses, *shared):
        if any(addresses):
            reading.set()
            await asyncio.sleep(30)
        return await work(addresses, *shared)

    async def main():
        engine = Recorder([says("a")])
        made = session(engine, **SIGHT)
        monkeypatch.setattr(gateway_session, stage, slow)
        asked = asyncio.ensure_future(made.complete(request_of({"messages": [shown(A)]})))
        await reading.wait()
        assert made.in_flight == 1
        await made.close()
        with pytest.raises(GatewayError, match="is over") as caught:
            await asked
        return caught.value.status, engine.asked, made.broken.done(), made._admitted

    assert asyncio.run(main()) == (404, [], False, 0)


def test_reading_images_counts_towards_a_requests_time(monkeypatch):
    async def slow(*_):
        await asyncio.sleep(30)

    async def main():
        made = session(Recorder([says("a")]), rules=SessionRules(request_seconds=0.05), **SIGHT)
        monkeypatch.setattr(gateway_session, "decode_images", slow)
        with pytest.raises(GatewayError, match=r"no answer within 0\.05 s") as caught:
            await made.complete(request_of({"messages": [shown(A)]}))
        return caught.value.status

    assert asyncio.run(main()) == 504


def test_texts_beside_an_image_are_one_however_they_are_cut():
    image = shown(A)["content"][0]

    def key(*parts):
        given = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
        messages, addresses = plain_messages([{"role": "user", "content": given}])
        return History(messages, [[ImageHeader(each, each.encode(), 0) for each in now] for now in addresses], "").key

    assert key("ab", image, "c") == key("", "a", "b", image, "", "c") != key("c", image, "ab")


def test_a_template_that_loses_an_image_is_a_refusal_and_no_failure(monkeypatch):
    def loses(*_, **__):
        raise DataError("1 placeholder for 2 images")

    async def main():
        made = session(Recorder([says("a"), says("b")]), **SIGHT)
        first = (await made.complete(request_of({"messages": [shown(A)]}))).turns[0].message
        monkeypatch.setattr(ChatTemplate, "context_ids", loses)
        with pytest.raises(GatewayError, match="1 placeholder for 2 images") as caught:
            await made.complete(request_of({"messages": [shown(A), first, shown(A, B)]}))
        return caught.value.status, made.broken.done()

    assert asyncio.run(main()) == (400, False)


def test_a_limit_that_is_reached_while_images_are_looked_at_holds():
    async def main():
        made = session(Recorder([says("a"), says("b")]), **SIGHT, multi_turn={"max_assistant_turns": 1})
        requests = [made.complete(request_of({"messages": [shown(each)]})) for each in (A, B)]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        return sorted(type(each).__name__ for each in answers)

    assert asyncio.run(main()) == ["Completion", "GatewayError"]


# -- in every interface --------------------------------------------------------------------------------------------


def source(one):
    head, data = image_url(one).split(",", 1)
    return {"type": "base64", "media_type": head.removeprefix("data:").removesuffix(";base64"), "data": data}


async def chat_client(stage, stream):
    made = await stage.chat([shown(A)], tools=[LOOK])
    call = made.choices[0].message.tool_calls[0]
    seen = {"role": "tool", "tool_call_id": call.id, "content": shown(B, text="a closer look")["content"]}
    asked = {"messages": [shown(A), answer(made.choices[0]), seen], "tools": [LOOK], "stream": stream}
    second = await stage.chat(**asked)
    if not stream:
        return second.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in second if chunk.choices])


async def responses_client(stage, stream):
    def parts(one, text):
        return [{"type": "input_image", "image_url": image_url(one)}, {"type": "input_text", "text": text}]

    tools = [{"type": "function", **LOOK["function"]}]
    items = [{"role": "user", "content": parts(A, "What is this?")}]
    first = await stage.client.responses.create(model="any", input=items, tools=tools)
    call = next(item for item in first.output if item.type == "function_call")
    items += [item.model_dump() for item in first.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": parts(B, "a closer look")}]
    if not stream:
        return (await stage.client.responses.create(model="any", input=items, tools=tools)).output_text
    async with stage.client.responses.stream(model="any", input=items, tools=tools) as events:
        return (await events.get_final_response()).output_text


async def messages_client(stage, stream):
    def blocks(one, text):
        return [{"type": "image", "source": source(one)}, {"type": "text", "text": text}]

    function = LOOK["function"]
    tools = [{"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}]
    root = stage.url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=root, api_key=stage.key, max_retries=0, timeout=30) as client:
        asked = {"model": "any", "max_tokens": 64, "tools": tools}
        messages = [{"role": "user", "content": blocks(A, "What is this?")}]
        first = await client.messages.create(messages=messages, **asked)
        call = next(block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": blocks(B, "a closer look")}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        if not stream:
            return (await client.messages.create(messages=messages, **asked)).content[0].text
        async with client.messages.stream(messages=messages, **asked) as events:
            return await events.get_final_text()


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks closer.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


def test_images_of_users_and_tools_are_the_same_sequence_in_every_interface():
    calls = says('<tool_call>\n{"name": "look", "arguments": {"text": "here"}}\n</tool_call>')
    found = []
    for client in (chat_client, responses_client, messages_client):
        for stream in (False, True):

            async def work(stage, client=client, stream=stream):
                assert await client(stage, stream) == "It is grey."
                [trajectory] = stage.session.trajectories()
                return (
                    stage.engine.asked,
                    trajectory.prompt_ids,
                    trajectory.response_ids,
                    trajectory.tool_calls[0].response,
                )

            found.append(talk(work, engine=Recorder([calls, says("It is grey.")]), **SIGHT))
    asked, prompt, *_, response = found[0]
    assert all(each == found[0] for each in found)
    assert [images for _, images in asked] == [digests(A), digests(A, B)]
    assert asked[1][0].count(NUMBER) == sum(tokens(A, B))
    assert prompt.count(NUMBER) == tokens(A)[0]
    assert response == "[image]a closer look"
    tool = {"role": "tool", "content": plain(B, text="a closer look")["content"]}
    after = [token for ids, _ in CHAT.context_ids([tool], after=calls, image_tokens=tokens(B)) for token in ids]
    assert asked[1][0] == [*prompt, *calls, *after]


def test_images_of_tools_that_the_template_does_not_show_are_refused_by_name():
    chat = copy.copy(CHAT)
    chat.image_roles = frozenset({"user"})
    seen = {"role": "tool", "tool_call_id": "a", "content": shown(B)["content"]}

    async def work(stage):
        with pytest.raises(openai.BadRequestError, match=r"messages.2: this policy takes no images in tools' answers"):
            await stage.chat([USER, {"role": "assistant", "content": "x"}, seen])

    talk(work, engine=Recorder([says("a")]), **{**SIGHT, "chat": chat})
