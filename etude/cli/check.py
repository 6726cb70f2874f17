"""`etude check`: checks in seconds whether a configuration would train. Also prints the findings of `etude doctor`.

Invariant: exit status 0 means no errors, 1 at least one; warnings do not count.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from etude.cli.config import PLAIN_SETTINGS, configuration_arguments
from etude.errors import plural

if TYPE_CHECKING:
    from etude.checks.findings import Findings

_MARKS = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "error": ("✗", "bold red"),
    "skipped": ("–", "bright_black"),
}
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of the table.")


@click.command(context_settings=PLAIN_SETTINGS)
@configuration_arguments
@click.option("--rows", default=1000, show_default=True, type=click.IntRange(1), help="Rows to read of each split.")
@click.option("--timeout", default=8.0, show_default=True, help="Seconds for a trial rollout, and for a score.")
@click.option("--rollout/--no-rollout", "rolls_out", default=True, help="Whether to call each tool, a few times.")
@click.option("--sft", is_flag=True, help="Your YAML is for `etude sft` (needed only where it does not say so).")
@json_option
def check(
    config_name: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    rows: int,
    timeout: float,
    rolls_out: bool,
    sft: bool,
    as_json: bool,
) -> int:
    """Check whether a configuration would train, without a GPU or the model's weights.

    The arguments are those of `etude train`, or of `etude sft`. Everything is looked at, and each finding has its remedy:
    keys, plug-ins, chat template, tools, rows, batch sizes, what the reward pays on real rows, services, memory, disk;
    last, a scripted model calls each tool. Exit status 1 if there is an error.

    \b
    Example:
      etude check --config-path guess --config-name agent
      etude check --config-name sft data.train_files=demonstrations.parquet model.path=models/mine
    """
    from etude.quickstart.prepare import example_inputs
    from etude.testing import inspect_run

    made = example_inputs(config_path, config_name, overrides)
    findings = inspect_run(
        config_name, (*made, *overrides), config_path, rows=rows, seconds=timeout, rolls_out=rolls_out, sft=sft
    )
    return print_findings(findings, as_json)


def print_findings(findings: Findings, as_json: bool) -> int:
    """Prints the findings and returns the exit status."""
    if as_json:
        click.echo(
            json.dumps({"ok": not findings.failed, "findings": [asdict(each) for each in findings.all]}, indent=2)
        )
        return int(findings.failed)
    from rich.table import Table
    from rich.text import Text

    from etude.cli.console import open_console
    from etude.viewer.conversations import sanitize_text

    table = Table(box=None, pad_edge=False, show_header=False)
    for options in ({}, {}, {"overflow": "fold"}):
        table.add_column(**options)  # type: ignore[arg-type]
    for each in findings.all:
        mark, colour = _MARKS[each.level.value]
        text = Text(sanitize_text(each.message))
        if each.fix:
            text.append(f"\n→ {sanitize_text(each.fix)}", style="cyan")
        table.add_row(Text(mark, style=colour), Text(each.subject, style=colour), text)
    console = open_console()
    with console.capture() as printed:
        console.print(table)
    for line in printed.get().splitlines():
        click.echo(line.rstrip())
    counts = {level: sum(each.level.value == level for each in findings.all) for level in ("error", "warning")}
    console.print(", ".join(plural(count, level) for level, count in counts.items()))
    return int(findings.failed)
