"""Keys that other frameworks' command lines have and that would do nothing here: each is refused with the reason.

Invariant: none of them is a key of ours; one that gets a meaning leaves this table. A key without a line here is unknown,
and `keys` names the nearest that exists.
"""

from __future__ import annotations

_WHY = {
    "multi_turn.use_inference_chat_template": "sampling and training share one token sequence, so there is one template",
    "multi_turn.tokenization_sanity_check_mode": "sampled ids are never encoded again, so there is nothing to compare; "
    "`etude chat check` tries a template",
    "multi_turn.num_repeat_rollouts": "rollout.n is the number of answers per prompt",
    "agent.num_workers": "all trajectories run at once in one process; rollout.max_concurrent_trajectories bounds them",
    "agent.agent_loop_manager_class": "a loop of your own is a class named by a row's agent_name "
    "(plugins, rollout.agent.agent_loop_config_path)",
    "agent.custom_async_server": "an engine of your own is a class registered in a plugin, which rollout.name picks",
    "rollout.over_sample_rate": "every row of a batch is rolled out; algorithm.filter_groups draws further ones",
}


def why_refused(key: str) -> str | None:
    """The reason against a key, given by its whole dotted name; None where nothing is known of it."""
    return _WHY.get(".".join(key.split(".")[-2:]))
