"""Options that make no sense are one line each, before anything runs."""

import pytest

from etude.agents import MultiTurnOptions, RolloutOptions
from etude.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        (MultiTurnOptions, {"max_parallel_calls": 0}),
        (MultiTurnOptions, {"max_tool_response_length": 0}),
        (MultiTurnOptions, {"max_assistant_turns": 0}),
        (MultiTurnOptions, {"max_user_turns": -1}),
        (MultiTurnOptions, {"tool_response_truncate_side": "centre"}),
        (RolloutOptions, {"mode": "lockstep"}),
        (RolloutOptions, {"n": 0}),
        (RolloutOptions, {"infrastructure_retries": -1}),
        (RolloutOptions, {"max_concurrent_trajectories": 0}),
        (RolloutOptions, {"trajectory_timeout": 0}),
        (RolloutOptions, {"response_length": 0}),
        (RolloutOptions, {"max_num_batched_tokens": 0}),
    ],
)
def test_a_wrong_option_is_named(section, wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} must be"):
        section(**wrong)
