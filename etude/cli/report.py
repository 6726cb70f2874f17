"""`etude report RUN_DIR`: writes a run's page again, from the files in its folder."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--title", help="Heading of the page; default the folder's name.")
@click.option("--rollouts", type=click.Path(path_type=Path), help="Rollout dumps; default RUN_DIR/rollouts.")
@click.option("--validation", type=click.Path(path_type=Path), help="Validation dumps; default RUN_DIR/validation.")
def report(run_dir: Path, title: str | None, rollouts: Path | None, validation: Path | None) -> None:
    """Write RUN_DIR/report.html and print its path."""
    from etude.viewer.report import write_report  # draws charts: kept out of `etude --help`

    click.echo(write_report(run_dir, title=title, rollouts=rollouts, validation=validation))
