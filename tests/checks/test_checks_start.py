"""What a run needs of this machine: named all at once, before torch is imported."""

import json
import logging
import subprocess
import sys

import pytest

from etude.config import compose
from etude.errors import ConfigError
from etude.options.model_path import local_folder

MODEL, ROLLOUT = "actor_rollout_ref.model.path", "actor_rollout_ref.rollout"


@pytest.fixture
def files(tmp_path):
    """Overrides with which a run may start."""
    (tmp_path / "rows.parquet").write_bytes(b"")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return (
        f"data.train_files={tmp_path}/rows.parquet",
        f"{MODEL}={tmp_path}/model",
        f"trainer.default_local_dir={tmp_path}/run",
    )


def start(*overrides: str, command: str = "train", root: str = "grpo_trainer") -> None:
    compose(root, list(overrides), root=root, command=command)


def refusal(*overrides: str, **how: str) -> str:
    with pytest.raises(ConfigError) as caught:
        start(*overrides, **how)
    return str(caught.value)


def test_a_run_that_has_all_it_needs_may_start(files, tmp_path):
    start(*files)
    assert not (tmp_path / "run").exists()


MISSING = f"""
data.train_files=[]
data.train_files=/nowhere/x.parquet
data.val_files=[/nowhere/x.parquet]
{MODEL}=null
{MODEL}=/nowhere/model
{MODEL}=models/mine
{ROLLOUT}.multi_turn.tool_config_path=/nowhere/tools.yaml
{ROLLOUT}.multi_turn.function_tool_path=/nowhere/tools.py
{ROLLOUT}.multi_turn.interaction_config_path=/nowhere/a.yaml
{ROLLOUT}.agent.agent_loop_config_path=/nowhere/a.yaml
{ROLLOUT}.agent.openai_agent.function=/nowhere/a.py:run
custom_reward_function.path=/nowhere/score.py
custom_reward_function.path=no_such_module_here.score
plugins=[/nowhere/plugin.py]
reward_model.reward_manager=naiv
trainer.default_local_dir={__file__}/run
trainer.default_local_dir={"x" * 300}
{ROLLOUT}.server_api_key_env=NO_SUCH_KEY {ROLLOUT}.name=sglang {ROLLOUT}.server_urls=[http://a:1]
{ROLLOUT}.max_model_len=5000
"""


@pytest.mark.parametrize("overrides", MISSING.strip().splitlines())
def test_what_is_missing_is_named(files, overrides):
    with pytest.raises(ConfigError) as caught:
        start(*files, *overrides.split())
    assert caught.value.key == overrides.partition("=")[0]
    assert str(caught.value).startswith(caught.value.key)
    assert "\n" not in str(caught.value)


def test_a_missing_file_comes_with_the_nearest(files, tmp_path):
    assert "did you mean 'rows.parquet'?" in refusal(*files, f"data.train_files={tmp_path}/rows.parqet")


def test_an_extra_that_is_not_installed_is_named(files, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = refusal(*files, "trainer.logger=[wandb]", f"{ROLLOUT}.trace.backend=otel", f"{ROLLOUT}.name=vllm")
    assert "trainer.logger=['wandb'] (command line): 'wandb' needs an optional dependency" in text
    assert "etude[otel]" in text
    assert f"or leave {ROLLOUT}.name out" in text


def test_everything_missing_is_in_one_message():
    text = refusal("custom_reward_function.path=/nowhere/score.py", f"{MODEL}=/nowhere/model")
    assert [line.split()[0].partition("=")[0] for line in text.splitlines()[1:]] == [
        "data.train_files",
        MODEL,
        "custom_reward_function.path",
    ]


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (["server_urls=[http://a:1]"], "server_urls=['http://a:1']", "the engine 'native' runs in this process"),
        (["name=sglang"], "name=sglang", f"needs {ROLLOUT}.server_urls"),
        (["name=sglang", "server_urls=[a]"], "server_urls=['a']", "'a' is no server address"),
        (["name=sglang", "server_urls=[http://a,http://a/v1]"], "server_urls=", "names an address twice"),
        (["engine_kwargs.vlm.seed=1"], "engine_kwargs={'vlm': {'seed': 1}}", "no engine 'vlm' (available: native"),
        (["engine_kwargs.native.seed=1"], "engine_kwargs={'native': {'seed': 1}}", "the engine 'native' takes none"),
    ],
)
def test_what_does_not_go_with_the_engine_is_refused(files, command, overrides, key, why):
    text = refusal(
        *files,
        f"data.val_files={files[0].partition('=')[2]}",
        *(f"{ROLLOUT}.{override}" for override in overrides),
        command=command,
    )
    assert text.startswith(f"{ROLLOUT}.{key}")
    assert f"(command line): {why}" in text
    assert "\n" not in text


@pytest.mark.parametrize("key", ["trainer.rollout_data_dir", "trainer.validation_data_dir"])
def test_dumps_do_not_go_into_the_folder_of_another_run(files, tmp_path, key):
    other = tmp_path / "other"
    given = (*files, f"{key}={other}/dumps")
    start(*given)  # a folder that is no run's
    other.mkdir()
    (other / "run.json").write_text('{"kind": "train"}')
    assert refusal(*given).startswith(f"{key}={other}/dumps (command line): is in the folder of another run ({other})")
    start(*given, f"trainer.default_local_dir={other}")
    start(*given, f"data.val_files={tmp_path}/rows.parquet", command="eval")


