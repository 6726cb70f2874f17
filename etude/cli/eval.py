"""`etude eval`: rolls out a model on validation rows and scores the rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from etude.cli.config import PLAIN_SETTINGS, configuration_arguments


@click.command("eval", context_settings=PLAIN_SETTINGS)
@configuration_arguments
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the metrics.")
@click.option("--dump", "dump_folder", type=click.Path(path_type=Path), help="Folder for the trajectories.")
@click.option("--fresh", is_flag=True, help="Roll out everything again, also what an earlier start left.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def evaluate(
    config_name: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    output: Path | None,
    dump_folder: Path | None,
    fresh: bool,
    as_json: bool,
) -> None:
    """Roll out a model on data.val_files and score it, one data source after another.

    Samples of a prompt count as one: metrics are means over prompts, intervals count prompts. Where infrastructure failures
    drop more than trainer.min_valid_fraction allows, there are no metrics.

    Greedy by default; sampled with  actor_rollout_ref.rollout.val_kwargs.do_sample=true, and val_kwargs.n above 1 also gives
    avg@n, pass@k and maj@k. Trajectories are always kept, by default in a folder of their own in
    trainer.default_local_dir. Killed and started again, it rolls out only what is missing.

    \b
    Example:
      etude eval --config-name gsm8k_tool data.val_files=gsm8k/test.parquet \\
        actor_rollout_ref.model.path=models/mine
    """
    from etude.config import compose
    from etude.quickstart.prepare import example_inputs

    made = example_inputs(config_path, config_name, overrides, needs_model=True)
    config = compose(config_name, (*made, *overrides), config_path, command="eval")  # before torch is imported
    from etude.jsonl import json_safe
    from etude.trainer.run import evaluate as run
    from etude.viewer.display import RolloutBar

    if as_json:
        click.echo(json.dumps(json_safe(run(config, output=output, dump_folder=dump_folder, fresh=fresh))))
        return
    result = run(config, RolloutBar(), output=output, dump_folder=dump_folder, fresh=fresh)
    for source, metrics in result["sources"].items():
        click.echo(f"{source}: {_sentence(metrics)}")
        _print_estimates(metrics)
    if len(result["sources"]) > 1:
        click.echo(f"all: {_sentence(result)}")
        _print_estimates(result)
    click.echo(f"trajectories: {result['folder']}/0.jsonl")


def _print_estimates(metrics: dict[str, Any]) -> None:
    """Prints `avg@n`, `pass@k` and `maj@k` if there are several samples per prompt."""
    estimates = {name: value for name, value in metrics.items() if "@" in name}
    for name, value in estimates.items() if len(estimates) > 1 else ():
        click.echo(f"  {name} {value['value']:.3f} ({value['low']:.3f} to {value['high']:.3f})")


def _sentence(metrics: dict[str, Any]) -> str:
    counts = f"{metrics['prompts']} prompts, {metrics['samples']} samples, {metrics['dropped']} dropped"
    if not metrics["samples"]:
        return counts
    success, used = (
        f"{metrics[name]:.3f} (95 % interval {metrics[f'{name}_low']:.3f} to {metrics[f'{name}_high']:.3f})"
        for name in ("success", "tool_use")
    )
    return f"success {success}, tool use {used}, mean reward {metrics['reward']:.3f}; {counts}"
