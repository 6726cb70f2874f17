"""What clients get: contents, calls, choices, streams, log-probs, as the real `openai` clients read them."""

import asyncio
import json
from collections import Counter

import openai
import pytest
from agents_stage import CHAT, TOKENIZER, Recorder, call, says
from gateway_stage import ECHO, USER, answer, native, talk

from etude.chat import HermesToolParser, ToolParser
from etude.inference import TokenOutput
from etude.trajectory import Provenance


def ask(script, messages=(USER,), **request):
    async def work(stage):
        return await stage.chat(list(messages), **request)

    return talk(work, script)


def test_a_plain_answer():
    made = ask([says("The answer is 5.")])
    choice = made.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "The answer is 5.",
        "stop",
    )
    assert choice.message.tool_calls is None
    prompt = CHAT.initial_ids([USER])
    assert made.usage.prompt_tokens == len(prompt)
    assert made.usage.completion_tokens == len(says("The answer is 5."))
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert (made.object, made.model) == ("chat.completion", "any")


def test_ids_and_log_probs_on_request():
    async def work(stage):
        return await stage.chat([USER], max_tokens=7, logprobs=True, extra_body={"return_token_ids": True})

    made = talk(work, engine=native())
    choice = made.choices[0]
    tokens = choice.logprobs.content
    assert [token.token for token in tokens] == [TOKENIZER.decode([i]) for i in choice.token_ids]
    assert all(token.logprob < 0 and bytes(token.bytes).decode() == token.token for token in tokens)
    assert made.prompt_token_ids == CHAT.initial_ids([USER])
    assert len(tokens) == made.usage.completion_tokens


def test_a_round_trip_with_tools_is_one_sequence_whose_new_tokens_are_the_tools():
    turns = [says(call(text="five")), says("It is five.")]

    async def work(stage):
        messages = [USER]
        first = (await stage.chat(messages, tools=[ECHO])).choices[0]
        [made] = first.message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("echo", {"text": "five"})
        assert first.finish_reason == "tool_calls"
        assert first.message.content is None
        messages += [answer(first), {"role": "tool", "tool_call_id": made.id, "content": "five <|im_end|>"}]
        second = (await stage.chat(messages, tools=[ECHO])).choices[0]
        assert (second.message.content, second.finish_reason) == ("It is five.", "stop")
        return stage.session.trajectories(), stage.engine.asked

    [trajectory], asked = talk(work, turns)
    prompt = CHAT.initial_ids([USER], [ECHO])
    [(given, _)] = [
        (ids, p)
        for ids, p in CHAT.context_ids([{"role": "tool", "content": "five <|im_end|>"}])
        if p is Provenance.TOOL
    ]
    assert TOKENIZER.decode(given) == "five <|im_end|>"
    assert not set(given) & set(TOKENIZER.all_special_ids)
    assert asked[0][1] == prompt
    assert asked[1][1] == prompt + turns[0] + [
        i for ids, _ in CHAT.context_ids([{"role": "tool", "content": "five <|im_end|>"}]) for i in ids
    ]
    assert trajectory.prompt_ids == prompt
    assert prompt + trajectory.response_ids == asked[1][1] + turns[1]
    assert [s.provenance for s in trajectory.segments if s.provenance is Provenance.SAMPLED] == [Provenance.SAMPLED] * 2
    assert sum(trajectory.response_mask) == len(turns[0]) + len(turns[1])
    assert [(c.name, c.response) for c in trajectory.tool_calls] == [("echo", "five <|im_end|>")]
    assert (trajectory.assistant_turns, trajectory.user_turns) == (2, 1)


def test_calls_have_ids_that_every_template_takes_and_every_run_gives():
    two = says(call(text="a") + "\n" + call(text="b"))

    def ids():
        return [made.id for made in ask([two], tools=[ECHO]).choices[0].message.tool_calls]

    assert ids() == ids()
    assert len(set(ids())) == 2
    assert all(len(name) == 9 and name.isalnum() for name in ids())


@pytest.mark.parametrize("request_more", [{"tools": [ECHO], "tool_choice": "none"}, {}])
def test_where_no_calls_are_read_they_are_words(request_more):
    made = ask([says("Well. " + call(text="a"))], **request_more).choices[0]
    assert made.message.tool_calls is None
    assert made.message.content == "Well. " + call(text="a")
    assert made.finish_reason == "stop"


def test_a_call_that_cannot_be_read_is_shown_as_it_was_written_and_counted():
    text = '<tool_call>\n{"name": "echo", "arguments": {"text"}\n</tool_call>'

    async def work(stage):
        made = (await stage.chat([USER], tools=[ECHO])).choices[0]
        [trajectory] = stage.session.trajectories()
        return made, trajectory

    made, trajectory = talk(work, [says("So: " + text)])
    assert made.message.content == "So: " + text
    assert made.message.tool_calls is None
    assert [record.error for record in trajectory.tool_calls] == ["malformed"]


