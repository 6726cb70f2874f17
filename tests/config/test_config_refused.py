"""Keys of RL-Factory's that would do nothing: refused with what to set in their place, never with a guess at a spelling."""

import pytest

from etude.config import compose
from etude.config.refused import why_refused
from etude.errors import ConfigError

ENV, ROLLOUT = "actor_rollout_ref.env", "actor_rollout_ref.rollout"
INSTEAD = {
    f"{ENV}.model_type=qwen3": "multi_turn.format",
    f"{ENV}.mcp_mode=sse": "by url",
    f"{ENV}.parallel_sse_tool_call.is_enabled=true": "max_concurrent_calls",
    f"{ENV}.parallel_sse_tool_call.num_instances=3": "max_concurrent_calls",
    f"{ENV}.tool_name_selected=[a]": "tool_selection",
    f"{ENV}.enable_thinking=true": "data.apply_chat_template_kwargs.enable_thinking",
    f"{ENV}.load_custom_chat_template=a.jinja": "the tokenizer's",
    f"{ENV}.max_prompt_length=2048": "data.max_prompt_length",
    f"{ENV}.tool_timeout=10": "timeout in a tool's config",
    f"{ENV}.enable_limiter=true": "max_concurrent_calls",
    f"{ENV}.max_concurrency=10": "max_concurrent_calls",
    f"{ENV}.use_storage_manager=true": "cache in a tool's config",
    f"{ENV}.cache=single": "cache in a tool's config",
    f"{ENV}.local_cache=a": "cache in a tool's config",
    f"{ENV}.persist=true": "cache.path",
    f"{ENV}.persist_dir=a": "cache.path",
    f"{ENV}.max_size=1000": "cache.max_entries",
    f"{ENV}.eviction=lru": "cache.max_entries",
    f"{ENV}.mmtool=true": "images",
    f"{ROLLOUT}.tool_response_length=16384": "multi_turn.max_tool_response_length",
    "actor_rollout_ref.actor.state_masking=true": "exactly the sampled tokens",
}


@pytest.mark.parametrize("setting", INSTEAD)
def test_a_key_that_would_do_nothing_is_refused_with_what_to_set(setting):
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        compose("ppo_trainer", overrides=[setting])
    named = str(caught.value).partition(" does not exist here (command line): ")[0]
    assert key == named or key.startswith(f"{named}.")
    assert INSTEAD[setting] in str(caught.value)
    assert "did you mean" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_said_to_set_instead_exists():
    tree = compose("ppo_trainer")
    assert "apply_chat_template_kwargs" in tree.data
    assert {"max_prompt_length"} <= set(tree.data)
    assert {"max_tool_response_length", "format"} <= set(tree.actor_rollout_ref.rollout.multi_turn)
    assert {"response_length", "stop"} <= set(tree.actor_rollout_ref.rollout)
    assert "tool_manager" in tree.actor_rollout_ref.env
    assert not any(why_refused(f"{ENV}.{name}") for name in tree.actor_rollout_ref.env)
