"""`etude env`: tests environments and tool sets."""

from __future__ import annotations

import click

from etude.cli.check import json_option, print_findings
from etude.cli.config import PLAIN_SETTINGS, configuration_arguments


@click.group()
def env() -> None:
    """Test tool sets and environments."""


@env.command(context_settings=PLAIN_SETTINGS)
@configuration_arguments
@click.option("--rows", default=6, show_default=True, type=click.IntRange(1), help="Rows of data.train_files to play.")
@click.option("--seed", default=0, show_default=True, help="Of the random agent.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds for a trajectory.")
@json_option
def test(
    config_name: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    rows: int,
    seed: int,
    timeout: float,
    as_json: bool,
) -> int:
    """Test a run's tools, environment and reward for what breaks training.

    The arguments are those of `etude train`. Scripted agents play the first rows: agents that say nothing, copy what they
    see, guess at everything or call at random must not be paid; trajectories must repeat, not see each other, and leave
    nothing behind, also where a call is cancelled or never ends. Tools are really called, also with odd arguments. Exit
    status 1 if there is an error.

    \b
    Example:
      etude env test --config-path shop --config-name agent
    """
    from etude.testing import inspect_environment

    findings = inspect_environment(config_name, overrides, config_path, rows=rows, seed=seed, seconds=timeout)
    return print_findings(findings, as_json)
