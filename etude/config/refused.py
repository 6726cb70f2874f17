"""Keys that other frameworks' command lines have and that would do nothing here: each is refused with the reason.

Invariant: none of them is a key of ours; one that gets a meaning leaves this table. A key without a line here is unknown,
and `keys` names the nearest that exists.
"""

from __future__ import annotations

_LIMIT = "max_concurrent_calls in a tool's config bounds its calls at once"
_CACHE = "cache in a tool's config keeps the answers of a tool that is pure"
_WHY = {
    "multi_turn.use_inference_chat_template": "sampling and training share one token sequence, so there is one template",
    "multi_turn.tokenization_sanity_check_mode": "sampled ids are never encoded again, so there is nothing to compare; "
    "`etude chat check` tries a template",
    "multi_turn.num_repeat_rollouts": "rollout.n is the number of answers per prompt",
    "agent.num_workers": "all trajectories run at once in one process; rollout.max_concurrent_trajectories bounds them",
    "agent.agent_loop_manager_class": "a loop of your own is a class named by a row's agent_name "
    "(plugins, rollout.agent.agent_loop_config_path)",
    "agent.custom_async_server": "an engine of your own is a class registered in a plugin, which rollout.name picks",
    "data.video_key": "a model is shown images only (data.image_key)",
    "data.audio_key": "a model is shown images only (data.image_key)",
    "rollout.tool_response_length": "rollout.multi_turn.max_tool_response_length bounds a tool's answer, and "
    "rollout.response_length all turns and answers of a conversation together",
    "actor.state_masking": "exactly the sampled tokens are trained on, always",
    "env.model_type": "multi_turn.format picks the parser (auto: by the chat template), env.tool_manager the manager",
    "env.mcp_mode": "each MCP server of the tool file says itself how it is reached: by command, or by url",
    "env.parallel_sse_tool_call": "a tool's calls run at the same time as they are; max_concurrent_calls in its config "
    "bounds them",
    "env.tool_name_selected": "tool_selection in a row's extra_info names the tools that its model is shown",
    "env.enable_thinking": "it is an argument of the chat template: data.apply_chat_template_kwargs.enable_thinking",
    "env.load_custom_chat_template": "the chat template is the tokenizer's: save it in the model's folder",
    "env.max_prompt_length": "data.max_prompt_length counts the tools' schemas, too",
    "env.tool_timeout": "timeout in a tool's config bounds its calls",
    "env.enable_limiter": _LIMIT,
    "env.max_concurrency": _LIMIT,
    "env.use_storage_manager": _CACHE,
    "env.cache": _CACHE,
    "env.local_cache": _CACHE,
    "env.persist": "cache.path in a tool's config names the file in which answers outlive the run",
    "env.persist_dir": "cache.path in a tool's config names the file in which answers outlive the run",
    "env.max_size": "cache.max_entries in a tool's config bounds its answers",
    "env.eviction": "cache.max_entries in a tool's config bounds its answers; which of them go first is not chosen",
    "env.mmtool": "tools answer with images wherever the model can see them",
    "rollout.over_sample_rate": "every row of a batch is rolled out; algorithm.filter_groups draws further ones",
}


def why_refused(key: str) -> str | None:
    """The reason against a key, given by its whole dotted name; None where nothing is known of it."""
    return _WHY.get(".".join(key.split(".")[-2:]))
