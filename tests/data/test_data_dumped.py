"""Rollout dumps as training data: the very tokens, the right rollouts, the right pairs."""

import json
import math

import pytest

from etude.data.dumped import is_dump, rank_pairs, read_dumps, select_rollouts
from etude.dumps import rollout_record, sequence_record
from etude.errors import DataError
from etude.trajectory import Provenance, StopReason, Trajectory


def trajectory(number):
    """A prompt, two sampled turns and a tool's answer between them; token 0 of the prompt is the number."""
    made = Trajectory("r", [number, 1, 2])
    made.append([3, 4], Provenance.SAMPLED, log_probs=[-0.5, -0.25])
    made.append([5, 6, 7], Provenance.TOOL)
    made.append([8, 9], Provenance.SAMPLED, log_probs=[-0.1, -0.2])
    made.stop_reason = StopReason.COMPLETED
    return made


def record(uid, score, number=0, **more):
    made = rollout_record(trajectory(number), {"uid": uid}, step=1, input="", output="", score=score)
    return made | more


def dump(folder, *records, name="1.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return str(path)


def numbers(rollouts):
    return [rollout.sequences[0][0][0][0] for rollout in rollouts]


def test_ids_and_provenance_are_the_dumps_own(tmp_path):
    path = dump(tmp_path, record("a", 1.0))
    assert is_dump(path)
    (rollout,) = read_dumps([path])
    ((prompt, *rest),) = rollout.sequences
    assert prompt == ([0, 1, 2], Provenance.TEMPLATE)
    assert rest == [([3, 4], Provenance.SAMPLED), ([5, 6, 7], Provenance.TOOL), ([8, 9], Provenance.SAMPLED)]


def test_a_rollout_of_several_sequences_stays_together(tmp_path):
    earlier = sequence_record(trajectory(7), input="", output="")
    (rollout,) = read_dumps([dump(tmp_path, record("a", 1.0, earlier=[earlier]))])
    assert [sequence[0][0][0] for sequence in rollout.sequences] == [7, 0]


def test_each_player_of_a_game_is_imitated_for_its_own_reward(tmp_path):
    """The winner's moves, not those of the loser whom it played: white of the first game, black of the second."""

    def game(number, white_won):
        white, black = trajectory(number), trajectory(10 + number)
        for each, role, won in ((white, "white", white_won), (black, "black", not white_won)):
            each.role, each.rewards.score = role, float(won)
        earlier = [sequence_record(white, input="", output="")]
        score = black.rewards.score
        return rollout_record(black, {"uid": "a"}, step=1, input="", output="", score=score, earlier=earlier)

    rollouts = read_dumps([dump(tmp_path, game(0, True), game(1, False))])
    assert numbers(select_rollouts(rollouts, 1.0, None)) == [0, 11]
    assert [numbers(pair) for pair in rank_pairs(rollouts, None, None)] == [[0, 1], [11, 10]]


def test_conversations_are_no_dump(tmp_path):
    path = dump(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})
    assert not is_dump(path)


SCORES = [("a", 0.0), ("a", 1.0), ("a", 1.0), ("b", 0.5), ("b", 0.2), ("c", None), ("c", 0.9), ("a", 0.7)]


@pytest.mark.parametrize(
    ("low", "most", "kept"),
    [
        (None, None, [1, 2, 7, 0, 3, 4, 6, 5]),
        (0.6, None, [1, 2, 7, 6]),
        (None, 1, [1, 3, 6]),
        (0.6, 1, [1, 6]),
        (1.0, 2, [1, 2]),
    ],
)
def test_the_best_of_each_prompt_from_a_threshold_on_are_kept(tmp_path, low, most, kept):
    rollouts = read_dumps([dump(tmp_path, *(record(uid, score, n) for n, (uid, score) in enumerate(SCORES)))])
    assert numbers(select_rollouts(rollouts, low, most)) == kept


@pytest.mark.parametrize(
    ("low", "most", "expected"),
    [
        (None, None, [(1, 0), (2, 7), (3, 4)]),
        (None, 1, [(1, 0), (3, 4)]),
        (0.6, None, [(1, 0), (2, 7)]),
    ],
)
def test_pairs_are_of_one_prompt_and_differ_in_score(tmp_path, low, most, expected):
    rollouts = read_dumps([dump(tmp_path, *(record(uid, score, n) for n, (uid, score) in enumerate(SCORES)))])
    assert [tuple(numbers(pair)) for pair in rank_pairs(rollouts, low, most)] == expected


def test_a_prompt_is_one_of_its_file(tmp_path):
    """Two runs have prompts of the same name."""
    files = [dump(tmp_path, record("a", float(n)), name=f"{n}.jsonl") for n in range(2)]
    with pytest.raises(DataError, match="2 rollouts make no pair"):
        rank_pairs(read_dumps(files), None, None)


def test_the_dumps_of_two_runs_in_one_file_are_of_different_prompts(tmp_path):
    runs = [
        [record("1.0-0", score, number, gts=str(number), index=number) for score in (0.0, 1.0)] for number in (3, 4)
    ]
    rollouts = read_dumps([dump(tmp_path, *runs[0], *runs[1])])
    assert [numbers(pair) for pair in rank_pairs(rollouts, None, None)] == [[3, 3], [4, 4]]
    assert numbers(select_rollouts(rollouts, None, 1)) == [3, 4]


def test_equal_scores_make_no_pair(tmp_path):
    rollouts = read_dumps([dump(tmp_path, *(record("a", 0.3 + 1e-9 * n) for n in range(4)))])
    with pytest.raises(DataError, match="4 rollouts make no pair: of no prompt have two different scores"):
        rank_pairs(rollouts, None, None)
    with pytest.raises(DataError, match=r"none of 4 rollouts has a score of at least data\.min_score=0\.5"):
        select_rollouts(rollouts, 0.5, None)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"score": "high"}, "score must be a finite number or null, got 'high'"),
        ({"score": -math.inf}, "score must be a finite number or null, got -inf"),
        ({"score": True}, "score must be a finite number or null, got True"),
        ({"segments": [{"token_ids": "x"}]}, "'segments' is malformed"),
        ({"prompt_ids": None}, "'prompt_ids' is malformed"),
        ({"images": [{"tokens": 4}]}, "a dump does not hold their pixels"),
    ],
)
def test_a_row_that_is_no_rollout_is_named(tmp_path, change, wanted):
    path = dump(tmp_path, record("a", 1.0), record("a", 0.5) | change)
    with pytest.raises(DataError) as caught:
        read_dumps([path])
    assert wanted in str(caught.value)
    assert path in str(caught.value)
    assert "2" in str(caught.value).removeprefix(path).partition(wanted)[0]
