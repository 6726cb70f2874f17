"""What a run needs of this machine: named all at once, before torch is imported."""

import json
import logging
import subprocess
import sys

import pytest

from etude.config import compose_with_sources
from etude.config.preflight import check_start
from etude.errors import ConfigError
from etude.model_folder import local_folder

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
    composition = compose_with_sources(root, list(overrides))
    check_start(composition.options, composition.sources, command)


def refusal(*overrides: str, **how: str) -> str:
    with pytest.raises(ConfigError) as caught:
        start(*overrides, **how)
    return str(caught.value)


def test_a_run_that_has_all_it_needs_may_start(files, tmp_path):
    start(*files)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.train_files=[]", "data.train_files is empty"),
        ("data.train_files=/nowhere/x.parquet", "file not found: /nowhere/x.parquet"),
        ("data.val_files=[/nowhere/x.parquet]", "file not found: /nowhere/x.parquet"),
        (f"{MODEL}=null", f"{MODEL} is not set"),
        (f"{MODEL}=/nowhere/model", "/nowhere/model: model folder not found"),
        (f"{MODEL}=models/mine", "models/mine: model folder not found"),
        (f"{ROLLOUT}.multi_turn.tool_config_path=/nowhere/tools.yaml", "file not found: /nowhere/tools.yaml"),
        (f"{ROLLOUT}.multi_turn.function_tool_path=/nowhere/tools.py", "file not found: /nowhere/tools.py"),
        (f"{ROLLOUT}.multi_turn.interaction_config_path=/nowhere/a.yaml", "file not found: /nowhere/a.yaml"),
        (f"{ROLLOUT}.agent.agent_loop_config_path=/nowhere/a.yaml", "file not found: /nowhere/a.yaml"),
        (f"{ROLLOUT}.agent.openai_agent.function=/nowhere/a.py:run", "file not found: /nowhere/a.py"),
        ("custom_reward_function.path=/nowhere/score.py", "file not found: /nowhere/score.py"),
        ("custom_reward_function.path=no_such_module_here.score", "neither a file nor an installed module"),
        ("plugins=[/nowhere/plugin.py]", "file not found: /nowhere/plugin.py"),
        ("reward_model.reward_manager=naiv", "nothing is registered as 'naiv'; did you mean 'naive'?"),
        (f"trainer.default_local_dir={__file__}/run", "is a file, not a folder"),
        (f"trainer.default_local_dir={'x' * 300}", "File name too long"),
        (f"{ROLLOUT}.max_model_len=5000", "the model has 4096 positions"),
        ("data.max_prompt_length=4096", "leaves no room for an answer"),
    ],
)
def test_what_is_missing_is_named(files, override, reason):
    text = refusal(*files, override)
    assert reason in text
    assert "\n" not in text
    assert override.partition("=")[0] in text


def test_an_extra_that_is_not_installed_is_named(files, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = refusal(*files, "trainer.logger=[wandb]", f"{ROLLOUT}.trace.backend=otel")
    assert "trainer.logger=['wandb'] (command line): 'wandb' needs an optional dependency" in text
    assert "etude[otel]" in text


def test_everything_missing_is_in_one_message():
    text = refusal("custom_reward_function.path=/nowhere/score.py", f"{MODEL}=/nowhere/model")
    assert [line.split()[0].partition("=")[0] for line in text.splitlines()[1:]] == [
        "data.train_files",
        MODEL,
        "custom_reward_function.path",
    ]


def test_each_command_needs_its_own(files):
    assert "data.val_files is empty" in refusal(*files, command="eval")
    assert "model.path is not set" in refusal(command="sft", root="sft")
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


@pytest.mark.parametrize("arguments", [["algorithm.gamma=5"], [], [f"{ROLLOUT}.name=vlm"], ["plugins=[/nowhere.py]"]])
def test_a_command_refuses_before_torch_is_imported(arguments):
    code = (
        "import sys; from etude.cli.main import cli, run; status = run(cli, ['train', *sys.argv[1:]]); "
        "sys.exit(10 + ('torch' in sys.modules) + (status != 2))"
    )
    assert subprocess.run([sys.executable, "-c", code, *arguments], timeout=120, capture_output=True).returncode == 10
