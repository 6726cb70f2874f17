"""The command lines, files and defaults lists that the reference documents show, with the module renamed."""

import shlex
import textwrap

import pytest

from etude.config import compose, compose_with_sources
from etude.config.layers import file_layers


def arguments_of(command: str) -> tuple[str, list[str]]:
    """(program, its arguments) of a shell command with line continuations."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    assert words[:2] in (["python", "-m"], ["python3", "-m"])
    return words[2], words[3:]


def compose_command(command: str):
    """The configuration of a whole command line."""
    program, arguments = arguments_of(command)
    root = {"etude.trainer.main_ppo": "ppo_trainer", "etude.trainer.main_grpo": "grpo_trainer"}[program]
    options = {"--config-name": None, "--config-path": None}
    while arguments and arguments[0] in options:
        option, value, *arguments = arguments
        options[option] = value
    return compose_with_sources(options["--config-name"], arguments, options["--config-path"], root=root).config


def test_the_first_command_of_the_source_reading():
    config = compose_command(
        r"""python3 -m etude.trainer.main_ppo \
            algorithm.adv_estimator=grpo \
            data.train_files=/home/me/data/gsm8k/train.parquet \
            data.val_files=/home/me/data/gsm8k/test.parquet \
            data.train_batch_size=1024 \
            data.max_prompt_length=1024 \
            data.max_response_length=2048
        """
    )
    assert config.algorithm.adv_estimator == "grpo"
    assert config.data.train_files == ["/home/me/data/gsm8k/train.parquet"]
    assert config.data.val_files == ["/home/me/data/gsm8k/test.parquet"]
    assert config.data.train_batch_size == 1024
    assert config.actor_rollout_ref.rollout.prompt_length == 1024
    assert config.actor_rollout_ref.rollout.response_length == 2048


def test_a_cluster_in_the_documents_words():
    """The source reading's `run_ppo` starts Ray from `ray_init` (later `ray_kwargs.ray_init`)."""
    config = compose_command(
        r"""python3 -m etude.trainer.main_ppo trainer.backend=ray trainer.nnodes=2 trainer.n_gpus_per_node=8 \
            ray_init.num_cpus=64 ray_kwargs.ray_init.address=10.0.0.1:6379 +ray_kwargs.ray_init.runtime_env.working_dir=. \
            ray_kwargs.timeline_json_file=null trainer.ray_wait_register_center_timeout=300
        """
    )
    assert (config.trainer.backend, config.trainer.nnodes, config.trainer.n_gpus_per_node) == ("ray", 2, 8)
    assert config.ray.address == "10.0.0.1:6379"
    assert config.ray.init_kwargs == {"num_cpus": 64, "runtime_env": {"working_dir": "."}}


def test_the_agent_command_of_the_source_reading():
    config = compose_command(
        r"""python3 -m etude.trainer.main_ppo \
            actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
            actor_rollout_ref.rollout.multi_turn.max_parallel_calls=3 \
            actor_rollout_ref.rollout.multi_turn.tool_config_path=/root/tool_config/my_web_search_tool_config.yaml \
            actor_rollout_ref.rollout.multi_turn.format=hermes \
            actor_rollout_ref.rollout.name=sglang \
            actor_rollout_ref.rollout.mode=async \
            reward_model.reward_manager=my_web_search \
            custom_reward_function.path=/root/reward_score/my_reward_function.py \
            custom_reward_function.name=compute_score
        """
    )
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    assert (multi_turn.max_assistant_turns, multi_turn.max_parallel_calls, multi_turn.format) == (3, 3, "hermes")
    assert multi_turn.tool_config_path == ["/root/tool_config/my_web_search_tool_config.yaml"]
    assert (config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.mode) == ("sglang", "async")
    assert config.reward_model.reward_manager == "my_web_search"
    assert config.custom_reward_function.path == "/root/reward_score/my_reward_function.py"
    assert config.custom_reward_function.name == "compute_score"


def test_every_key_that_the_agent_loop_reads_is_there():
    rollout = compose_with_sources("ppo_trainer").config.actor_rollout_ref.rollout
    assert {
        "max_user_turns",
        "max_assistant_turns",
        "max_parallel_calls",
        "max_tool_response_length",
        "tool_response_truncate_side",
        "tool_config_path",
        "format",
    } <= set(rollout.multi_turn)
    assert {"prompt_length", "response_length"} <= set(rollout)


GEO3K = """
# 数据配置
data:
  train_files:
    - /path/to/geo3k_multiturn_w_tool/train.parquet
  val_files:
    - /path/to/geo3k_multiturn_w_tool/test.parquet

# 工具配置
actor_rollout_ref:
  rollout:
    tool_config: config/tool_config/geo3k_tool_config.yaml
    multi_turn:
      enable: true
      max_assistant_turns: 5

# 奖励配置
reward_model:
  enable: false  # 使用工具奖励而非奖励模型
"""


def test_the_tool_documents_file_and_command(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "geo3k_multiturn_megatron_grpo.yaml").write_text(GEO3K, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = compose_command(
        r"""python -m etude.trainer.main_grpo \
          --config-name geo3k_multiturn_megatron_grpo \
          data.train_files='["/path/to/train.parquet"]' \
          data.val_files='["/path/to/test.parquet"]'
        """
    )
    assert config.algorithm.adv_estimator == "grpo"
    assert config.data.train_files == ["/path/to/train.parquet"]
    assert config.data.val_files == ["/path/to/test.parquet"]
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    assert multi_turn.tool_config_path == ["config/tool_config/geo3k_tool_config.yaml"]
    assert (multi_turn.enable, multi_turn.max_assistant_turns) == (True, 5)
    assert config.reward_model.enable is False


def test_the_viewer_documents_key():
    assert compose("ppo_trainer", ["trainer.rollout_data_dir=dumps"]).trainer.rollout_data_dir == "dumps"


@pytest.mark.parametrize("root_line", ["", "  - ppo_trainer\n"])
def test_the_source_readings_defaults_list(tmp_path, root_line):
    override = "override " if root_line else ""
    text = f"""
defaults:
{root_line}  - {override}actor@actor_rollout_ref.actor: megatron_actor
  - {override}data@data: legacy_data
  - _self_
trainer:
  seed: 4
"""
    (tmp_path / "mine.yaml").write_text(textwrap.dedent(text), encoding="utf-8")
    assert compose("mine", [], tmp_path) == compose("ppo_trainer", ["trainer.seed=4"])
    assert {"actor/actor", "data/data"} <= {layer.name for layer in file_layers("mine", tmp_path)}


def test_both_roots_of_the_source_reading_compose():
    assert compose("ppo_megatron_trainer") == compose("ppo_trainer")
