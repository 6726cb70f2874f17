"""The log-probs that are trained on: the engine's for every sampled token, whatever the loop says of them."""

import json
import pickle
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from agents_stage import Drawn, Recorder, loop_that_returns, run, says

from etude.agents import (
    AgentLoopBase,
    AgentLoopOutput,
    SingleTurnAgentLoop,
    to_batch,
)
from etude.agents.batch import concat_batches
from etude.errors import EtudeError
from etude.inference import TokenOutput
from etude.trajectory import KEPT_IDS, Rollout, StopReason, Trajectory


def without_log_probs(trajectory):
    for number, segment in enumerate(trajectory.segments):
        trajectory.segments[number] = segment._replace(log_probs=None)
    return trajectory.to_output()


def flat(change):
    def made(trajectory):
        values = change(trajectory.response_log_probs)
        return AgentLoopOutput(
            trajectory.prompt_ids, trajectory.response_ids, trajectory.response_mask, response_logprobs=values
        )

    return made


TURNS = [says("one"), says("two three")]


@pytest.mark.parametrize(
    "made",
    [
        Trajectory.to_output,
        without_log_probs,
        flat(lambda values: None),
        flat(lambda values: values),
        flat(lambda values: [float(np.float32(value)) for value in values]),  # as a tensor would have held them
        flat(lambda values: [7.0 if value == 0 else value for value in values]),  # of what was not sampled
    ],
)
def test_the_log_probs_that_are_trained_on_are_the_engines(loop_named, made):
    loop_named("own", loop_that_returns(made))
    ([result], _) = run("own", engine=Drawn(TURNS))
    expected = [-(1 + token / 7 + place / 1000) for turn in TURNS for place, token in enumerate(turn)]
    trajectory = result.trajectory
    assert [v for v, m in zip(trajectory.response_log_probs, trajectory.response_mask) if m] == expected
    assert [v for v, m in zip(trajectory.response_log_probs, trajectory.response_mask) if not m] == [0.0, 0.0]


class Kept(Drawn):
    """Draws every other token from it and its successor alone."""

    async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
        output = await super().generate(request_id, prompt_ids, sampling_params)
        kept = [array("i", [t, t + 1]) if place % 2 else None for place, t in enumerate(output.token_ids)]
        return replace(output, kept_ids=kept)


@pytest.mark.parametrize("made", [Trajectory.to_output, flat(lambda values: None)])
def test_a_sampled_token_keeps_what_the_engine_drew_it_from(loop_named, made):
    """However the loop returns it; what others wrote has none, and no dump has any."""
    loop_named("own", loop_that_returns(made))
    ([result], _) = run("own", engine=Kept(TURNS))
    trajectory = pickle.loads(pickle.dumps(result.trajectory))
    expected = [place % 2 for turn in TURNS for place, _ in enumerate(turn)]
    sampled = [kept for kept, m in zip(trajectory.kept_ids, trajectory.response_mask) if m]
    assert [0 if kept is None else 1 for kept in sampled] == expected
    for kept, token in zip(trajectory.kept_ids, trajectory.response_ids):
        assert kept is None or kept.tolist() == [token, token + 1]
    assert len(trajectory.kept_ids) == trajectory.response_length
    assert "kept_ids" not in json.dumps(trajectory.to_record())
    batch = to_batch([result, Rollout(dropped=StopReason.INFRASTRUCTURE)], 0)
    assert [len(kept) for kept in batch.non_tensor_batch[KEPT_IDS]] == [trajectory.response_length, 0]
    ([plain], _) = run("own", engine=Drawn(TURNS))
    without = to_batch([plain], 0)
    assert KEPT_IDS not in without.non_tensor_batch
    for part in (batch, without):  # as a step's batches are
        part.batch["token_level_scores"] = torch.zeros_like(part.batch["rollout_log_probs"])
    both = concat_batches([without, batch]).non_tensor_batch[KEPT_IDS]
    assert [len(kept) for kept in both] == [0, trajectory.response_length, 0]


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda values: [0.0] * len(values), "0"),
        (lambda values: [value - 0.01 for value in values], "-"),
        (lambda values: [float("nan")] * len(values), "nan"),
        (lambda values: [float("-inf")] * len(values), "-inf"),
        (lambda values: [*values[1:], values[0]], "-"),
    ],
)
def test_other_log_probs_than_the_engines_are_refused(loop_named, change, value):
    def in_segments(trajectory):
        values = change(trajectory.response_log_probs)
        start = 0
        for number, segment in enumerate(trajectory.segments):
            end = start + len(segment.token_ids)
            trajectory.segments[number] = segment._replace(log_probs=tuple(values[start:end]))
            start = end
        return trajectory.to_output()

    for made in (flat(change), in_segments):
        loop_named("own", loop_that_returns(made))
        with pytest.raises(EtudeError, match=f"gave response token 0 of .* the log-prob {value}") as caught:
            run("own", engine=Drawn(TURNS))
        assert "\n" not in str(caught.value)


def test_of_twin_draws_the_one_that_the_loop_took_counts(loop_named):
    """The same token after the same ids, drawn twice: with other log-probs, as after an update of the weights, and only the
    first time under a grammar."""

    class Later(Drawn):
        async def generate(self, *args, **kwargs):
            output = await super().generate(*args, **kwargs)
            values = [value - len(self.asked) for value in output.log_probs]
            kept = [array("i", [token]) for token in output.token_ids] if len(self.asked) == 1 else None
            return TokenOutput(output.token_ids, values, output.stop_reason, kept_ids=kept)

    class Twice(AgentLoopBase):
        async def run(self, sampling_params, **row):
            prompt = self.chat.initial_ids(row["raw_prompt"])
            drawn = [
                await self.server_manager.generate(prompt_ids=prompt, sampling_params=sampling_params) for _ in range(2)
            ]
            taken = drawn[self.config["taken"]]
            return AgentLoopOutput(prompt, taken.token_ids, [1] * len(taken.token_ids), taken.log_probs)

    loop_named("own", Twice)
    turn = TURNS[0]
    for taken, kept in ((0, tuple(array("i", [token]) for token in turn)), (1, (None,) * len(turn))):
        ([result], _) = run("own", engine=Later([turn, turn]), config={"taken": taken})
        expected = [-(1 + t / 7 + i / 1000) - 1 - taken for i, t in enumerate(turn)]
        assert result.trajectory.response_log_probs == pytest.approx(expected, abs=1e-12)
        assert (result.trajectory.kept_ids or (None,) * len(turn)) == kept


def test_an_engine_that_draws_with_no_finite_log_prob_is_broken(loop_named):
    class Broken(Recorder):
        async def generate(self, *args, **kwargs):
            output = await super().generate(*args, **kwargs)
            return TokenOutput(output.token_ids, [float("nan")] * len(output.token_ids), output.stop_reason)

    loop_named("own", SingleTurnAgentLoop)
    ([result], _) = run("own", engine=Broken([says("4")]), infrastructure_retries=0)
    assert result.dropped is StopReason.INFRASTRUCTURE
    assert "not finite" in result.cause
