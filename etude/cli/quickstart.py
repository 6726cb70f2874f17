"""`etude quickstart`: a tiny model learns to use a calculator, from nothing, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--output-dir", type=click.Path(path_type=Path), default=None, help="Folder [runs/quickstart/seed-N].")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of data, model and sampling.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def quickstart(output_dir: Path | None, seed: int, overrides: tuple[str, ...]) -> None:
    """Train a tiny model to use a calculator, on a CPU, in minutes.

    It makes arithmetic tasks and a model of 0.6 million parameters, warms it up on demonstrations that mostly guess, and
    then lets reinforcement learning find out that the calculator is worth using. Run it again to go on after an
    interruption. OVERRIDES are key=value arguments for the reinforcement-learning run.
    """
    from etude.quickstart.stages import Quickstart

    folder = (output_dir or Path("runs") / "quickstart" / f"seed-{seed}").resolve()
    summary = Quickstart(folder, seed, overrides, _say).run()
    from etude.viewer.report import write_report  # draws charts: slow to import, not needed to refuse a wrong argument

    report = write_report(folder, title=f"Quickstart, seed {seed}", validation=folder / "evaluation" / "sampled")
    _print(summary, folder, report)


def _say(text: str) -> None:
    click.secho(f"\n== {text}", bold=True)


def _print(summary: dict[str, Any], folder: Path, report: Path) -> None:
    from rich.table import Table

    from etude.cli.console import open_console

    table = Table(title=f"{summary['samples']} fresh tasks (95 % intervals)", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    for name in summary["before"]:
        table.add_row(name, _shown(summary["before"][name]), _shown(summary["after"][name]))
    console = open_console()
    console.print()
    console.print(table)
    total, cpu = sum(summary["seconds"].values()), sum(summary["cpu_seconds"].values())
    click.echo(f"{total:.0f} s ({cpu:.0f} CPU s)")
    click.echo(f"report       {report}")
    click.echo(f"model        {summary['model']}")
    click.echo(f"trajectories {folder / 'rollouts'}")


def _shown(value: dict[str, float]) -> str:
    return f"{value['value']:.1%} ({value['low']:.1%} to {value['high']:.1%})"
