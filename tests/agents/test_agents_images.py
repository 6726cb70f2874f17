"""Images in agent loops: every turn is asked with all images of its context, in order, and what cannot be shown is said."""

import asyncio
import errno
import json

import pytest
import torch
from agents_stage import Echo, call, check, options
from hypothesis import given
from hypothesis import strategies as st
from images_stage import CHAT, NUMBER, PROCESSOR, TOKENIZER, A, B, C, Recorder, digests, says
from vision_stage import TEMPLATE, build_vision_stage, picture

from etude.agents import (
    AGENT_LOOPS,
    AgentContext,
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopOutput,
    EnvAgentLoop,
    Rollout,
    Sampling,
    SingleTurnAgentLoop,
    ToolAgentLoop,
    TrajectoryClient,
    to_batch,
)
from etude.agents import tool_messages as agent_messages
from etude.agents.interactions.simulated_user import _seen_by_the_user
from etude.agents.tool_messages import UNWRITABLE, append_notes
from etude.chat import ChatTemplate, ToolParser
from etude.chat.placeholders import image_count
from etude.environments import EnvironmentEntry, Environments
from etude.environments.text_env import TextEnvironment
from etude.errors import DataError, EngineError, EtudeError, InfrastructureError
from etude.models import ImageReader
from etude.schemas import ToolResponse
from etude.tools import TokenLimit
from etude.tools.builtin import images as tool_images
from etude.tools.builtin.images import AnswerImages, load_image
from etude.trainer.sequences import expand_sequences
from etude.trajectory import Provenance, StopReason

SAMPLING = Sampling(1.0, 1.0, -1, seed=7)
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
ROW = {"raw_prompt": QUESTION, "images": [A], "request_id": "r"}


def context(tools=(), chat=CHAT, parser="hermes", environment=None, **given):
    return AgentContext(
        config=None,
        options=options(**({"prompt_length": 400, "response_length": 400} | given)),
        tokenizer=TOKENIZER,
        chat=chat,
        parser=ToolParser.get_tool_parser(parser, TOKENIZER),
        tools={tool.name: tool for tool in tools},
        environment=environment,
        processor=PROCESSOR,
        images=ImageReader(PROCESSOR),
    )


def roll(script, tools=(), *, row=None, loop_class=ToolAgentLoop, **given):
    """(trajectory, engine, client) of one scripted run."""
    engine, shared = Recorder(script), context(tools, **given)
    client = TrajectoryClient(engine, "r")

    async def main():
        loop = loop_class(trainer_config=shared, server_manager=client, tokenizer=TOKENIZER, processor=PROCESSOR)
        assert loop.processor is PROCESSOR
        params = SAMPLING.params(0, shared.options.response_length, CHAT.stop_token_ids)
        output = await loop.run(params, **(ROW | (row or {})))
        check(client, output)
        return output

    return asyncio.run(main()), engine, client


def by_processor(messages, pictures, tools=None):
    text = TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return PROCESSOR(text=[text], images=pictures or None)["input_ids"][0]


def answering(*answers):
    """A tool that gives these answers, one a call."""
    left = list(answers)
    return Echo(respond=lambda _: left.pop(0))


def tool_messages(*contents):
    return [{"role": "tool", "content": content} for content in contents]


def context_after(messages, pictures):
    """The ids that follow an assistant's turn when `messages` come next, by the processor alone."""
    start = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    ids = by_processor([*start, *messages], pictures)
    return ids[ids.index(CHAT.end_of_turn_id, ids.index(CHAT.end_of_turn_id) + 1) + 1 :]


