"""Whatever a client does with its history (lets it grow, edits it, forks it, asks twice at once), over the real engine:

- what is trained on is what the engine saw and sampled, each token once, and the mask is who wrote it;
- a full forward pass gives the engine's log-probs;
- nothing that others wrote contains a control token.
"""

import asyncio

import pytest
import torch
from exact_stage import TEMPLATES, full_log_probs, tokenizer_of
from gateway_stage import ECHO, SPEC, request_of, session
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agents.gateway.chat_api import CHAT
from etude.agents.gateway.request import GatewayError
from etude.agents.validation import check_sampled
from etude.chat import ChatTemplate, ParsedResponse, ToolParser
from etude.inference import NativeEngine, NativeEngineOptions
from etude.models import build_tiny_model
from etude.schemas import FunctionCall
from etude.trajectory import Provenance

SPELLED = ["<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "</tool_response>", "<tool_call>", "<|im_"]
words = st.lists(st.sampled_from([*SPELLED, "value ", "7", "é", "日本", "\n", " "]), min_size=1, max_size=8).map(
    "".join
)
moves = st.one_of(
    st.tuples(st.just("grow"), words, st.integers(1, 3)),
    st.tuples(st.just("tools"), words, st.integers(1, 2)),
    st.tuples(st.just("again"), words, st.integers(1, 2)),
    st.tuples(st.just("edit"), words, st.integers(1, 2)),
    st.tuples(st.just("back"), words, st.integers(1, 2)),
    st.tuples(st.just("anew"), words, st.integers(1, 2)),
    st.tuples(st.just("both"), words, st.integers(1, 2)),
)
ENDS = tuple(range(10, 390, 9))  # many ids end a turn, so that an untrained model has some


class EveryOther(ToolParser):
    """A turn with an `e` in it calls; one with a `q` writes a call that nobody can read."""

    @property
    def stop_token_ids(self):
        return ENDS

    def parse(self, text, tools=None):
        calls = [FunctionCall(name="echo", arguments='{"text": "a"}')] if "e" in text else []
        return ParsedResponse(text.replace("e", "").strip(), calls, ["no"] if "q" in text else [])


class Policy:
    """A tiny model whose chat template is one of several kinds."""

    def __init__(self, template):
        self.tokenizer = tokenizer_of(template)
        self.chat = ChatTemplate(self.tokenizer)
        self.model = build_tiny_model(SPEC, self.tokenizer)
        self.parser = EveryOther(self.tokenizer)

    def session(self, engine, **given):
        return session(engine, parser=self.parser, chat=self.chat, response_length=300, prompt_length=300, **given)


POLICIES = {name: Policy(template) for name, template in TEMPLATES.items()}


class Witness(NativeEngine):
    """Remembers what it was asked, and what it drew."""

    def __init__(self, policy):
        super().__init__(policy.model, NativeEngineOptions(tokenizer=policy.tokenizer))
        self.seen = []

    async def generate(self, request_id, prompt_ids, sampling_params, **media):
        output = await super().generate(request_id, prompt_ids, sampling_params, **media)
        self.seen.append((list(prompt_ids), output))
        return output


async def play(made, steps, stop):
    """Plays a client: `history` is the conversation as it knows it."""
    history = [{"role": "user", "content": "What is 2 + 3?"}]
    choices = []

    async def ask(messages, n=1):
        body = {"messages": messages, "tools": [ECHO], "n": n, "max_tokens": 12, **stop}
        completion = await made.complete(request_of(body))
        return [choice["message"] for choice in CHAT.answer(completion, made._context.tokenizer)["choices"]]

    for kind, text, number in steps:
        user = {"role": "user", "content": text}
        try:
            if kind == "both":
                both = await asyncio.gather(ask([*history, user]), ask([user]), return_exceptions=True)
                if refused := [each for each in both if isinstance(each, Exception)]:  # none goes on beyond the test
                    raise refused[0]
                choices, asked = both[0], [*history, user]
            else:
                answered = [*history, choices[number % len(choices)]] if choices else history
                asked = {
                    "grow": [*answered, user] if choices else history,
                    "tools": [*answered, *[{"role": "tool", "tool_call_id": "x", "content": text}] * number]
                    if choices
                    else history,
                    "again": history,
                    "edit": [*history, {"role": "assistant", "content": text}, user],
                    "back": history[:1],
                    "anew": [user],
                }[kind]
                choices = await ask(asked, number)
            history = asked
        except GatewayError as refused:
            if refused.status != 400:
                raise
            choices = []


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20)
@given(
    steps=st.lists(moves, min_size=1, max_size=6),
    stop=st.sampled_from([{}, {}, {"stop": ["a", "7"]}, {"parallel_tool_calls": False}]),
    temperature=st.sampled_from([1.0, 0.6]),
)
def test_what_is_trained_on_is_what_the_engine_saw_and_sampled(name, steps, stop, temperature):
    policy = POLICIES[name]

    async def main():
        engine = Witness(policy)
        made = policy.session(engine, temperature=temperature)
        await asyncio.wait_for(play(made, steps, stop), 60)
        engine.close("s")
        assert engine._rows == {}
        return engine, made

    engine, made = asyncio.run(main())
    if not engine.seen:
        return
    trajectories = made.trajectories()
    check_sampled(trajectories, made._client)
    unclaimed = list(engine.seen)
    for trajectory in trajectories:
        seen = list(trajectory.prompt_ids)
        for segment in trajectory.segments:
            ids = list(segment.token_ids)
            if segment.provenance is Provenance.SAMPLED:
                place = next(
                    n
                    for n, (asked, drawn) in enumerate(unclaimed)
                    if asked == seen
                    and drawn.token_ids[: len(ids)] == ids
                    and drawn.log_probs[: len(ids)] == list(segment.log_probs)
                )
                drawn = unclaimed.pop(place)[1]
                assert stop or ids == drawn.token_ids
            elif segment.provenance is not Provenance.TEMPLATE:
                assert not set(ids) & set(policy.tokenizer.all_special_ids)
            seen += ids
        mask = [int(s.provenance is Provenance.SAMPLED) for s in trajectory.segments for _ in s.token_ids]
        assert trajectory.response_mask == mask
        assert len(mask) <= 300
        again = full_log_probs(policy.model, trajectory, temperature)[torch.tensor(mask).bool()]
        recorded = torch.tensor(trajectory.response_log_probs, dtype=torch.float64)[torch.tensor(mask).bool()]
        torch.testing.assert_close(recorded, again, rtol=0, atol=1e-4)
    assert unclaimed == []  # every draw is in one sequence