def test_only_one_call_where_the_client_wants_one():
    two = says(call(text="a") + "\n" + call(text="b"))

    async def work(stage):
        made = await stage.chat([USER], tools=[ECHO], parallel_tool_calls=False)
        follow = [USER, answer(made.choices[0]), {"role": "tool", "tool_call_id": "x", "content": "a"}]
        await stage.chat(follow, tools=[ECHO])
        return made, stage.session.trajectories()

    made, [trajectory] = talk(work, [two, says("a")])
    [only] = made.choices[0].message.tool_calls
    assert json.loads(only.function.arguments) == {"text": "a"}
    first, cut, *_ = trajectory.segments
    assert list(first.token_ids) == two[: len(first.token_ids)]
    assert TOKENIZER.decode(list(first.token_ids)) == call(text="a")
    assert cut.token_ids[0] == CHAT.end_of_turn_id  # what the model did not say itself is the template's
    assert cut.provenance is Provenance.TEMPLATE


def test_reasoning_stands_apart_and_may_be_left_out_of_what_comes_back():
    thinking = says("<think>\nTwo and three.\n</think>\n\nFive.")

    async def work(stage):
        made = (await stage.chat([USER])).choices[0]
        assert made.message.content == "Five."
        assert made.message.reasoning_content == "Two and three."
        await stage.chat([USER, {"role": "assistant", "content": "Five."}, USER])
        return stage.session.trajectories()

    [trajectory] = talk(work, [thinking, says("Five again.")])
    assert list(trajectory.segments[0].token_ids) == thinking


# -- stops and limits ----------------------------------------------------------------------------------------------


def test_a_stop_text_cuts_the_turn_behind_the_token_that_completes_it():
    ids = says("The answer is 5. value")

    async def work(stage):
        made = await stage.chat([USER], stop=["nothing", "is"], extra_body={"return_token_ids": True})
        await stage.chat([USER, answer(made.choices[0]), USER])
        return made.choices[0], stage.session.trajectories()

    choice, [trajectory] = talk(work, [ids, says("5")])
    assert (choice.message.content, choice.finish_reason) == ("The answer", "stop")
    kept = choice.token_ids
    assert kept == ids[: len(kept)]
    assert "is" in TOKENIZER.decode(kept)
    assert "is" not in TOKENIZER.decode(kept[:-1])
    assert trajectory.response_ids[: len(kept) + 1] == [*kept, CHAT.end_of_turn_id]
    assert trajectory.response_mask[: len(kept) + 1] == [1] * len(kept) + [0]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_tokens_is_the_clients_and_no_end_of_the_conversation(name):
    ids = says("The answer is 5. value value")

    async def work(stage):
        made = (await stage.chat([USER], **{name: 3})).choices[0]
        assert made.finish_reason == "length"
        await stage.chat([USER, answer(made), USER])
        return stage.session.trajectories()

    [trajectory] = talk(work, [ids, says("5")])
    assert list(trajectory.segments[0].token_ids) == ids[:3]
    assert trajectory.stop_reason.value == "completed"


def test_seeds_repeat_a_draw_within_the_session_and_nothing_else_does():
    async def work(stage):
        async def draw(**more):
            made = await stage.chat([USER], max_tokens=8, extra_body={"return_token_ids": True}, **more)
            return [tuple(choice.token_ids) for choice in made.choices]

        assert await draw(seed=5) == await draw(seed=5)
        assert await draw(seed=5) != await draw(seed=6)
        assert await draw() != await draw()
        assert len(set(await draw(n=3))) == 3
        assert len(set(await draw(n=3, seed=5))) == 3

    talk(work, engine=native())


def test_a_constant_seed_gives_each_turn_its_own_random_numbers():
    """With no tools and hardly a prompt, a draw of the same numbers would often be the same token."""

    async def work(stage):
        history, seeds = [USER], set()
        for _ in range(3):
            made = await stage.chat(history, max_tokens=4, seed=42)
            seeds.add(stage.engine.seeds[-1])
            history = [*history, answer(made.choices[0]), USER]
        await stage.chat([USER], max_tokens=4, seed=42)
        return seeds, stage.engine.seeds

    class Seeded(Recorder):
        @property
        def seeds(self):
            return [params.seed for _, _, params in self.asked]

    seeds, asked = talk(work, engine=Seeded(lambda *_: says("5")))
    assert len(seeds) == 3
    assert asked[3] == asked[0]


# -- choices and streams -------------------------------------------------------------------------------------------