def test_a_single_turn_sees_the_rows_images():
    row = {"raw_prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], "images": [A, B]}
    trajectory, engine, _ = roll([says("a")], row=row, loop_class=SingleTurnAgentLoop)
    assert engine.asked == [(by_processor(row["raw_prompt"], [A, B]), digests(A, B))]
    assert [image.digest for image in trajectory.images] == digests(A, B)
    _, engine, _ = roll([says("a")], row={"raw_prompt": [{"role": "user", "content": "x"}], "images": None})
    assert engine.asked[0][1] is None


def test_a_tools_image_is_seen_by_the_next_turn():
    tool = answering(ToolResponse(text="Here.", image=[B]), ToolResponse(image=[C, A]), "no image")
    schemas = [tool.get_openai_tool_schema().to_openai()]
    turns = [says(call()), says(call()), says(call()), says("It is a cat.")]
    trajectory, engine, _ = roll(turns, [tool])
    prompt = by_processor(QUESTION, [A], schemas)
    contents = [
        [{"type": "image"}, {"type": "text", "text": "Here."}],
        [{"type": "image"}, {"type": "image"}],
        "no image",
    ]
    ids, pictures = list(prompt), [A]
    for turn, content, shown in zip(turns, contents, [[B], [C, A], []]):
        assert engine.asked.pop(0) == (ids, digests(*pictures))
        ids = [*ids, *turn, *context_after(tool_messages(content), shown)]
        pictures += shown
    assert engine.asked == [(ids, digests(A, B, C, A))]
    assert trajectory.prompt_ids + trajectory.response_ids == ids + turns[3]
    assert [image.digest for image in trajectory.images] == digests(A, B, C, A)
    placed = [s for s in trajectory.segments if NUMBER in s.token_ids]
    assert [(len(s.token_ids), s.provenance) for s in placed] == [(n, Provenance.TOOL) for n in (6, 10, 4)]
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == contents
    assert [record.response for record in trajectory.tool_calls] == ["Here.", "", "no image"]
    json.dumps(trajectory.to_record())  # no pixels anywhere
    assert [image["tokens"] for image in trajectory.to_record()["images"]] == [4, 6, 10, 4]


def test_calls_of_one_turn_are_answered_with_their_images_in_order():
    tool = answering("plain", ToolResponse(text="one", image=[B]), ToolResponse(text="two", image=[C]))
    multi_turn = {"max_parallel_calls": 3}
    turn = says(call() + call() + call() + call() + "<tool_call>broken</tool_call>")
    trajectory, engine, _ = roll([turn, says("x")], [tool], multi_turn=multi_turn)
    messages = [message for message in trajectory.messages if message["role"] == "tool"]
    assert [m["content"][0]["type"] if isinstance(m["content"], list) else "text" for m in messages] == [
        "text", "image", "image", "text", "text",
    ]  # fmt: skip
    ids, images = engine.asked[1]
    assert ids[-len(context_after(messages, [B, C])) :] == context_after(messages, [B, C])
    assert images == digests(A, B, C)


@pytest.mark.parametrize(
    ("response", "text", "shown"),
    [
        (ToolResponse(video=["film"]), "(a video, which cannot be shown)", []),
        (ToolResponse(text="Look.", video=["film"], image=[B]), "Look.\n(a video, which cannot be shown)", [B]),
        (ToolResponse(image=[b"no image"]), "(an image that cannot be shown: image of 8 bytes: cannot be read", []),
        (
            ToolResponse(image=["/nowhere.png", B]),
            "(an image that cannot be shown: image not found: /nowhere.png)",
            [B],
        ),
        (ToolResponse(image=[picture(1000, 4)]), "(an image that cannot be shown: a picture of 1000 by 4 pixels", []),
        (ToolResponse(image=[B] * 5), "(only the first 3 images are shown)", [B] * 3),
    ],
)
def test_what_cannot_be_shown_is_said(response, text, shown, monkeypatch):
    monkeypatch.setattr(agent_messages, "MAX_IMAGES", 3)
    trajectory, engine, _ = roll([says(call()), says("x")], [answering(response)])
    assert trajectory.tool_calls[0].response.startswith(text)
    assert engine.asked[1][1] == digests(A, *shown)
    assert trajectory.stop_reason is StopReason.COMPLETED


def test_of_many_broken_images_the_first_is_named_and_the_others_are_counted():
    response = ToolResponse(text="Look.", image=[b"one", B, b"three", b"no image", C])
    trajectory, engine, _ = roll([says(call()), says("x")], [answering(response)])
    assert trajectory.tool_calls[0].response.splitlines() == [
        "Look.",
        f"(an image that cannot be shown: {told_of(b'one')})",
        "(2 more images that cannot be shown)",
    ]
    assert engine.asked[1][1] == digests(A, B, C)


def told_of(source):
    with pytest.raises(DataError) as raised:
        load_image(source, 10**6)
    return str(raised.value)


def test_the_images_of_one_answer_are_bounded_together(monkeypatch):
    """By their headers: those that come to more are told, and never decoded."""
    monkeypatch.setattr(tool_images, "MAX_PIXELS", 1000)
    response = ToolResponse(image=[B, C, A])  # 384, 640 and 256 pixels
    trajectory, engine, _ = roll([says(call()), says("x")], [answering(response)])
    assert engine.asked[1][1] == digests(A, B, A)
    assert "16 x 40 pixels, and one answer's images have at most 1000 together" in trajectory.tool_calls[0].response


def limit_of(most, unit="tokens", side="middle"):
    tokens, chars = {"tokens": (most, None), "characters": (None, most)}[unit]
    return TokenLimit(
        tokens, side, TOKENIZER, lambda text: len(TOKENIZER.encode(text, add_special_tokens=False)), chars
    )


@given(
    text=st.one_of(st.none(), st.text(max_size=300)),
    notes=st.lists(st.text(min_size=1, max_size=40), max_size=3),
    most=st.integers(1, 200),
    unit=st.sampled_from(["tokens", "characters"]),
    side=st.sampled_from(["left", "middle", "right"]),
)
def test_notes_count_as_the_answers_own_words(text, notes, most, unit, side):
    limit = limit_of(most, unit, side)
    size = len if unit == "characters" else limit.count
    text = None if text is None else text.encode("utf-8", "replace").decode()
    if text is not None:  # the session has cut it
        text = text[:most] if unit == "characters" else limit.cut(text)
    whole = append_notes(text, notes, limit)
    told = "\n".join(notes).encode("utf-8", "replace").decode()
    assert whole == (text or "") or size(whole) <= most
    if size(f"\n{told}") <= most and told:
        assert whole.endswith(told)


@pytest.mark.parametrize("unit", ["tokens", "characters"])
@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_an_answer_as_long_as_it_may_be_is_cut_for_what_is_said_of_its_images(unit, side):
    limits = {"max_tool_response_length": 200, "tool_response_length_unit": unit, "tool_response_truncate_side": side}
    response = ToolResponse(text="word " * 400, image=[b"no image"])
    trajectory, _, _ = roll([says(call()), says("x")], [answering(response)], multi_turn=limits, response_length=900)
    answer = trajectory.tool_calls[0].response
    assert answer.endswith(f"\n(an image that cannot be shown: {told_of(b'no image')})")
    assert 100 < (len(answer) if unit == "characters" else len(TOKENIZER.encode(answer))) <= 200


def test_what_the_system_cannot_read_now_is_tried_again(monkeypatch):
    """Nothing is told to the model: neither the tool nor the row is to blame."""
    original, failures = AnswerImages.load, [OSError(errno.EMFILE, "Too many open files")]

    def load(self, source):
        if failures:
            raise InfrastructureError("cannot be read now") from failures.pop()
        return original(self, source)

    monkeypatch.setattr(AnswerImages, "load", load)
    engine = Recorder([says(call()), says("x")])
    [result] = managed([ROW], engine, tools=[Echo(respond=lambda _: ToolResponse(image=[B]))])
    assert result.failures == 1
    assert [image.digest for image in result.trajectory.images] == digests(A, B)
    assert result.trajectory.tool_calls[0].response == ""


@pytest.fixture
def cutting_chat():
    """A template that takes answers apart which hold a `##`."""
    tokenizer = build_vision_stage("qwen3_vl")[1].tokenizer
    tokenizer.chat_template = TEMPLATE.replace(
        '<tool_response>\\n" + shown(message.content)',
        '<tool_response>\\n" + shown(message.content).split("##")[-1]',
    )
    assert tokenizer.chat_template != TEMPLATE
    chat = ChatTemplate(tokenizer, processor=PROCESSOR)
    assert chat.image_roles == {"user", "tool"}
    return chat


def test_an_answer_that_the_template_takes_apart_keeps_its_images(cutting_chat):
    turns, part = [says(call() * 3), says("x")], {"type": "image"}
    answers = [ToolResponse(text="a ## b", image=[B, C]), "plain ##", ToolResponse(text="ok", image=[A])]
    given = {"chat": cutting_chat, "multi_turn": {"max_parallel_calls": 3}}
    trajectory, engine, _ = roll(turns, [answering(*answers)], **given)
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == [
        [part, part, {"type": "text", "text": UNWRITABLE}],
        UNWRITABLE,
        [part, {"type": "text", "text": "ok"}],
    ]
    assert engine.asked[1][1] == [image.digest for image in trajectory.images] == digests(A, B, C, A)
    assert trajectory.stop_reason is StopReason.COMPLETED


@pytest.mark.parametrize(
    ("reason", "given"),
    [
        (StopReason.MAX_ASSISTANT_TURNS, {"multi_turn": {"max_assistant_turns": 1}}),
        (StopReason.MAX_USER_TURNS, {"multi_turn": {"max_user_turns": 1}}),
        (StopReason.TIME_LIMIT, {"multi_turn": {"max_seconds": 1e-9}}),
        (StopReason.TOOL_RESPONSE_OVERFLOW, {"response_length": 60, "multi_turn": {"min_answer_tokens": 30}}),
    ],
)
def test_messages_that_were_never_shown_have_no_images(reason, given):
    """The parts of the messages and the images of the trajectory are the same, in every ending."""
    before = ["plain"] * (reason is StopReason.MAX_USER_TURNS)
    tool = answering(*before, ToolResponse(text="z", image=[B, C]))
    trajectory, engine, _ = roll([says(call())] * 2, [tool], **given)
    assert (trajectory.stop_reason, len(engine.asked)) == (reason, 1 + len(before))
    assert sum(map(image_count, trajectory.messages)) == len(trajectory.images) == 1
    assert trajectory.messages[-1] == {"role": "tool", "content": "[image][image]z"}


def test_an_image_counts_with_its_tokens_and_is_not_read_where_it_does_not_fit(monkeypatch):
    large = picture(64, 64)  # 64 tokens
    turns, tool = [says(call()), says("x")], [Echo(respond=lambda _: ToolResponse(image=[large]))]
    whole, _, _ = roll(turns, tool)
    needed = whole.response_length - len(turns[1]) + 3  # what came before the last turn, and room to answer
    limits = {"min_answer_tokens": 3}
    fits, _, _ = roll(turns, tool, response_length=needed, multi_turn=limits)
    assert fits.stop_reason in (StopReason.COMPLETED, StopReason.RESPONSE_LENGTH)
    assert len(fits.images) == 2
    read = []
    original = ImageReader.read
    monkeypatch.setattr(ImageReader, "read", lambda self, image: read.append(image.size) or original(self, image))
    over, engine, _ = roll(turns, tool, response_length=needed - 1, multi_turn=limits)
    assert over.stop_reason is StopReason.TOOL_RESPONSE_OVERFLOW
    assert ([image.tokens for image in over.images], read, len(engine.asked)) == ([4], [A.size], 1)
    assert over.response_ids == turns[0]
    bounded, _, _ = roll(turns, tool, max_model_len=len(whole.prompt_ids) + needed - 1, multi_turn=limits)
    assert bounded.stop_reason is StopReason.TOOL_RESPONSE_OVERFLOW


def test_a_prompt_is_too_long_with_its_image():
    fits, _, _ = roll([says("x")])
    over, engine, _ = roll([says("x")], prompt_length=len(fits.prompt_ids) - 1)
    assert (over.stop_reason, engine.asked) == (StopReason.PROMPT_TOO_LONG, [])


@pytest.mark.parametrize("after", [False, True])
def test_the_images_of_a_greeting_stand_where_it_is_appended(after):
    class Greeting(Echo):
        async def create(self, instance_id=None, **kwargs):
            return instance_id, ToolResponse(text="Your board: <|image_pad|>", image=[B, C])

    prompt = [*QUESTION, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "Go on."}]
    pictures = [A]
    if after:
        prompt, pictures = [*prompt, {"role": "system", "content": [{"type": "image"}]}], [A, A]
    tool = Greeting()
    row = {"raw_prompt": prompt, "images": pictures, "tools_kwargs": {"echo": {}}}
    trajectory, engine, _ = roll([says("x")], [tool], row=row)
    text = "\nYour board: <\u200b|image_pad|>"
    parts = [{"type": "text", "text": "Go on."}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": text}]
    shown = [*prompt[:2], {"role": "user", "content": parts}, *prompt[3:]]
    order = [A, B, C, A][: 3 + after]
    assert engine.asked == [(by_processor(shown, order, [tool.get_openai_tool_schema().to_openai()]), digests(*order))]
    assert [image.digest for image in trajectory.images] == digests(*order)
    assert prompt[2]["content"] == "Go on."  # the row stays as it was


def test_a_greeting_after_a_prompt_of_parts_and_one_without_a_user():
    text_only = Echo(greeting="The board is empty.")
    trajectory, _, _ = roll([says("x")], [text_only], row={"tools_kwargs": {"echo": {}}})
    assert trajectory.messages[0]["content"][-1] == {"type": "text", "text": "\nThe board is empty."}
    row = {"raw_prompt": [{"role": "system", "content": [{"type": "image"}]}], "tools_kwargs": {"echo": {}}}
    trajectory, engine, _ = roll([says("x")], [text_only], row=row)
    assert trajectory.messages[1] == {"role": "user", "content": "The board is empty."}
    assert engine.asked[0][1] == digests(A)


def test_results_in_tags_are_the_users():
    tool = Echo("search", respond=lambda _: ToolResponse(text="Page 1", image=[B]))
    trajectory, engine, _ = roll([says("<search>cats</search>"), says("x")], [tool], parser="search_r1")
    message = trajectory.messages[2]
    assert (message["role"], message["content"][0]) == ("user", {"type": "image"})
    assert "Page 1" in message["content"][1]["text"]
    assert engine.asked[1][1] == digests(A, B)
    assert [s.provenance for s in trajectory.segments if NUMBER in s.token_ids] == [Provenance.USER]


def test_a_template_that_shows_no_image_of_a_tool():
    tokenizer = build_vision_stage("qwen3_vl")[1].tokenizer
    tokenizer.chat_template = TEMPLATE.replace(
        '<tool_response>\\n" + shown(message.content)', '<tool_response>\\n" + (message.content | string)'
    )
    chat = ChatTemplate(tokenizer, processor=PROCESSOR)
    assert chat.image_roles == {"user"}
    trajectory, engine, _ = roll([says(call()), says("x")], [answering(ToolResponse(image=[B]))], chat=chat)
    assert "media that a text model cannot see" in trajectory.tool_calls[0].response
    assert engine.asked[1][1] == digests(A)


def test_a_rows_broken_picture_is_a_data_error_that_names_it():
    with pytest.raises(DataError, match=r"row r: image 0: image of 3 bytes: cannot be read"):
        roll([says("x")], row={"images": [b"abc"]})
    with pytest.raises(DataError, match="places for 1 images, and 0 are given"):
        roll([says("x")], row={"images": None})


# -- loops of one's own --------------------------------------------------------------------------------------------


class Honest(AgentLoopBase):
    """Plain lists, as loops written for verl return them."""

    async def run(self, sampling_params, **row):
        images = await self.read_images(row)
        ids = self.chat.initial_ids(row["raw_prompt"], None, [image.tokens for image in images])
        output = await self.server_manager.generate(prompt_ids=ids, sampling_params=sampling_params, image_data=images)
        return AgentLoopOutput(ids, output.token_ids, [1] * len(output.token_ids), images=self.said(images))

    def said(self, images):
        return tuple(images)


class Forgetful(Honest):
    def said(self, images):
        return ()


class Mistaken(Honest):
    def said(self, images):
        return (self.context.images.read(C),)


def test_a_loop_of_plain_lists_says_which_images_it_showed():
    trajectory, engine, _ = roll([says("x")], loop_class=Honest)
    assert [image.digest for image in trajectory.images] == engine.asked[0][1] == digests(A)
    for wrong in (Forgetful, Mistaken):
        with pytest.raises(EtudeError, match="the engine did not sample it after the ids before it"):
            roll([says("x")], loop_class=wrong)


def test_the_same_ids_with_another_image_are_another_history():
    """Two draws after equal ids, the second with another picture of the same size: each output gets its own log-probs."""
    other = picture(16, 16, seed=9)

    class Twice(Honest):
        async def run(self, sampling_params, **row):
            first = await super().run(sampling_params, **row)
            return [first, await super().run(sampling_params, **{**row, "images": [other]})]

    engine, shared = Recorder([says("x"), says("x")]), context()
    client = TrajectoryClient(engine, "r")
    loop = Twice(trainer_config=shared, server_manager=client, tokenizer=TOKENIZER, processor=PROCESSOR)
    outputs = asyncio.run(loop.run(SAMPLING.params(0, 50, CHAT.stop_token_ids), **ROW))
    check(client, *outputs)
    assert [[image.digest for image in output.images] for output in outputs] == [digests(A), digests(other)]
    outputs[1].images = outputs[0].images
    with pytest.raises(EtudeError, match="an earlier sequence claims that draw"):
        check(client, *outputs)


def test_a_turn_that_saw_another_image_is_none_of_a_conversation():
    """A loop that swaps the picture under the same ids between two turns may claim one of them, and not both."""
    other = picture(16, 16, seed=9)

    class Swapping(AgentLoopBase):
        async def run(self, sampling_params, **row):
            ids = self.chat.initial_ids(row["raw_prompt"], None, [4])
            turns = []
            for shown in (A, other):
                images = [self.context.images.read(shown)]
                output = await self.server_manager.generate(
                    prompt_ids=ids + turns, sampling_params=sampling_params, images=images
                )
                turns += output.token_ids
            mask = [1] * len(says("x")) + [self.keeps] * len(says("y"))
            return AgentLoopOutput(ids, turns, mask, images=(self.context.images.read(A),))

    Swapping.keeps = 0
    trajectory, _, _ = roll([says("x"), says("y")], loop_class=Swapping)
    assert sum(trajectory.response_mask) == len(says("x"))
    Swapping.keeps = 1
    with pytest.raises(EtudeError, match=f"marked response token {len(says('x'))} "):
        roll([says("x"), says("y")], loop_class=Swapping)


def managed(rows, engine, **given):
    shared = context(**given)
    return asyncio.run(AgentLoopManager(shared, engine).generate(rows, SAMPLING))


def test_a_retry_starts_from_the_rows_images():
    class Breaking(Recorder):
        async def generate(self, request_id, *args, **kwargs):
            output = await super().generate(request_id, *args, **kwargs)
            if len(self.asked) == 2:  # after the tool's image was seen
                raise EngineError("broken")
            return output

    engine = Breaking([says(call()), says("x")])
    tool = Echo(respond=lambda _: ToolResponse(image=[B]))
    [result] = managed([ROW], engine, tools=[tool])
    assert result.failures == 1
    assert [images for _, images in engine.asked] == [digests(A), digests(A, B)] * 2
    assert [image.digest for image in result.trajectory.images] == digests(A, B)


def test_the_column_of_images_is_there_where_a_row_has_some():
    seen, _, _ = roll([says("x")])
    plain, _, _ = roll([says("x")], row={"raw_prompt": [{"role": "user", "content": "x"}]})
    batch = to_batch([Rollout([seen]), Rollout([plain]), Rollout()], 0)
    column = batch.non_tensor_batch["multi_modal_inputs"].tolist()
    assert [[image.digest for image in images] for images in column] == [digests(A), [], []]
    assert batch.batch["input_ids"][0].tolist().count(NUMBER) == 4
    assert torch.equal(batch.batch["position_ids"][1], (batch.batch["attention_mask"][1].cumsum(0) - 1).clamp(min=0))
    assert "multi_modal_inputs" not in to_batch([Rollout([plain])], 0).non_tensor_batch


def test_earlier_sequences_bring_their_own_images():
    seen, _, _ = roll([says("x")])
    plain, _, _ = roll([says("x")], row={"raw_prompt": [{"role": "user", "content": "x"}]})
    for main, earlier in ((seen, plain), (plain, seen)):
        batch = to_batch([Rollout([earlier, main]), Rollout([main])], 0)
        batch.batch["token_level_scores"] = torch.zeros_like(batch.batch["rollout_log_probs"], dtype=torch.float64)
        column = expand_sequences(batch, 0).non_tensor_batch["multi_modal_inputs"].tolist()
        assert [len(images) for images in column] == [len(t.images) for t in (main, earlier, main)]


@AGENT_LOOPS.register("images_test_loop")
class Given(Honest):
    async def run(self, sampling_params, **row):
        assert self.processor is PROCESSOR
        return await super().run(sampling_params, **row)


def test_the_manager_hands_the_processor_to_loops():
    [result] = managed([{**ROW, "agent_name": "images_test_loop"}], Recorder([says("x")]))
    assert len(result.trajectory.images) == 1


# -- users and environments ----------------------------------------------------------------------------------------


def test_a_simulated_user_reads_of_an_image():
    answer = {"role": "assistant", "content": "A cat."}
    assert _seen_by_the_user([*QUESTION, answer])[0] == {"role": "assistant", "content": "[image]What is this?"}


class Guess:
    def reset(self, *, seed=None, options=None):
        return "Guess.", {}

    def step(self, action):
        return "Again.", 0.0, action == "y", False, {}


def test_an_environment_of_a_row_with_an_image():
    environment = Environments.of([EnvironmentEntry("guess", lambda: TextEnvironment(Guess), TextEnvironment)])
    script, row = [says("x"), says("y")], {"group_seed": 7}
    trajectory, engine, _ = roll(script, row=row, loop_class=EnvAgentLoop, environment=environment)
    shown = [{"role": "user", "content": [*QUESTION[0]["content"], {"type": "text", "text": "\nGuess."}]}]
    assert engine.asked[0] == (by_processor(shown, [A]), digests(A))
    assert engine.asked[1][1] == digests(A)
    assert trajectory.stop_reason is StopReason.COMPLETED
