"""`Trajectory`: its columns are those of its segments, whatever was asked before, and whoever changed the segments."""

import pickle
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.trajectory import Provenance, Rollout, Segment, StopReason, Trajectory

IDS = st.lists(st.integers(0, 99), max_size=4)
READS = ("response_ids", "response_mask", "response_log_probs", "response_length")
MOVES = st.one_of(
    st.tuples(st.just("sampled"), IDS),
    st.tuples(st.sampled_from([p.value for p in Provenance if p is not Provenance.SAMPLED]), IDS),
    st.tuples(st.just("read"), st.sampled_from(READS)),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.tuples(st.just("change"), st.tuples(st.integers(0, 9), IDS)),
)


def added(trajectory, who, ids):
    sampled = who == "sampled"
    trajectory.append(ids, Provenance(who), log_probs=[-0.5 * n for n in ids] if sampled else None)


def columns(segments):
    """The same by the definitions."""
    return {
        "response_ids": list(chain.from_iterable(s.token_ids for s in segments)),
        "response_mask": [int(s.provenance is Provenance.SAMPLED) for s in segments for _ in s.token_ids],
        "response_log_probs": [p for s in segments for p in s.log_probs or [0.0] * len(s.token_ids)],
        "response_length": sum(len(s.token_ids) for s in segments),
    }


def read(trajectory):
    return {name: getattr(trajectory, name) for name in READS}


@given(st.lists(MOVES, max_size=12))
def test_columns_are_those_of_the_segments(moves):
    trajectory = Trajectory("t", [7, 8])
    for what, value in moves:
        if what == "read":
            assert getattr(trajectory, value) == columns(trajectory.segments)[value]
        elif what == "drop":
            del trajectory.segments[-value or len(trajectory.segments) :]
        elif what == "change" and trajectory.segments:
            place, ids = value
            trajectory.segments[place % len(trajectory.segments)] = Segment(tuple(ids), Provenance.TOOL, 0)
        elif what != "change":
            added(trajectory, what, value)
    assert read(trajectory) == columns(trajectory.segments)
    assert trajectory.context_ids() == [7, 8, *trajectory.response_ids]


@pytest.mark.parametrize("name", READS[:3])
def test_what_is_handed_out_is_the_callers(name):
    trajectory = Trajectory("t", [])
    added(trajectory, "sampled", [1, 2])
    getattr(trajectory, name).append(9)
    trajectory.context_ids().append(9)
    assert read(trajectory) == columns(trajectory.segments)


def test_copies_are_independent():
    trajectory = Trajectory("t", [])
    added(trajectory, "sampled", list(range(500)))
    for copy in (pickle.loads(pickle.dumps(trajectory)), replace(trajectory, segments=list(trajectory.segments))):
        assert copy == trajectory
        assert read(copy) == read(trajectory)
        added(copy, "tool", [3])
        assert copy.response_length == 501
        assert trajectory.response_length == 500


def test_the_flat_view_is_of_the_segments_as_they_are():
    trajectory = Trajectory("t", [])
    added(trajectory, "sampled", [1, 2])
    added(trajectory, "tool", [3])
    assert trajectory.response_ids == [1, 2, 3]
    trajectory.segments[0] = Segment((4,), Provenance.USER, 0)
    output = trajectory.to_output()
    assert (output.response_ids, output.response_mask, output.response_logprobs) == ([4, 3], [0, 0], [0.0, 0.0])
    assert read(trajectory) == columns(trajectory.segments)


def test_a_view_is_refused_once_its_trajectory_was_changed():
    trajectory = Trajectory("t", [])
    added(trajectory, "sampled", [1, 2])
    added(trajectory, "tool", [3])
    output = trajectory.to_output()
    trajectory.segments[0] = Segment((1, 2), Provenance.TEMPLATE, 0)
    with pytest.raises(ValueError, match="response_mask differs"):
        output.to_trajectory("t")


def test_a_segment_put_in_by_hand_is_checked_too():
    trajectory = Trajectory("t", [], [Segment((1, 2), Provenance.SAMPLED, 0, (-1.0,))])
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        trajectory.to_output()


def test_each_token_has_a_log_prob():
    trajectory = Trajectory("t", [])
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        trajectory.append([1, 2], Provenance.SAMPLED, log_probs=[-1.0])
    with pytest.raises(ValueError, match="1 log-probs for 0 tokens"):
        trajectory.append([], Provenance.SAMPLED, log_probs=[-1.0])
    trajectory.append([], Provenance.TOOL)
    assert trajectory.segments == []


def test_a_reward_given_to_what_a_loop_returned_is_its_score():
    """Under the name that it has in an `AgentLoopOutput`, as a subclass that calls `super().run` may write it."""
    trajectory = Trajectory("t", [])
    trajectory.reward_score = 0.5
    assert (trajectory.rewards.score, trajectory.reward_score) == (0.5, 0.5)


def test_a_rollout_has_sequences_or_a_reason():
    earlier, main = Trajectory("t", [1]), Trajectory("t", [2])
    rollout = Rollout([earlier, main])
    assert (rollout.trajectory, rollout.earlier) == (main, [earlier])
    rollout.drop(StopReason.INFRASTRUCTURE)
    assert (rollout.trajectory, rollout.earlier, rollout.dropped) == (None, [], StopReason.INFRASTRUCTURE)
