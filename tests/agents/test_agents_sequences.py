"""Several sequences of one rollout: what a loop may return, what is refused, and that no draw counts twice."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from agents_stage import CHAT, QUESTION, SAMPLING, Recorder, check, context, run, says
from hypothesis import given
from hypothesis import strategies as st

from etude.agents import AGENT_LOOPS, AgentLoopBase, AgentLoopManager, AgentLoopOutput, TrajectoryClient
from etude.errors import ConfigError, EtudeError, InfrastructureError
from etude.inference import TokenOutput
from etude.trace import TraceOptions, Tracer
from etude.trajectory import Provenance, StopReason, Trajectory

PROMPT = CHAT.initial_ids(QUESTION)
SHORTER = CHAT.initial_ids(QUESTION[1:])
PARAMS = SAMPLING.params(0, 50, CHAT.stop_token_ids)


class Forgetful(AgentLoopBase):
    """Answers, forgets its system message, and answers again; `finish` may spoil what it returns."""

    @staticmethod
    def finish(outputs):
        return outputs

    async def run(self, sampling_params, **row):
        outputs = []
        for number, prompt in enumerate((PROMPT, SHORTER)):
            trajectory = Trajectory(f"{row['request_id']}#{number}", list(prompt), messages=list(QUESTION[number:]))
            drawn = await self.server_manager.generate(prompt_ids=prompt, sampling_params=sampling_params)
            trajectory.append(drawn.token_ids, Provenance.SAMPLED, log_probs=drawn.log_probs)
            trajectory.assistant_turns = 1
            outputs.append(trajectory.to_output())
        return self.finish(outputs)


def forgetful(finish):
    return type("Spoiled", (Forgetful,), {"finish": staticmethod(finish)})


def roll(rows=2, scorer=None, **given):
    return run("forgetful", rows, [says("one"), says("two three")], scorer=scorer, **given)


def test_the_last_sequence_is_the_trajectory_and_the_others_are_kept_in_time_order(loop_named):
    loop_named("forgetful", Forgetful)
    scored = []

    async def scorer(trajectory, row):
        scored.append(trajectory)
        trajectory.rewards.score = 1.0

    results, engine = roll(3, scorer)
    for result in results:
        assert [t.prompt_ids for t in (*result.earlier, result.trajectory)] == [PROMPT, SHORTER]
        assert [t.response_ids for t in (*result.earlier, result.trajectory)] == [says("one"), says("two three")]
        assert all(t.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": -1} for t in result.earlier)
        assert result.trajectory.sampling == result.earlier[0].sampling
        assert result.earlier[0].rewards.score is None
    assert [id(t) for t in scored] == [id(result.trajectory) for result in results]
    seeds = [params.seed for _, _, params in engine.asked]
    assert len(set(seeds)) == 6


def test_a_trace_tells_how_many_and_describes_the_main_one(loop_named, tmp_path):
    loop_named("forgetful", Forgetful)
    path = tmp_path / "traces.jsonl"
    tracer = Tracer.of(TraceOptions("jsonl", path=str(path)), "p", "e")
    shared = replace(context(), tracer=tracer)
    row = {"raw_prompt": QUESTION, "uid": "u0", "rollout_index": 0, "agent_name": "forgetful"}
    manager = AgentLoopManager(shared, Recorder([says("one"), says("two three")]))
    asyncio.run(manager.generate([row], SAMPLING))
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    (whole,) = [span["attributes"] for span in spans if span["kind"] == "trajectory"]
    assert (whole["sequences"], whole["response_tokens"]) == (2, len(says("two three")))


def test_a_list_of_one_is_that_one(loop_named):
    loop_named("forgetful", forgetful(lambda outputs: outputs[1:]))
    ((result,), _) = roll(1)
    assert result.earlier == []
    assert result.trajectory.prompt_ids == SHORTER


def bare(output):
    """The same output without a trajectory behind it."""
    return AgentLoopOutput(output.prompt_ids, output.response_ids, output.response_mask)


def test_outputs_built_by_hand_have_the_engines_log_probs(loop_named):
    loop_named("forgetful", forgetful(lambda outputs: [bare(output) for output in outputs]))
    ((result,), _) = roll(1)
    for sequence in (*result.earlier, result.trajectory):
        assert sequence.response_mask == [1] * sequence.response_length
        assert len(sequence.response_log_probs) == sequence.response_length


def rewarded(outputs, **fields):
    for name, value in fields.items():
        setattr(outputs[0].trajectory.rewards, name, value)
    return outputs


def longer(outputs):
    outputs[0].trajectory.append([3] * 40, Provenance.TOOL)
    return [outputs[0].trajectory.to_output(), outputs[1]]


@pytest.mark.parametrize(
    ("finish", "error", "message"),
    [
        (
            lambda outputs: [],
            EtudeError,
            "must return a Trajectory or AgentLoopOutput, or several, not an empty list",
        ),
        (lambda outputs: [None, *outputs], EtudeError, "or several, not NoneType"),
        (lambda outputs: tuple(outputs), EtudeError, "or several, not tuple"),
        (lambda outputs: rewarded(outputs, score=1.0), EtudeError, "gave sequence 0 of 2 a reward; the last one"),
        (lambda outputs: rewarded(outputs, steps=[(0, "t", 1.0)]), EtudeError, "gave sequence 0 of 2 a reward"),
        (lambda outputs: rewarded(outputs, final={"t": 0.0}), EtudeError, "gave sequence 0 of 2 a reward"),
        (lambda outputs: [outputs[0], *outputs], EtudeError, "sequence 1 of u0/0/0 marks response token 0 .* claims"),
        (lambda outputs: [bare(outputs[1]), bare(outputs[1])], EtudeError, "trained on twice"),
        (longer, ConfigError, "more than data.max_response_length=30"),
        (
            lambda outputs: [AgentLoopOutput(SHORTER, outputs[0].response_ids, outputs[0].response_mask), outputs[1]],
            EtudeError,
            "marked response token 0",
        ),
    ],
)
def test_what_is_refused_says_why_in_one_line(loop_named, finish, error, message):
    loop_named("forgetful", forgetful(finish))
    with pytest.raises(error, match=message) as caught:
        roll(1, response_length=30)
    assert "\n" not in str(caught.value)


def test_a_dropped_row_keeps_no_sequence(loop_named):
    loop_named("forgetful", Forgetful)

    async def broken(trajectory, row):
        raise InfrastructureError("the judge is down")

    results, _ = roll(2, broken)
    assert [(r.trajectory, r.earlier, r.dropped) for r in results] == [(None, [], StopReason.INFRASTRUCTURE)] * 2

    def too_long(outputs):
        outputs[1].trajectory.stop_reason = StopReason.PROMPT_TOO_LONG
        return outputs

    loop_named("forgetful_of_limits", forgetful(too_long))
    AGENT_LOOPS._items["forgetful"] = AGENT_LOOPS.get("forgetful_of_limits")
    ((result,), _) = roll(1)
    assert (result.trajectory, result.earlier, result.dropped) == (None, [], StopReason.PROMPT_TOO_LONG)


def test_a_retried_rollout_keeps_the_sequences_of_the_last_run_alone(loop_named):
    runs = []

    def breaks_once(outputs):
        runs.append(outputs)
        if len(runs) == 1:
            raise InfrastructureError("lost after both sequences")
        return outputs

    loop_named("forgetful", forgetful(breaks_once))
    ((result,), _) = roll(1)
    assert (result.attempts, result.failures) == (2, 1)
    assert [t.request_id for t in (*result.earlier, result.trajectory)] == ["u0/0/1#0", "u0/0/1#1"]


# -- random numbers ----------------------------------------------------------------------------------------------


def test_requests_under_way_at_once_draw_with_seeds_of_their_own():
    async def main():
        client = TrajectoryClient(Recorder(lambda *_: says("a"), latency=0.001), "r")
        await asyncio.gather(*[client.generate(prompt_ids=PROMPT, sampling_params=PARAMS) for _ in range(4)])
        await client.generate(prompt_ids=SHORTER, sampling_params=PARAMS)
        return [params.seed for _, _, params in client._engine.asked]

    seeds = asyncio.run(main())
    assert len(set(seeds)) == 5
    assert seeds == asyncio.run(main())


# -- every draw at most once -------------------------------------------------------------------------------------


_IDS = st.lists(st.integers(1, 2), max_size=3)


@given(
    turns=st.lists(st.tuples(st.integers(0, 9), _IDS, _IDS), min_size=1, max_size=5),
    picks=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), min_size=2, max_size=4),
)
def test_a_token_may_be_claimed_as_often_as_it_was_drawn(turns, picks):
    """Draws after any part of what came before; sequences that end in any of them. The rule: no token is claimed, after
    the same ids, by more sequences than the engine drew it there."""
    asked, drawn, context = [], [], [1]
    for kept, added, sampled in turns:
        context = [1, *context[1 : 1 + kept], *added]
        asked.append(list(context))
        drawn.append(list(sampled))
        context = context + sampled

    class Engine(Recorder):
        async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
            self.asked.append(prompt_ids)
            tokens = drawn[len(self.asked) - 1]
            return TokenOutput(tokens, [-1.0] * len(tokens), "stop")

    client = TrajectoryClient(Engine([]), "r")

    async def main():
        for ids in asked:
            await client.generate(prompt_ids=ids, sampling_params=PARAMS)

    asyncio.run(main())
    draws = Counter()
    for ids, sampled in zip(asked, drawn):
        draws.update(tuple(ids + sampled[: i + 1]) for i in range(len(sampled)))
    outputs, claims = [], Counter()
    for turn, cut in picks:
        whole = (asked[turn % len(asked)] + drawn[turn % len(asked)])[: 1 + cut]
        ends = [tuple(whole[: end + 1]) for end in range(1, len(whole))]
        mask = [int(draws[end] > 0) for end in ends]
        claims.update(end for end, sampled in zip(ends, mask) if sampled)
        outputs.append(AgentLoopOutput(whole[:1], whole[1:], mask))
    if all(count <= draws[end] for end, count in claims.items()):
        check(client, *outputs)
    else:
        with pytest.raises(EtudeError, match="trained on twice"):
            check(client, *outputs)


# -- an output and the trajectory behind it --------------------------------------------------------------------------


def changed(**fields):
    """A loop that changes its output after it was made of a trajectory."""

    def finish(outputs):
        for name, value in fields.items():
            setattr(outputs[-1], name, value(getattr(outputs[-1], name)))
        return outputs

    return forgetful(finish)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_mask", lambda mask: [0] * len(mask)),
        ("response_ids", lambda ids: [*ids[:-1], 3]),
        ("response_logprobs", lambda values: [value - 1 for value in values]),
        ("prompt_ids", lambda ids: ids[:-1]),
        ("images", lambda _: (SimpleNamespace(digest=1),)),
    ],
)
def test_an_output_that_says_something_else_than_its_trajectory_is_refused(loop_named, name, value):
    """A turn that is masked out in the flat view alone would be trained on all the same."""
    loop_named("forgetful", changed(**{name: value}))
    with pytest.raises(EtudeError) as caught:
        roll(1)
    assert "\n" not in str(caught.value)
    if name in ("response_mask", "response_logprobs"):  # of the others the engine's witness speaks first
        assert f"{name} differs from that of its trajectory, which is used for training" in str(caught.value)


def test_a_trajectory_that_claims_more_than_its_output_is_refused(loop_named):
    def claims(outputs):
        outputs[-1].trajectory.append([5, 6], Provenance.SAMPLED, log_probs=[-0.1] * 2)
        return outputs

    loop_named("forgetful", forgetful(claims))
    with pytest.raises(EtudeError, match="response_ids differs from that of its trajectory"):
        roll(1)


def test_a_reward_set_on_the_output_is_the_trajectorys(loop_named):
    loop_named("forgetful", changed(reward_score=lambda _: 0.5))
    ((result,), _) = roll(1)
    assert result.trajectory.rewards.score == 0.5


def test_a_view_without_its_trajectory_may_mask_a_turn_out(loop_named):
    loop_named("forgetful", changed(trajectory=lambda _: None, response_mask=lambda mask: [0] * len(mask)))
    ((result,), _) = roll(1)
    assert result.trajectory.response_mask == [0] * result.trajectory.response_length
