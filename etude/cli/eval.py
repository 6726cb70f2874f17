"""`etude eval`: rolls out a model on validation rows and scores it."""

from __future__ import annotations

from pathlib import Path

import click

from etude.cli.config import PLAIN_SETTINGS, configuration_arguments


@click.command("eval", context_settings=PLAIN_SETTINGS)
@configuration_arguments
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the figures.")
@click.option("--dump", "dump_folder", type=click.Path(path_type=Path), help="Folder for the trajectories.")
def evaluate(
    config_name: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    output: Path | None,
    dump_folder: Path | None,
) -> None:
    """Roll out a model on data.val_files and score it.

    Greedy by default; sampled with  actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1

    \b
    Example:
      etude eval --config-name gsm8k_tool data.val_files=gsm8k/test.parquet \\
        actor_rollout_ref.model.path=models/mine
    """
    from etude.config import compose_run

    config = compose_run("eval", config_name, overrides, config_path)  # before torch is imported
    from etude.trainer.run import evaluate as run

    result = run(config, output=output, dump_folder=dump_folder)
    click.echo(
        f"success {result['success']:.3f} (95 % interval {result['success_low']:.3f} to {result['success_high']:.3f}), "
        f"tool use {result['tool_use']:.3f}, mean reward {result['reward']:.3f}, {result['samples']} samples, "
        f"{result['dropped']} dropped"
    )