def test_several_choices():
    several = ask(lambda name, prompt, turn: says({"s": "one", "s#1": "two", "s#2": "value"}[name]), n=3)
    assert [(choice.index, choice.message.content) for choice in several.choices] == [
        (0, "one"),
        (1, "two"),
        (2, "value"),
    ]
    assert several.usage.completion_tokens == sum(len(says(text)) for text in ("one", "two", "value"))


async def joined(stream):
    """(messages of all choices joined from their deltas, finish reasons, usage, chunks)."""
    messages, reasons, usage, chunks = {}, {}, None, 0
    async for chunk in stream:
        chunks += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message = messages.setdefault(choice.index, {"content": "", "reasoning": "", "calls": []})
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for delta in choice.delta.tool_calls or []:
                if delta.index == len(message["calls"]):
                    message["calls"].append([delta.id, delta.function.name, ""])
                message["calls"][delta.index][2] += delta.function.arguments or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    return messages, reasons, usage, chunks


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 5.",
        "  two  spaces\n\nand lines ",
        "<think>\nHm.\n</think>\nSo\u2028 日本 🙂",
        "Look: " + call(text="a  b\n{}") + "\n" + call(text="é"),
        "",
    ],
)
def test_a_streams_deltas_join_to_the_message_of_the_object(text):
    async def work(stage):
        given = {"tools": [ECHO], "n": 2}
        whole = await stage.chat([USER], **given)
        stream = await stage.chat([USER], stream=True, stream_options={"include_usage": True}, **given)
        return whole, await joined(stream)

    whole, (messages, reasons, usage, chunks) = talk(work, lambda *_: says(text))
    for choice in whole.choices:
        found = messages[choice.index]
        assert found["content"] == (choice.message.content or "")
        assert found["reasoning"] == (getattr(choice.message, "reasoning_content", None) or "")
        calls = choice.message.tool_calls or []
        assert [c[1:] for c in found["calls"]] == [[c.function.name, c.function.arguments] for c in calls]
        assert reasons[choice.index] == choice.finish_reason
    assert usage == whole.usage
    assert chunks > 4


def test_without_usage_asked_for_no_chunk_has_it():
    async def work(stage):
        return await joined(await stage.chat([USER], stream=True))

    assert talk(work, [says("One.")])[2] is None


# -- other clients, other addresses --------------------------------------------------------------------------------


def test_models_and_health():
    async def work(stage):
        listed = [model.id async for model in stage.client.models.list()]
        one = await stage.client.models.retrieve("some/model")
        return listed, one.id

    assert talk(work, []) == (["policy"], "some/model")


def test_requests_at_once_are_branches():
    async def work(stage):
        made = await asyncio.gather(*(stage.chat([{"role": "user", "content": text}]) for text in "abc"))
        return [m.choices[0].message.content for m in made], stage.session.trajectories(), stage.engine

    engine = Recorder(lambda name, prompt, turn: says(TOKENIZER.decode(prompt).split("user\n")[1][0]), latency=0.2)
    contents, trajectories, engine = talk(work, engine=engine)
    assert contents == ["a", "b", "c"]
    assert len(trajectories) == 3
    assert len({name for name, _, _ in engine.asked}) == 3
    assert Counter(engine.opened) - Counter(engine.closed) == {"s": 1}  # the trajectory's own, for its next turn


@pytest.mark.parametrize("base", [ToolParser, HermesToolParser])
def test_a_parser_of_the_users_that_reads_ids_only(base):
    class Ids(base):
        async def extract_tool_calls(self, response_ids, tools=None):
            return "read: " + str(len(response_ids)), []

    async def work(stage):
        return await stage.chat([USER])

    assert talk(work, [says("5")], parser=Ids(TOKENIZER)).choices[0].message.content == "read: 2"


def test_content_given_in_parts_and_roles_by_their_new_names():
    async def work(stage):
        await stage.chat(
            [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
            ]
        )
        return stage.engine.asked[0][1]

    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert talk(work, [says("5")]) == CHAT.initial_ids(same)


def test_versions_of_the_weights_are_named():
    async def work(stage):
        await stage.engine.update_weights(None, 7)
        made = await stage.chat([USER])
        [trajectory] = stage.session.trajectories()
        return made.system_fingerprint, trajectory.segments[0].weight_versions

    fingerprint, versions = talk(work, [says("5")])
    assert fingerprint == "weights-7"
    assert set(versions) == {7}


def test_an_engine_that_samples_nothing_has_no_room():
    class Full:
        def open(self, ids): ...
        def close(self, name): ...

        async def generate(self, *_, **__):
            return TokenOutput([], [], "length", [])

    async def work(stage):
        with pytest.raises(openai.BadRequestError) as caught:
            await stage.chat([USER])
        return caught.value.code, stage.session.trajectories()[-1].stop_reason.value

    assert talk(work, engine=Full()) == ("context_length_exceeded", "prompt_too_long")
