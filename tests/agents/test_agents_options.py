"""Options that make no sense are one line each, before anything runs."""

import pytest

from etude.agents import MultiTurnOptions, RolloutOptions
from etude.errors import ConfigError


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_parallel_calls": 0},
        {"max_tool_response_length": 0},
        {"max_assistant_turns": 0},
        {"max_user_turns": -1},
        {"tool_response_truncate_side": "centre"},
    ],
)
def test_a_wrong_multi_turn_option_is_named(wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} must be"):
        MultiTurnOptions(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "lockstep"},
        {"n": 0},
        {"infrastructure_retries": -1},
        {"max_concurrent_trajectories": 0},
        {"trajectory_timeout": 0},
        {"trajectory_timeout": float("nan")},
        {"response_length": 0},
        {"max_num_batched_tokens": 0},
    ],
)
def test_a_wrong_rollout_option_is_named(wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} must be"):
        RolloutOptions(**wrong)


def test_no_limit_is_no_error():
    assert MultiTurnOptions(max_assistant_turns=None).max_assistant_turns is None
