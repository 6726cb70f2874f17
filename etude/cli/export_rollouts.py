"""`etude export-rollouts DIR`: exports a run's rollouts to the formats of other programs."""

from __future__ import annotations

from pathlib import Path

import click

from etude.viewer.exports import FORMATS, export_rollouts
from etude.viewer.index import RolloutIndex
from etude.viewer.query import HELP, parse_query

_SEARCH_SECONDS = 3600.0


@click.command("export-rollouts")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--format", "name", type=click.Choice(list(FORMATS)), required=True, help="What to write.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New file or folder.")
@click.option("--filter", "query", default="", help=f"Only these, as in etude view: {HELP}.")
def export_rollouts_command(path: Path, name: str, out: Path, query: str) -> None:
    """Write the rollouts of PATH (a run's folder, a folder of dumps, or one dump; verl's too) for other programs.

    \b
    atif     ATIF 1.7 trajectories: a folder of JSON files, or one file if --out ends with .jsonl
    inspect  a folder of Inspect .eval logs, one a step
    otel     OpenTelemetry gen_ai spans: one file of OTLP JSON lines
    parquet  one table

    Token ids, loss mask and log-probs are in all of them.

    \b
    Example:
      etude export-rollouts runs/etude/mine --format atif --out mine.jsonl --filter 'score>0.5'
    """
    wanted = parse_query(query)
    index = RolloutIndex(path)
    index.refresh()
    rows = index.select(wanted, seconds=_SEARCH_SECONDS).rows
    count = export_rollouts(index, rows, name, out)
    click.echo(f"{out}: {count:,} rollouts")
    if index.bad_lines:
        where = f"{index.bad[0].place} ({index.bad[0].reason})"
        click.echo(f"left out: {index.bad_lines:,} lines that are no rollouts, first {where}", err=True)
