"""`etude report RUN_DIR`: rewrites a run's report page from the files in its folder."""

from __future__ import annotations

from pathlib import Path

import click

from etude.viewer.conversations import sanitize_text


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--title", help="Heading of the page; default the folder's name.")
@click.option("--rollouts", type=click.Path(path_type=Path), help="Rollout dumps; default RUN_DIR/rollouts.")
@click.option("--validation", type=click.Path(path_type=Path), help="Validation dumps; default RUN_DIR/validation.")
@click.option("--why", is_flag=True, help="Print why the last step's loss may be zero instead, with examples.")
def report(run_dir: Path, title: str | None, rollouts: Path | None, validation: Path | None, why: bool) -> None:
    """Write RUN_DIR/report.html and print its path."""
    from etude.viewer.report import list_causes, write_report  # slow to import (matplotlib)

    if why:
        for each in list_causes(run_dir, rollouts):
            examples = f"; such as {', '.join(each.examples)}" if each.examples else ""
            click.echo(sanitize_text(f"{each.text} {each.what}{examples}"))
        return
    click.echo(write_report(run_dir, title=title, rollouts=rollouts, validation=validation))
