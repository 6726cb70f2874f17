"""`etude config`: shows the configuration as a run would see it, and the source of each value.

Invariant: shows exactly what `compose` would pass to a run with the same arguments, including its errors; loads no model
and no data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.text import Text

    from etude.config import Composition

F = TypeVar("F", bound=Callable[..., Any])

PLAIN_SETTINGS = {"ignore_unknown_options": True}
"""Click settings that let an override start with a dash or a plus sign."""


# Shell completion. Never prints or raises: an invalid configuration gives no completions.


def _complete_name(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completes `--config-name`: Étude's configurations, and the YAML files in its search folders."""
    from etude.config import package_roots

    given = context.params.get("config_path")
    folders = [Path(given)] if given else [Path("config"), Path()]
    own = {path.stem for folder in folders for path in folder.expanduser().glob("*.yaml")}
    return [name for name in [*package_roots(), *sorted(own)] if name.startswith(incomplete)]


def _complete_key(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completes overrides: `key=` for each key of the configuration named on the command line."""
    from etude.config import DEFAULT_ROOT, compose_with_sources
    from etude.errors import EtudeError

    root = "sft" if context.info_name == "sft" else DEFAULT_ROOT
    try:
        chosen = compose_with_sources(
            context.params.get("config_name"), (), context.params.get("config_path"), root=root
        )
    except EtudeError:
        return []
    return [f"{key}=" for key in chosen.sources if key.startswith(incomplete)]


def configuration_arguments(function: F) -> F:
    """Adds the arguments that select a configuration: `--config-name`, `--config-path`, and key=value overrides."""
    function = click.argument("overrides", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_key)(function)
    function = click.option(
        "-cp", "--config-path", metavar="FOLDER", help="Folder of your YAML file (else ./config, then the current one)."
    )(function)
    return click.option(
        "-cn",
        "--config-name",
        metavar="NAME",
        shell_complete=_complete_name,
        help="Your YAML file, or a configuration that comes with Étude.",
    )(function)


@click.command(context_settings=PLAIN_SETTINGS)
@configuration_arguments
@click.option("--explain", "explained", metavar="KEY", multiple=True, help="What a key means, takes and has here.")
@click.option("--yaml", "as_yaml", is_flag=True, help="Plain YAML, without the column of sources.")
@click.option("--resolve/--no-resolve", default=True, help="Fill in ${…} interpolations (default) or show them.")
def config(
    config_name: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    explained: tuple[str, ...],
    as_yaml: bool,
    resolve: bool,
) -> None:
    """Show a configuration and where each value came from.

    OVERRIDES are key=value arguments, for example  data.train_batch_size=32; a key without a value is explained, as with
    --explain: its meaning, what it takes, its default, where its value came from and whether it has an effect here.

    \b
    Examples:
      etude config --config-name quickstart trainer.seed=3
      etude config actor_rollout_ref.actor.clip_ratio
      etude config --config-name sft optim
    """
    from etude.config import compose_with_sources

    keys = [*explained, *(each for each in overrides if each[:1].isalpha() and "=" not in each)]
    settings = [each for each in overrides if each not in keys]
    composition = compose_with_sources(config_name, settings, config_path, resolve=resolve)
    if keys:
        for number, key in enumerate(keys):
            click.echo("\n".join([*([""] if number else []), *_explain(composition, key)]))
    elif as_yaml:
        from omegaconf import OmegaConf

        click.echo(OmegaConf.to_yaml(composition.config), nl=False)
    else:
        _print_table(composition)


def _explain(composition: Composition, name: str) -> Iterator[str]:
    """Yields lines that document the key `name`, or each key of the section `name`; a unique suffix of a key suffices.

    Raises:
        ConfigError: no key matches, or the suffix is ambiguous.
    """
    from etude.checks.settings import format_option, inert_reason
    from etude.config.translation import foreign_key
    from etude.options import declarations
    from etude.options.types import allowed
    from etude.options.validate import yaml_text

    options = composition.options
    declared = declarations(type(options))
    matches = _matches(declared, name)
    if not matches:
        yield name
        yield f"  {foreign_key(name)}"
    for number, key in enumerate(matches):
        each, missing = declared[key], inert_reason(options, key)
        about = each.about
        if number:
            yield ""
        yield f"{key}={format_option(options, key)}"
        yield f"  {about.meaning}"
        yield f"  takes       {allowed(each.hint)}{f', in {about.unit}' if about.unit else ''}"
        yield f"  default     {about.written or yaml_text(each.default)}"
        yield f"  set by      {composition.sources.get(key, 'its default')}"
        if about.verl_default or about.verl_meaning:
            default = f"default {about.verl_default}" if about.verl_default else ""
            yield f"  in verl     {'; '.join(filter(None, (default, about.verl_meaning)))}"
        if about.alias_of:
            yield f"  other name  {about.alias_of}"
        if missing:
            yield f"  no effect   here: it applies {missing}"
        elif each.when:
            yield f"  applies     {each.when[-1][1].condition}, as here"


def _matches(declared: Collection[str], name: str) -> list[str]:
    """The keys meant by `name`; none if it is another framework's that is no key here."""
    from etude.config.foreign_keys import ALIASES, TRL_NAMES
    from etude.config.translation import foreign_key
    from etude.errors import ConfigError
    from etude.registry import did_you_mean

    found = [key for key in declared if key == name or key.startswith(f"{name}.")]
    if found:
        return found
    found = [key for key in declared if key.endswith(f".{name}")]
    if len(found) > 1:
        raise ConfigError(f"several keys end in {name}: {', '.join(found)}")
    if not found:
        if name in TRL_NAMES:
            raise ConfigError(f"unknown key {name}: TRL's {name} is {TRL_NAMES[name]} here (docs/from-trl.md)")
        if other := next((key for key in ALIASES if key == name or key.endswith(f".{name}")), None):
            return [key for key in declared if key == ALIASES[other] or key.startswith(f"{ALIASES[other]}.")]
        if foreign_key(name):
            return []
        sections = {key.rpartition(".")[0] for key in declared} - {""}
        raise ConfigError(f"unknown key {name}{did_you_mean(name, [*declared, *sections])}")
    return found


def _print_table(composition: Composition) -> None:
    """Prints the tree, with the source of each value in a second column (piped: after a tab). User-set values are green."""
    from rich.table import Table

    from etude.cli.console import open_console

    console = open_console()
    rows = _rows(composition.config, composition.sources)
    if not console.is_terminal:
        for text, source in rows:
            click.echo(f"{text.plain}\t{source}".rstrip())
        return
    table = Table.grid(padding=(0, 3))
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for text, source in rows:
        table.add_row(text, source)
    console.print(table)


def _rows(section: DictConfig, sources: dict[str, str], prefix: str = "", depth: int = 0) -> Iterator[tuple[Text, str]]:
    """Yields a row per line of the tree: (key and value, source of the value)."""
    from omegaconf import DictConfig
    from rich.text import Text

    from etude.checks.settings import is_users

    for name, value in section.items_ex(resolve=False):
        key = prefix + str(name)
        label = Text("  " * depth).append(str(name) + ":", style="bold" if isinstance(value, DictConfig) else "")
        if isinstance(value, DictConfig) and len(value):
            yield label, ""
            yield from _rows(value, sources, f"{key}.", depth + 1)
        else:
            source = sources.get(key, "")
            yield label.append(f" {_format_value(value)}", style="green" if is_users(source) else "cyan"), source


def _format_value(value: Any) -> str:
    """Formats a leaf as one line of YAML."""
    import yaml
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
    dumped: str = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000)
    return dumped.removesuffix("\n...\n").strip()
