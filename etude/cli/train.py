"""`etude train`: starts a reinforcement-learning run from a configuration."""

from __future__ import annotations

from pathlib import Path

import click

from etude.cli.config import PLAIN_SETTINGS, configuration_arguments


@click.command(context_settings=PLAIN_SETTINGS)
@configuration_arguments
@click.option("--root", default="ppo_trainer", hidden=True, help="Configuration that a user's own YAML builds on.")
def train(config_name: str | None, config_path: str | None, overrides: tuple[str, ...], root: str) -> None:
    """Train a policy by reinforcement learning.

    OVERRIDES are key=value arguments; `etude config` shows every key.

    \b
    Examples:
      etude train --config-name grpo_trainer data.train_files=train.parquet \\
        actor_rollout_ref.model.path=models/mine \\
        actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml
      etude train --config-name gsm8k_tool data.train_files=gsm8k/train.parquet \\
        data.val_files=gsm8k/test.parquet actor_rollout_ref.model.path=models/mine

    A run continues from its last checkpoint (trainer.resume_mode). Ctrl-C ends it after the current step, with a checkpoint;
    a second Ctrl-C abandons the step.
    """
    from etude.config import compose
    from etude.quickstart.prepare import example_inputs
    from etude.run_folder import check_unlocked

    # before torch is imported
    made = example_inputs(config_path, config_name, overrides, needs_model=True)
    config = compose(config_name or root, (*made, *overrides), config_path, root=root, command="train")
    check_unlocked(Path(config.trainer.default_local_dir))
    from etude.trainer.run import train as run
    from etude.viewer.display import Display

    run(config, Display())
