"""verl's own example commands, corrected as their one message says, train the tiny model."""

import pytest
from commands_stage import COMMANDS, MODEL, arguments_of, corrected
from house_stage import ROLLOUT, metrics

from etude.cli.main import cli, run
from etude.quickstart.prepare import TOOLS


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_corrected_command_runs(name, tiny, tmp_path, caplog):
    place, arguments = arguments_of(name, tmp_path)
    here = [
        f"data.train_files={tiny.folder}/data/train.parquet",
        f"data.val_files={tiny.folder}/data/test.parquet",
        f"{MODEL}.path={tiny.model}",
        f"{ROLLOUT}.multi_turn.tool_config_path={TOOLS}",
        f"{ROLLOUT}.name=native",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    if "critic.model.path=a" in arguments:
        here.append(f"critic.model.path={tiny.model}")
    smaller = [
        "data.train_batch_size=2",
        "data.max_prompt_length=128",
        "data.max_response_length=72",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.max_model_len=null",
        "trainer.total_training_steps=1",
        "trainer.report=false",
    ]
    options = [f"--config-{key.removeprefix('config_')}={value}" for key, value in place.items() if value]
    assert run(cli, ["train", *options, *corrected(name, arguments), *here, *smaller]) == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 1
    assert sum(message.startswith("no effect here: ") for message in caplog.messages) == 1
