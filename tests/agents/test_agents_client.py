"""The trajectory client: seeds, provenance, and what it refuses."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from agents_stage import CHAT, QUESTION, SAMPLING, Recorder, check, encode, says
from hypothesis import given
from hypothesis import strategies as st

from etude.agents import AgentLoopOutput, TrajectoryClient
from etude.agents.validation import validate_output
from etude.errors import ConfigError, EngineError, EtudeError, InfrastructureError
from etude.inference import TokenOutput
from etude.schemas import ImageInput
from etude.trajectory import RoutedExperts

PROMPT = CHAT.initial_ids(QUESTION)
PARAMS = SAMPLING.params(0, 50, CHAT.stop_token_ids)


def client_after(script, prompts):
    """A client whose engine, or one that follows a script, was asked with each of `prompts`."""
    client = TrajectoryClient(script if isinstance(script, Recorder) else Recorder(script), "r")

    async def main():
        for prompt in prompts:
            await client.generate("whatever", prompt_ids=prompt, sampling_params=PARAMS)

    asyncio.run(main())
    return client


def drawn_log_probs(client, made):
    """For each response token its log-prob as the engine drew it there; 0.0 for the others."""
    found = [0.0] * len(made.response_ids)
    for place, log_probs, *_ in check(client, made)[0]:
        found[place : place + len(log_probs)] = log_probs
    return found


def output(response, mask, prompt=PROMPT):
    return AgentLoopOutput(prompt_ids=list(prompt), response_ids=response, response_mask=mask)


def test_each_turn_draws_with_a_seed_of_its_own_under_the_trajectorys_name():
    client = client_after([says("a"), says("b")], [PROMPT, PROMPT])
    asked = client._engine.asked
    assert [name for name, _, _ in asked] == ["r", "r"]
    assert asked[0][2].seed != asked[1][2].seed
    again = client_after([says("a"), says("b")], [PROMPT, PROMPT])._engine.asked
    assert [params.seed for _, _, params in asked] == [params.seed for _, _, params in again]


class Routed(Recorder):
    """Routes every token that it has seen in its n-th answer to expert n."""

    async def generate(self, request_id, prompt_ids, sampling_params):
        made = await super().generate(request_id, prompt_ids, sampling_params)
        known = len(prompt_ids) + len(made.token_ids) - 1  # the last token was not fed to the model
        return replace(made, routed_experts=RoutedExperts.of(np.full((known, 2, 1), len(self.asked))))


def routes(experts):
    return experts.array()[:, 0, 0].tolist()


def test_a_token_keeps_the_experts_that_it_was_first_sampled_with():
    """A later turn may prefill the context anew, by kernels that route some token otherwise than when it was sampled."""
    one, tool, two = says("one"), encode("tool"), says("two")
    client = client_after(Routed([one, two]), [PROMPT, PROMPT + one + tool])
    [history] = client.histories
    assert routes(history.experts) == [1] * (len(PROMPT + one) - 1) + [2] * len(tool + two)


@pytest.mark.parametrize("left_out", [0, 2])
def test_a_sequence_has_the_experts_of_its_own_branch_and_of_no_later_token(left_out):
    long, short = says("a first answer that is longer"), says("two")
    client = client_after(Routed([long, short]), [PROMPT, PROMPT])
    kept = short[: len(short) - left_out]
    [sequence] = validate_output(output(kept, [1] * len(kept)), client, "own", 50)
    assert routes(sequence.routed_experts) == [2] * (len(PROMPT + kept) - (not left_out))


def test_nobody_sampled_anything():
    client = TrajectoryClient(Recorder([]), "r")
    check(client, output([1, 2], [0, 0]))
    with pytest.raises(EtudeError, match="marked response token 1"):
        check(client, output([1, 2], [0, 1]))


def test_media_of_other_loops_are_understood_or_refused():
    async def ask(**media):
        return await TrajectoryClient(Recorder([says("a")]), "r").generate(
            "x", prompt_ids=PROMPT, sampling_params=PARAMS, **media
        )

    assert asyncio.run(ask(image_data=None, video_data=None)).token_ids == says("a")
    assert asyncio.run(ask(image_data=[], video_data=[], mm_processor_kwargs={}, priority=0)).token_ids == says("a")
    image = ImageInput.of(torch.zeros(4, 8), (1, 2, 2), merge_size=2)
    assert asyncio.run(ask(image_data=[image])).token_ids == says("a")
    with pytest.raises(ConfigError, match="takes images as `read_images` gives them, not str"):
        asyncio.run(ask(images=["pixels"]))
    with pytest.raises(ConfigError, match="takes no 'video_data'"):
        asyncio.run(ask(video_data=["frames"]))
    with pytest.raises(ConfigError, match="unknown sampling parameter 'temprature'; did you mean 'temperature'"):
        asyncio.run(TrajectoryClient(Recorder([]), "r").generate(prompt_ids=PROMPT, sampling_params={"temprature": 1}))


def test_an_aborted_request_is_broken_infrastructure_and_a_finished_trajectory_asks_no_more():
    class Aborting(Recorder):
        async def generate(self, *args, **kwargs):
            return TokenOutput([5], [0.0], "aborted")

    client = TrajectoryClient(Aborting([]), "r")
    with pytest.raises(EngineError, match="aborted the request of trajectory r"):
        asyncio.run(client.generate(prompt_ids=PROMPT, sampling_params=PARAMS))
    client.end()
    with pytest.raises(InfrastructureError, match="trajectory r is over"):
        asyncio.run(client.generate(prompt_ids=PROMPT, sampling_params=PARAMS))


_IDS = st.lists(st.integers(1, 2), max_size=4)


@given(
    turns=st.lists(st.tuples(_IDS, st.integers(0, 9), _IDS), min_size=1, max_size=5),
    prompt=st.integers(0, 4),
    noise=_IDS,
)
def test_what_was_drawn_is_found_wherever_a_context_goes(turns, prompt, noise):
    """Turns asked with any part of what came before; against the rule, read off token by token."""
    asked, drawn, context = [], [], [1]
    for added, kept, sampled in turns:
        context = [1, *context[1 : 1 + kept], *added]
        asked.append(list(context))
        drawn.append(list(sampled))
        context += sampled

    class Engine(Recorder):
        async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
            turn = len(self.asked)
            self.asked.append(prompt_ids)
            return TokenOutput(drawn[turn], [-float(turn + 1)] * len(drawn[turn]), "stop")

    client = TrajectoryClient(Engine([]), "r")

    async def main():
        for ids in asked:
            await client.generate(prompt_ids=ids, sampling_params=PARAMS)

    asyncio.run(main())
    whole = [*context, *noise]
    split = min(1 + prompt, len(whole))
    expected = [0.0] * (len(whole) - split)
    for turn, (ids, sampled) in enumerate(zip(asked, drawn)):
        for offset in range(len(sampled)):
            end = len(ids) + offset + 1
            if whole[:end] != ids + sampled[: offset + 1]:
                break
            if end > split:
                expected[end - 1 - split] = -float(turn + 1)
    made = AgentLoopOutput(prompt_ids=whole[:split], response_ids=whole[split:], response_mask=[0] * len(expected))
    assert drawn_log_probs(client, made) == expected
    made.response_mask = [int(p != 0) for p in expected]
    check(client, made)
    for place, p in enumerate(expected):
        if p == 0:
            made.response_mask[place] = 1
            with pytest.raises(EtudeError, match=f"marked response token {place} "):
                check(client, made)
            break
