"""`etude new`: scaffolds a new agent."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click


@click.group()
def new() -> None:
    """Begin something of your own."""


@new.command()
@click.argument("name")
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder to write NAME to; default the present one.",
)
def agent(name: str, output_dir: Path) -> None:
    """Write a folder NAME with an agent that runs as it is: a tool, its YAML, a reward, rows, a run, tests.

    \b
    Example:
      etude new agent shop
    """
    from etude.preflight.new import write_agent

    files = write_agent(name, output_dir)
    folder = files[0].parent
    click.echo(f"{folder}: {', '.join(file.name for file in files)}\n\nnext:")
    run = f"--config-path {folder} --config-name agent"
    for line in (
        f"python {folder}/model.py",
        f"{'' if find_spec('pytest') else 'pip install pytest && '}python -m pytest {folder}",
        f"etude check {run}",
        f"etude play {run}",
        f"etude train {run} trainer.total_training_steps=2",
    ):
        click.echo(f"  {line}")
