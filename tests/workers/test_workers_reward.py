"""The reward worker: a batch at a time it gives what streaming gives, and it fails as streaming fails."""

import pytest
from workers_stage import Echo, policy, prompts, tiny_options

from etude.agents import Rollout
from etude.distributed import InProcessWorkerGroup
from etude.errors import ConfigError
from etude.options import CustomRewardOptions, RewardOptions
from etude.registry import import_module
from etude.trajectory import StopReason
from etude.workers import RewardWorker

SCORE = '''
"""A score that spreads, and breaks for one row."""

BROKEN = set()

def compute_score(solution_str, ground_truth, extra_info):
    if extra_info["index"] in BROKEN:
        raise ConnectionError("judge is down")
    return {"score": len(solution_str) / 7, "truth": ground_truth, "turns": extra_info["num_turns"]}
'''


@pytest.fixture
def custom(tmp_path):
    file = tmp_path / "score.py"
    file.write_text(SCORE)
    return CustomRewardOptions(path=str(file))


def reward_group(options):
    return InProcessWorkerGroup(RewardWorker, 1, options)


def scores(batch):
    return [(r.trajectory.rewards.score, r.trajectory.rewards.score_info) for r in batch.non_tensor_batch["rollout"]]


def test_lock_step_scores_equal_streaming_scores(model_path, custom):
    streamed, _ = policy(model_path, {"echo": Echo()}, custom_reward_function=custom)
    expected = scores(streamed.generate_sequences(prompts()))
    assert len({score for score, _ in expected}) > 2
    options = {"custom_reward_function": custom, "rollout": {"mode": "sync"}}
    stepped, _ = policy(model_path, {"echo": Echo()}, **options)
    batch = prompts()
    batch = batch.union(stepped.generate_sequences(batch))
    assert {score for score, _ in scores(batch)} == {None}
    scored = reward_group(tiny_options(model_path, **options)).compute_scores(batch)
    assert scores(scored) == expected
    assert all(r.trajectory.timings["compute_score"] >= 0 for r in scored.non_tensor_batch["rollout"])


def test_a_row_that_cannot_be_scored_is_dropped_and_a_dropped_one_stays_so(model_path, custom):
    options = {"custom_reward_function": custom, "rollout": {"mode": "sync", "infrastructure_retries": 2}}
    group, _ = policy(model_path, **options)
    batch = prompts(count=3, n=1)
    batch = batch.union(group.generate_sequences(batch))
    batch.non_tensor_batch["rollout"][2] = Rollout(failures=2, dropped=StopReason.INFRASTRUCTURE)
    import_module(custom.path).BROKEN.add(1)
    results = reward_group(tiny_options(model_path, **options)).compute_scores(batch).non_tensor_batch["rollout"]
    assert results[0].trajectory.rewards.score is not None
    assert (results[1].trajectory, results[1].failures, results[1].dropped) == (None, 3, StopReason.INFRASTRUCTURE)
    assert (results[2].failures, results[2].dropped) == (2, StopReason.INFRASTRUCTURE)


def test_the_keywords_of_a_scorer_and_of_its_manager_arrive(model_path, tmp_path):
    """The buffer of `dapo` is as long as the response may be: each token costs an eighth."""
    file = tmp_path / "worth.py"
    file.write_text("def compute_score(solution_str, ground_truth, extra_info, worth=0.0):\n    return worth\n")
    buffer = {"enable": True, "len": 64, "penalty_factor": 8.0}
    group, _ = policy(
        model_path,
        custom_reward_function=CustomRewardOptions(path=str(file), reward_kwargs={"worth": 3.0}),
        reward_model=RewardOptions(
            reward_manager="dapo", reward_kwargs={"overlong_buffer_cfg": buffer, "max_resp_len": 64}
        ),
    )
    for result in group.generate_sequences(prompts(count=2, n=1)).non_tensor_batch["rollout"]:
        assert result.trajectory.rewards.score == pytest.approx(3.0 - result.trajectory.response_length / 8)


def test_without_a_manager_nothing_is_scored(model_path):
    options = {"reward_model": RewardOptions(enable=False), "rollout": {"mode": "sync"}}
    group, _ = policy(model_path, **options)
    batch = prompts(count=1, n=1)
    batch = batch.union(group.generate_sequences(batch))
    assert scores(reward_group(tiny_options(model_path, **options)).compute_scores(batch)) == [(None, {})]


def test_wrong_names_are_errors_before_any_rollout(model_path, custom):
    with pytest.raises(ConfigError, match="unknown reward manager 'naiv'; did you mean 'naive'"):
        policy(model_path, reward_model=RewardOptions(reward_manager="naiv"))
    with pytest.raises(ConfigError, match="has no 'compute_scoer'"):
        policy(model_path, custom_reward_function=CustomRewardOptions(path=custom.path, name="compute_scoer"))
