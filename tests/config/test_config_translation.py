"""Command lines of verl, Search-R1 and RL-Factory: one message for all that must change, one line for what has no effect,
and what the message says to write is what makes them compose."""

import logging
from fnmatch import fnmatchcase

import pytest

from etude.cli.main import cli
from etude.cli.main import run as run_command
from etude.config import compose, compose_with_sources
from etude.config.foreign_keys import ALIASES, INERT, REFUSED_VALUES, REPLACED
from etude.config.translation import KeyTable
from etude.errors import ConfigError
from etude.options import SFTOptions, TrainOptions

ACTOR, ENV, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.env", "actor_rollout_ref.rollout"

REPLACEMENTS = {
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
    f"{ACTOR}.state_masking=true": "exactly the sampled tokens",
    f"{ACTOR}.use_token_level_loss=false": "loss_agg_mode=seq-mean-token-mean",
    f"{ACTOR}.optim.lr_warmup_steps_ratio=0.285": "optim.lr_warmup_steps=N",
    f"{ACTOR}.fsdp_config.model_dtype=bf16": "model.dtype=bfloat16",
    "actor_rollout_ref.model.lora.rank=32": "write model.lora_rank=N",
    "actor_rollout_ref.model.external_lib=my.module": "plugins=[MODULE]",
    "data.gen_batch_size=1536": "data.train_batch_size",
    "reward_model.model.trust_remote_code=true": "actor_rollout_ref.model.trust_remote_code=true",
    "reward_model.sandbox_fusion.url=http://a/run_code": "ETUDE_SANDBOX_URL",
    "trainer.val_only=true": "etude eval",
}


@pytest.mark.parametrize("setting", REPLACEMENTS)
def test_a_key_that_must_change_is_refused_with_what_to_write(setting):
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        compose("ppo_trainer", overrides=[setting])
    assert str(caught.value).startswith(f"{key} does not exist here (command line); ")
    assert REPLACEMENTS[setting] in str(caught.value)
    assert "did you mean" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_said_to_write_instead_exists():
    tree = compose_with_sources("ppo_trainer").config
    assert {"max_prompt_length", "apply_chat_template_kwargs", "train_batch_size"} <= set(tree.data)
    assert {"max_tool_response_length", "format"} <= set(tree.actor_rollout_ref.rollout.multi_turn)
    assert {"response_length", "stop", "engine_kwargs"} <= set(tree.actor_rollout_ref.rollout)
    assert {"lr_warmup_steps", "lr_scheduler_type", "clip_grad"} <= set(tree.actor_rollout_ref.actor.optim)
    assert "dtype" in tree.actor_rollout_ref.model
    assert "tool_manager" in tree.actor_rollout_ref.env
    table = KeyTable(TrainOptions)
    assert all(table.knows(ours) for ours in ALIASES.values())
    assert all(table.knows(key) for key in REFUSED_VALUES)


@pytest.mark.parametrize(
    ("section", "switch", "model"),
    [
        ("reward_rollout", "if_use_reward_rollout", "rollout.model_name"),
        ("reward.reward_model", "enable", "model_path"),
    ],
)
def test_a_section_of_theirs_that_is_switched_off_has_no_effect(section, switch, model):
    given = [f"{section}.{model}=/models/judge", f"{section}.rollout.response_length=77"]
    for value, expected in (("false", (None, 1024)), ("true", ("/models/judge", 77))):
        reward = compose("ppo_trainer", [*given, f"{section}.{switch}={value}"]).reward_model
        assert (reward.model.path, reward.response_length) == expected
    assert compose("ppo_trainer", given).reward_model.model.path is None


@pytest.mark.parametrize("tree", [TrainOptions, SFTOptions])
def test_no_table_hides_a_key_of_ours(tree):
    table = KeyTable(tree)
    ours = {*table, *(key.rpartition(".")[0] for key in table)}
    assert [
        (key, pattern) for key in ours for pattern in (*ALIASES, *INERT, *REPLACED) if fnmatchcase(key, pattern)
    ] == []


