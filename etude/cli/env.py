"""`etude env`: lists, checks and tests environments and tool sets."""

from __future__ import annotations

import click
from rich.markup import escape
from rich.table import Table

from etude.cli.check import json_option, print_findings
from etude.cli.config import PLAIN_SETTINGS, configuration_arguments
from etude.cli.console import open_console
from etude.errors import one_line

plugins_option = click.option("--plugins", multiple=True, help="A file or module of yours that registers environments.")


@click.group()
def env() -> None:
    """List and check environments, and test a run's tools and environment."""


@env.command("list")
@click.argument("package", required=False)
@plugins_option
def list_environments(package: str | None, plugins: tuple[str, ...]) -> int:
    """List the packages whose environments are opened by id, and the registered ones; of PACKAGE, its environments.

    \b
    Example:
      etude env list
      etude env list reasoning_gym
    """
    from importlib import import_module

    from etude.environments import ENVIRONMENTS
    from etude.environments.loader import ADAPTERS, adapter_of
    from etude.registry import load_plugins

    load_plugins(plugins)
    if package is not None:
        adapter = adapter_of(package.rstrip(":"))
        for name in getattr(import_module(adapter.module), "names", lambda: [adapter.name])():
            click.echo(f"{package.rstrip(':')}:{name}")
        return 0
    table = Table("id", "what", "installed", box=None)
    for prefix, adapter in ADAPTERS.items():
        missing = escape(f"no: pip install 'etude[{adapter.extra}]'")
        table.add_row(
            f"{prefix}:{adapter.name}", adapter.what, adapter.version or "yes" if adapter.is_installed else missing
        )
    for name in ENVIRONMENTS.names():
        table.add_row(name, "registered by a plug-in", "yes")
    open_console().print(table)
    return 0


@env.command("check")
@click.argument("id")
@click.option("--args", default="{}", help="Its arguments, as a YAML or JSON mapping.")
@plugins_option
@json_option
def check_one(id: str, args: str, plugins: tuple[str, ...], as_json: bool) -> int:
    """Check that an environment can be trained on, by playing it.

    One seed must have one start, also for sessions at once; nonsense must neither crash it nor be paid; its own answer, if
    it has one, must earn 1; each session must be closed once, however it ends. Exit status 1 if there is an error.

    \b
    Example:
      etude env check reasoning_gym:chain_sum --args '{max_terms: 3}'
    """
    import yaml

    from etude.errors import ConfigError
    from etude.options import EnvironmentOptions
    from etude.registry import load_plugins
    from etude.testing.environment_check import check_environment

    load_plugins(plugins)
    try:
        given = yaml.safe_load(args)
    except yaml.YAMLError as error:
        raise ConfigError(f"--args is no YAML: {one_line(error)}") from error
    return print_findings(check_environment(EnvironmentOptions(id=id, args=given or {})), as_json)


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
    from etude.quickstart.prepare import example_inputs
    from etude.testing import inspect_environment

    made = example_inputs(config_path, config_name, overrides)
    findings = inspect_environment(config_name, (*made, *overrides), config_path, rows=rows, seed=seed, seconds=timeout)
    return print_findings(findings, as_json)
