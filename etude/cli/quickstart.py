"""`etude quickstart`: trains a tiny model from scratch to use a calculator, or another example's tool, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--example", default="calculator", show_default=True, help="Name in examples/ of a checkout, or a folder."
)
@click.option("--output-dir", type=click.Path(path_type=Path), default=None, help="Folder [runs/EXAMPLE/seed-N].")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of data, model and sampling.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def quickstart(example: str, output_dir: Path | None, seed: int, overrides: tuple[str, ...]) -> None:
    """Train a tiny model to use a calculator, on a CPU, in minutes.

    It makes arithmetic tasks and a model of 0.6 million parameters, warms it up on demonstrations that mostly guess, and
    then lets reinforcement learning find out that the calculator is worth using. Run it again to go on after an
    interruption. OVERRIDES are key=value arguments for the reinforcement-learning run. Other examples do the same for
    other kinds of tools and agents; docs/gallery.md lists them.
    """
    from etude.quickstart.example import find_example
    from etude.quickstart.stages import Quickstart

    chosen = find_example(example)
    folder = output_dir.resolve() if output_dir else chosen.run_folder(seed)
    try:
        summary = Quickstart(chosen, folder, seed, overrides, _say).run()
    except KeyboardInterrupt:
        click.echo("interrupted; the same command goes on after the last stage that finished", err=True)
        raise click.exceptions.Exit(130) from None
    from etude.viewer.page import write_report

    title = f"{chosen.root.replace('_', ' ').capitalize()}, seed {seed}"
    report = write_report(folder, title=title, validation=folder / "evaluation" / "sampled")
    _print_summary(summary, folder, report)


def _say(text: str) -> None:
    click.secho(f"\n== {text}", bold=True)


def _print_summary(summary: dict[str, Any], folder: Path, report: Path) -> None:
    from rich.table import Table

    from etude.cli.console import open_console

    table = Table(title=f"{summary['samples']} fresh tasks (95 % intervals)", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    for name in summary["before"]:
        table.add_row(name, *(_format_value(summary[when][name]) for when in ("before", "after")))
    console = open_console()
    console.print()
    console.print(table)
    claim = summary["claim"]
    change, expected = claim["after"]["value"] - claim["before"]["value"], claim["margin"]
    failed = "" if claim["held"] else "FAILED: "
    click.echo(f"{failed}{claim['metric']} changed by {change:+.2f}, expected {expected:+.2f} or better")
    total, cpu = sum(summary["seconds"].values()), sum(summary["cpu_seconds"].values())
    click.echo(f"{total:.0f} s ({cpu:.0f} CPU s)")
    click.echo(f"report       {report}")
    click.echo(f"model        {summary['model']}")
    click.echo(f"trajectories {folder / 'rollouts'}")


def _format_value(value: dict[str, float] | float) -> str:
    if isinstance(value, dict):
        return f"{value['value']:.1%} ({value['low']:.1%} to {value['high']:.1%})"
    return f"{value:.2f}"