def test_what_is_missing_stands_beside_what_is_wrong(files):
    text = refusal("data.train_files=3", "critic.ppo_epochs=0", f"{ROLLOUT}.do_sample=false", f"{MODEL}=/nowhere/model")
    assert [line.split()[0].partition("=")[0] for line in text.splitlines()[1:]] == [
        "data.train_files[0]",
        "critic.ppo_epochs",
        MODEL,
        f"{ROLLOUT}.do_sample",
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        ([f"{ROLLOUT}.do_sample=false"], f"{ROLLOUT}.do_sample=false", "training needs sampled answers"),
        ([f"{ROLLOUT}.top_k=1"], f"{ROLLOUT}.top_k=1", "training needs sampled answers"),
        (
            [f"{ROLLOUT}.name=openai", f"{ROLLOUT}.server_urls=[http://a:1]"],
            f"{ROLLOUT}.name=openai",
            "is for `etude eval` only",
        ),
        (["reward_model.enable=false"], "reward_model.enable=false", "leaves no source of rewards"),
        (["reward_model.score_weight=0"], "reward_model.score_weight=0.0", "leaves no source of rewards"),
    ],
)
def test_what_teaches_nothing_is_refused_in_training_and_fine_elsewhere(files, overrides, key, why):
    text = refusal(*files, *overrides)
    assert text.startswith(f"{key} (command line): ")
    assert why in text
    assert "\n" not in text
    start(*files, f"data.val_files={files[0].partition('=')[2]}", *overrides, command="eval")


@pytest.mark.parametrize(
    ("sources", "rewards"),
    [
        ("", False),
        ("{multi}.tool_config_path=${{etude.builtin_tools:calculator}}", True),
        ("{multi}.tool_config_path=${{etude.builtin_tools:calculator}} {multi}.enable=false", False),
        ("{multi}.tool_config_path=${{etude.builtin_tools:calculator}} reward_model.tool_reward_weight=0", False),
        ("{multi}.function_tool_path={file}", True),
        ("{multi}.interaction_config_path={file}", True),
        ("actor_rollout_ref.env.name=base", True),
        ("actor_rollout_ref.env.name=base {multi}.enable=false", False),
        ("plugins=[{file}]", True),
        (f"{ROLLOUT}.agent.agent_loop_config_path={{file}}", True),
        (f"{ROLLOUT}.agent.openai_agent.function={{file}}:f", True),
        (f"{ROLLOUT}.agent.openai_agent.command=[run]", True),
        ("plugins=[{file}] reward_model.tool_reward_weight=0 reward_model.score_weight=0", False),
    ],
)
def test_a_run_that_no_one_rewards_is_refused(files, tmp_path, sources, rewards):
    (tmp_path / "own.py").write_text("")
    overrides = sources.format(multi=f"{ROLLOUT}.multi_turn", file=tmp_path / "own.py").split()
    if rewards:
        start(*files, "reward_model.enable=false", *overrides)
    else:
        assert "leaves no source of rewards" in refusal(*files, "reward_model.enable=false", *overrides)


def test_a_loop_of_ones_own_file_may_be_the_default(files, tmp_path):
    (tmp_path / "loops.yaml").write_text("[{name: mine, _target_: mine.Loop}]")
    loops = f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml"
    start(*files, loops, f"{ROLLOUT}.agent.default_agent_loop=mine")


def test_each_command_needs_its_own(files):
    assert "data.val_files is empty" in refusal(*files, command="eval")
    assert "model.path is not set" in refusal(command="sft", root="sft")
    assert "sft is a configuration of `etude sft`" in refusal(command="train", root="sft")
    assert "a configuration of `etude train`" in refusal(*files, command="sft")
    start(*files[1:], f"data.val_files={files[0].partition('=')[2]}", command="eval")


def test_what_has_no_effect_may_be_missing(files):
    start(*files, "critic.model.path=/nowhere/critic")


def test_lengths_beyond_the_model_are_said(files, caplog):
    with caplog.at_level(logging.WARNING, "etude.config"):
        start(*files, "data.max_response_length=4000")
    [line] = caplog.messages
    assert "data.max_prompt_length=1024 and data.max_response_length=4000 need 5024 positions" in line


def test_only_what_cannot_be_a_folder_is_looked_up_on_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    for path in ("/nowhere", "./a/b", "~/a", "a/b/c", "model", "models/mine", "runs/mine", "Qwen/Qwen3-0.6B"):
        with pytest.raises(ConfigError, match="model folder not found"):
            local_folder(path)
    assert local_folder("HuggingFaceTB/SmolLM2-135M") is None


@pytest.mark.parametrize(
    "arguments",
    [
        [f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.server_urls=[http://a:1]"],
        ["algorithm.gamma=5"],
        [],
        [f"{ROLLOUT}.name=vlm"],
        ["plugins=[/nowhere.py]"],
    ],
)
def test_a_command_refuses_before_torch_is_imported(arguments):
    code = (
        "import sys; from etude.cli.main import cli, run; status = run(cli, ['train', *sys.argv[1:]]); "
        "sys.exit(10 + ('torch' in sys.modules) + (status != 2))"
    )
    assert subprocess.run([sys.executable, "-c", code, *arguments], timeout=120, capture_output=True).returncode == 10


@pytest.mark.parametrize(("estimator", "refused"), [("grpo", True), ("gdpo", False)])
def test_several_rewards_that_all_weigh_nothing_are_refused_unless_they_are_read_one_by_one(files, estimator, refused):
    entries = "{{path: etude.rewards.tags, weight: 0}}, {{path: etude.rewards.repetition, weight: {}}}"
    rewards = f"custom_reward_function.rewards=[{entries}]"
    given = (
        *files,
        f"algorithm.adv_estimator={estimator}",
        *(() if refused else ("algorithm.gdpo_reward_keys=[tags]",)),
    )
    start(*given, rewards.format(0.1))
    if refused:
        assert "custom_reward_function.rewards" in refusal(*given, rewards.format(0))
    else:
        start(*given, rewards.format(0))
