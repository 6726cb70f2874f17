"""`etude sft`: supervised fine-tuning on conversations with tool calls."""

from __future__ import annotations

from pathlib import Path

import click

from etude.cli.config import PLAIN_SETTINGS, configuration_arguments


@click.command(context_settings=PLAIN_SETTINGS)
@configuration_arguments
def sft(config_name: str | None, config_path: str | None, overrides: tuple[str, ...]) -> None:
    """Fine-tune a model on conversations with tool calls, or on rollouts.

    Rows have a `messages` column and may have `tools`; only assistant tokens are learned. Or the files are rollout dumps of
    `etude train`: the best are imitated (data.min_score, data.max_per_prompt), or preferred to others (loss.name=dpo).

    \b
    Example:
      etude sft data.train_files=demonstrations.parquet model.path=models/mine \\
        multi_turn.tool_config_path=tools.yaml
      etude sft loss.name=dpo data.train_files=rollouts/1.jsonl model.path=models/mine
    """
    from etude.config import compose
    from etude.run_folder import check_unlocked

    # before torch is imported
    config = compose(config_name or "sft", overrides, config_path, root="sft", command="sft")
    check_unlocked(Path(config.trainer.default_local_dir))
    from etude.trainer.run import fine_tune
    from etude.viewer.display import Display

    click.echo(f"model: {fine_tune(config, Display())}")