def test_all_faults_are_in_one_message_with_a_line_each(capsys):
    arguments = [
        "data.truncation=left",
        "data.train_fils=x",
        f"{ROLLOUT}.over_sample_rate=0.1",
        "cluster.a=1",
        "cluster.b=2",
        "critic=3",
        f"{ACTOR}.grad_clip=2.0",
        f"{ACTOR}.optim.clip_grad=1.0",
    ]
    assert run_command(cli, ["config", *arguments]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "error: 6 settings are invalid:"
    assert [line.split(" (command line)")[0].strip() for line in lines] == [
        "data.truncation=left is invalid here",
        f"{ROLLOUT}.over_sample_rate does not exist here",
        f"{ACTOR}.grad_clip and {ACTOR}.optim.clip_grad mean the same but are set to different values",
        "unknown key data.train_fils",
        "unknown key cluster",
        "critic must be a section of key: value, got 3",
    ]


def test_faults_of_a_file_and_of_the_command_line_come_together(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "data: {truncation: left}\nactor_rollout_ref: {rollout: {over_sample_rate: 1}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        compose("mine", ["trainer.val_only=true"], tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert [str(tmp_path / "mine.yaml") in line for line in lines] == [True, True, False]


@pytest.mark.parametrize(
    ("key", "hint"),
    {
        "data.train_fils": "did you mean data.train_files?",
        "actor_rollout_ref.multi_turn.max_user_turns": "did you mean actor_rollout_ref.rollout.multi_turn?",
        "actor_rollout_ref.actor.lr_warmup_steps": "did you mean actor_rollout_ref.actor.optim.lr_warmup_steps?",
        "trainer.ray_kwarg": "`etude config` lists the keys",  # val_kwargs is spelled alike, and something else
        "actor_rollout_ref.rollout.nodes": "did you mean actor_rollout_ref.rollout.nnodes?",  # not mode
        "data.sampler_path": "`etude config` lists the keys",
    }.items(),
)
def test_a_hint_names_only_what_may_be_meant(key, hint):
    with pytest.raises(ConfigError) as caught:
        compose("ppo_trainer", [f"{key}=1"])
    assert str(caught.value).endswith(hint)


def test_a_key_of_train_is_not_looked_for_among_those_of_sft():
    with pytest.raises(
        ConfigError, match=r"unknown key custom_reward_function .*`etude config --config-name sft` lists"
    ):
        compose("sft", ["custom_reward_function.path=reward.py"])


def test_keys_without_effect_are_named_in_one_line_with_their_reasons(caplog):
    arguments = [
        "data.return_raw_chat=true",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=4",
        f"{ACTOR}.fsdp_config.offload_policy=true",
        "critic.model.fsdp_config.grad_offload=true",
        "actor_rollout_ref.model.lora.rank=0",
        "trainer.log_val_generations=3",
    ]
    with caplog.at_level(logging.WARNING, "etude"):
        config = compose("ppo_trainer", arguments)
    assert config == compose("ppo_trainer")
    [line] = caplog.messages
    assert all(argument.partition("=")[0] in line for argument in arguments)
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu, critic.ppo_micro_batch_size_per_gpu (rows are packed" in line
    assert "\n" not in line


def test_nothing_is_said_where_every_key_has_an_effect(caplog):
    with caplog.at_level(logging.DEBUG, "etude"):
        compose("quickstart", ["trainer.seed=3"])
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("theirs", "ours"),
    {
        "reward.reward_manager.name": "reward_model.reward_manager",
        "reward.custom_reward_function.path": "custom_reward_function.path",
        "reward.custom_reward_function.name": "custom_reward_function.name",
        "reward.custom_reward_function.reward_kwargs.bonus": "custom_reward_function.reward_kwargs.bonus",
        "reward.reward_kwargs.timeout": "reward_model.reward_kwargs.timeout",
    }.items(),
)
def test_the_reward_section_of_later_versions_means_ours(theirs, ours):
    assert compose("ppo_trainer", [f"+{theirs}=abc"]) == compose("ppo_trainer", [f"{ours}=abc"])


def test_dapos_length_penalty_has_two_older_names():
    for section in ("reward_model", "custom_reward_function"):
        config = compose(
            "ppo_trainer", [f"{section}.overlong_buffer.len=4096", f"{section}.overlong_buffer.enable=true"]
        )
        assert config.reward_model.reward_kwargs == {"overlong_buffer_cfg": {"len": 4096, "enable": True}}


def test_a_file_copied_from_the_other_framework_needs_no_deletion_of_its_defaults(tmp_path, caplog):
    (tmp_path / "mine.yaml").write_text(
        """
reward_model: {reward_manager: null, model: {path: null}}
reward: {_target_: verl.workers.config.RewardConfig, reward_manager: {source: register, name: naive}}
critic: {shuffle: "${actor_rollout_ref.actor.shuffle}", enable: null}
actor_rollout_ref:
  rollout: {agent: {custom_async_server: {_target_: verl.Config, path: null}}}
  actor: {optim: {warmup_style: null, lr_warmup_steps_ratio: 0.0}, fsdp_config: {dtype: float32, wrap_policy: {}}}
"""
    )
    assert compose("mine", [], tmp_path) == compose("ppo_trainer")
    assert len(caplog.messages) == 1


OLD_DEFAULTS = {  # keys of verl 0.2 to 0.9 at their defaults, and a value that asks for something, if one does
    f"{ACTOR}.optim.optimizer=adam": f"{ACTOR}.optim.optimizer=sgd",
    f"{ACTOR}.optim.override_optimizer_config={{}}": f"{ACTOR}.optim.override_optimizer_config.fused=true",
    f"{ACTOR}.optim.muon_momentum=0.95": None,
    f"{ACTOR}.use_torch_compile=false": f"{ACTOR}.use_torch_compile=true",
    f"{ACTOR}.fsdp_config.turbo_config.distributed.tensor_parallel_size=1": None,
    f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=false": None,
    "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_method=null": None,
    "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=false": (
        "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=true"
    ),
    "actor_rollout_ref.ref.param_offload=false": None,
    "algorithm.filter_groups.max_num_gen_batches=0": None,
    "algorithm.rollout_correction.rollout_rs_threshold_lower=null": (
        "algorithm.rollout_correction.rollout_rs_threshold_lower=0.5"
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold=null": (
        "algorithm.rollout_correction.rollout_token_veto_threshold=1e-4"
    ),
    "critic.kl_ctrl.kl_coef=0.001": None,
    "critic.model.fsdp_config.grad_offload=false": None,
    "distillation.distillation_loss.loss_mode=k3": "distillation.enabled=true",
    "trainer.remove_previous_ckpt_in_save=false": "trainer.remove_previous_ckpt_in_save=true",
    "trainer.val_generations_to_log_to_wandb=0": None,
}


def test_keys_of_all_versions_at_their_defaults_have_no_effect():
    assert compose("ppo_trainer", OLD_DEFAULTS) == compose("ppo_trainer")


@pytest.mark.parametrize(
    "settings",
    [*filter(None, OLD_DEFAULTS.values()), ("algorithm.filter_groups.max_num_gen_batches=0", "zero_variance=refill")],
)
def test_a_value_of_these_that_asks_for_something_is_refused(settings):
    given = [settings] if isinstance(settings, str) else [settings[0], f"algorithm.{settings[1]}"]
    with pytest.raises(ConfigError, match=r"here \(command line\); (write|delete|name)"):
        compose("ppo_trainer", given)


def test_other_names_of_the_optimizers_keys():
    offload = [f"{ACTOR}.fsdp_config.optimizer_offload=true", "critic.model.fsdp_config.optimizer_offload=true"]
    config = compose(
        "ppo_trainer", [f"{ACTOR}.grad_clip=0.5", "critic.optim.warmup_style=cosine", "critic.grad_clip=2", *offload]
    )
    assert config.actor_rollout_ref.actor.optim.offload
    assert config.critic.optim.offload
    assert config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    assert (config.critic.optim.clip_grad, config.critic.optim.lr_scheduler_type) == (2.0, "cosine")


def test_a_later_layer_overrides_another_name_of_its_key(tmp_path):
    (tmp_path / "mine.yaml").write_text("actor_rollout_ref: {actor: {grad_clip: 0.5}}\n")
    assert compose("mine", [], tmp_path).actor_rollout_ref.actor.optim.clip_grad == 0.5
    later = compose("mine", [f"{ACTOR}.optim.clip_grad=0.25"], tmp_path)
    assert later.actor_rollout_ref.actor.optim.clip_grad == 0.25


def test_engine_settings_that_vllm_in_this_process_takes_must_go_to_it():
    settings = [f"{ROLLOUT}.gpu_memory_utilization=0.4", f"{ROLLOUT}.tensor_model_parallel_size=1"]
    compose("ppo_trainer", [*settings, f"{ROLLOUT}.name=native"])
    compose("ppo_trainer", [*settings, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://a:1]"])
    with pytest.raises(ConfigError) as caught:
        compose("ppo_trainer", [*settings, f"{ROLLOUT}.name=vllm"])
    written = f"{ROLLOUT}.engine_kwargs.vllm.gpu_memory_utilization=0.4"
    assert str(caught.value).endswith(f"write {written}")
    compose("ppo_trainer", [settings[1], written, f"{ROLLOUT}.name=vllm"])
