"""`etude eval`: rolls out a model on validation rows and scores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from etude.cli.config import PLAIN_SETTINGS, configuration_arguments


@click.command("eval", context_settings=PLAIN_SETTINGS)
@configuration_arguments
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the metrics.")
@click.option("--dump", "dump_folder", type=click.Path(path_type=Path), help="Folder for the trajectories.")
def evaluate(
    config_name: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    output: Path | None,
    dump_folder: Path | None,
) -> None:
    """Roll out a model on data.val_files and score it, one data source after another.

    Samples of a prompt count as one: metrics are means over prompts, intervals count prompts. Where infrastructure failures
    drop more than trainer.min_valid_fraction allows, there are no metrics.

    Greedy by default; sampled with  actor_rollout_ref.rollout.val_kwargs.do_sample=true

    \b
    Example:
      etude eval --config-name gsm8k_tool data.val_files=gsm8k/test.parquet \\
        actor_rollout_ref.model.path=models/mine
    """
    from etude.config import compose_run

    config = compose_run("eval", config_name, overrides, config_path)  # before torch is imported
    from etude.trainer.run import evaluate as run
    from etude.viewer.display import RolloutBar

    result = run(config, RolloutBar(), output=output, dump_folder=dump_folder)
    for source, metrics in result["sources"].items():
        click.echo(f"{source}: {_sentence(metrics)}")
        own = f"val-core/{source}/reward/"
        core = {name.removeprefix(own): value for name, value in result["metrics"].items() if name.startswith(own)}
        click.echo("  " + ", ".join(f"{name} {value:.3f}" for name, value in core.items() if "/ci95_" not in name))
    if len(result["sources"]) > 1:
        click.echo(f"all: {_sentence(result)}")


def _sentence(metrics: dict[str, Any]) -> str:
    counts = f"{metrics['prompts']} prompts, {metrics['samples']} samples, {metrics['dropped']} dropped"
    if not metrics["samples"]:
        return counts
    low, high = metrics["success_low"], metrics["success_high"]
    return (
        f"success {metrics['success']:.3f} (95 % interval {low:.3f} to {high:.3f}), tool use {metrics['tool_use']:.3f}, "
        f"mean reward {metrics['reward']:.3f}; {counts}"
    )