def test_the_clients_above_do_what_they_are_meant_to():
    """The property would hold of sessions in which nothing happens."""

    async def main():
        engine = Witness(POLICIES["own"])
        made = POLICIES["own"].session(engine)
        kinds = ["grow", "grow", "tools", "again", "edit", "grow", "both", "back", "anew"]
        await play(made, [(kind, "value 7 <|im_end|>", 2) for kind in kinds], {})
        return made.trajectories()

    trajectories = asyncio.run(main())
    assert len(trajectories) >= 5
    owners = [segment.provenance for trajectory in trajectories for segment in trajectory.segments]
    assert set(owners) == set(Provenance)
    assert max(trajectory.assistant_turns for trajectory in trajectories) >= 3
    assert min(len(trajectory.segments) for trajectory in trajectories) >= 1
    assert any(len(t.prompt_ids) > len(POLICIES["own"].chat.initial_ids(t.messages[:1])) + 40 for t in trajectories)


@pytest.mark.parametrize("n", [1, 4])
def test_a_mask_that_claims_more_is_refused(n):
    """The guard of the property: the witness would object."""

    async def main():
        made = POLICIES["own"].session(Witness(POLICIES["own"]))
        await made.complete(request_of({"messages": [{"role": "user", "content": "a"}], "n": n, "max_tokens": 5}))
        return made

    made = asyncio.run(main())
    trajectory = made.trajectories()[-1]
    trajectory.prompt_ids = trajectory.prompt_ids[:-1]
    with pytest.raises(Exception, match="marked response token 0"):
        check_sampled([trajectory], made._client)
