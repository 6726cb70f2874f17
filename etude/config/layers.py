"""The files and arguments that make up a configuration, in order of precedence.

Invariant: merging the layers of a configuration in order gives what Hydra composes from the same defaults lists; a layer's
values are at the path in the tree given by its package, interpolations unresolved.

Hydra resolves the defaults lists and parses the command line. `translation` and `checks` know the keys and their types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from etude.checks.settings import COMMAND_LINE
from etude.config.groups import GROUP_NAMES, GROUPS, STORED_ROOTS, group_values, stored
from etude.errors import ConfigError, one_line

TREE = Path(__file__).parent / "tree"


@dataclass(frozen=True)
class Layer:
    """One file of a configuration, or all arguments of the command line."""

    source: str
    """As shown to users: the file's path (package files relative to the tree), or "command line"."""
    name: str
    """The file's name in its search path, as in defaults lists: "actor/actor"."""
    is_package: bool
    """True for a file that comes with Étude."""
    values: dict[str, Any]
    """Nested, interpolations unresolved."""


def package_roots() -> list[str]:
    """The configurations that ship with Étude and that `--config-name` can name."""
    return sorted([*STORED_ROOTS, *(path.stem for path in TREE.glob("*.yaml"))])


@cache
def root_layers(root: str, group_choices: tuple[str, ...] = ()) -> tuple[Layer, ...]:
    """The files of a package root; cached, because they do not change while a process runs."""
    return tuple(file_layers(root, TREE, group_choices))


def file_layers(config_name: str, folder: Path, group_choices: Sequence[str] = ()) -> list[Layer]:
    """The files that `folder/config_name.yaml` consists of, lowest precedence first; its defaults list may name our groups.

    Args:
        group_choices: command-line arguments of the form group=option.

    Raises:
        ConfigError: a file is missing or malformed, or a defaults list does not resolve; names the file.
    """
    folder = folder.resolve()
    with _hydra(folder):
        arguments = [] if folder == TREE else [f"hydra.searchpath=['{TREE.as_uri()}']"]
        try:
            loader = GlobalHydra.instance().config_loader()
            defaults = loader.compute_defaults_list(config_name, [*arguments, *group_choices], RunMode.RUN).defaults
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(f"{folder / config_name}.yaml: {one_line(error)}") from error
        except RecursionError as error:
            what = f"{folder / config_name}.yaml: a defaults list leads back to its own file"
            raise ConfigError(what, fix="rename your file if its name is that of one of Étude's") from error
    entries = [entry for entry in defaults if not (entry.config_path or "").startswith("hydra/")]
    return [_read(str(entry.config_path), entry.package or "", folder) for entry in entries]


def load_file(path: Path) -> dict[str, Any]:
    """Loads one YAML file as it is, including its defaults list.

    Raises:
        ConfigError: it cannot be read, is malformed, or is not a mapping; names the file.
    """
    try:
        content = OmegaConf.load(path)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        tab = isinstance(error, yaml.scanner.ScannerError) and "'\\t'" in str(error)
        raise ConfigError(f"{path}: {one_line(error)}", fix="use spaces, not tabs" if tab else "") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path}: must hold key: value lines, not a list")
    return to_container(content, resolve=False)


def command_line_layer(overrides: Sequence[Override]) -> Layer:
    """Turns the key=value arguments into a layer; later ones override earlier ones.

    Raises:
        ConfigError: an argument is a sweep, or removes a key.
    """
    values = OmegaConf.create()
    for override in overrides:
        if override.is_sweep_override():
            raise ConfigError(f"'{override.input_line}' is a sweep", fix="give one value, or write a list as [a,b]")
        if override.is_delete():
            fix = f"`etude config {override.key_or_group}` says what turns it off"
            raise ConfigError(f"'{override.input_line}': keys cannot be removed", fix=fix)
        try:
            OmegaConf.update(values, override.key_or_group, override.value(), force_add=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"'{override.input_line}': {one_line(error)}") from error
    return Layer(COMMAND_LINE, COMMAND_LINE, False, to_container(values, resolve=False))


_SEVERAL = re.compile(r"[\s,;][+~]{0,2}\w+(?:\.\w+)*=")  # "a=1 b.c=2" is two arguments


def parse_arguments(arguments: Sequence[str], folder: Path) -> tuple[list[Override], list[str]]:
    """Splits command-line arguments into values and group choices (group=option).

    Raises:
        ConfigError: an argument is not of the form key=value; names it.
    """
    parser = OverridesParser.create()
    values: list[Override] = []
    choices: list[str] = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            try:
                override = parser.parse_override(argument)
            except HydraException:
                if value[:1] in ("", "[", "{", "'", '"') or _SEVERAL.search(value):
                    raise
                override = parser.parse_override(f"{key}={quoted(value)}")  # läufe/1, or runs (old)
        except HydraException as error:
            raise _unreadable(argument) from error
        if not override.key_or_group:
            raise _unreadable(argument)
        group = override.key_or_group.replace(".", "/")
        chosen = override.value()
        is_group = group in GROUP_NAMES or (folder / group).is_dir()
        if group == "env":  # a key, too
            is_group = (folder / group / f"{chosen}.yaml").is_file()
        if is_group and isinstance(chosen, str):
            choices.append(argument)
        else:
            values.append(override)
    return values, choices


def quoted(value: object) -> str:
    """A text as the value of an argument, whatever its characters."""
    return QuotedString(str(value), Quote.single).with_quotes()


def _unreadable(argument: str) -> ConfigError:
    given = Path(argument)
    if given.suffix in (".yaml", ".yml") or given.is_dir():
        names = f" --config-name {given.stem}" if given.suffix in (".yaml", ".yml") else ""
        folder = given.parent if names else given
        fix = f"name a configuration of yours with --config-path {folder}{names or ' --config-name NAME'}"
        return ConfigError(f"'{argument}' is no key=value argument", fix=fix)
    if argument.startswith("-"):
        yaml = "name your YAML by --config-path FOLDER --config-name NAME" if argument.startswith("--config") else ""
        return ConfigError(f"this command has no option '{argument}'", fix=yaml or "see its --help")
    advice = "write key=value, and quote a value with special characters: \"key='value'\""
    return ConfigError(f"cannot read the argument '{argument}'", fix=advice)


@contextmanager
def _hydra(folder: Path) -> Iterator[None]:
    """Hydra's composition over `folder`; restores any earlier initialisation of Hydra."""
    held = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        with stored(), initialize_config_dir(str(folder), version_base="1.3"):
            yield
    finally:
        restore_gh_from_backup(held)


def _read(name: str, package: str, folder: Path) -> Layer:
    path = next((p for p in (place / f"{name}.yaml" for place in (folder, TREE)) if p.is_file()), None)
    if path is None and name not in GROUPS.values():
        raise ConfigError(f"file not found: {folder / name}.yaml")
    is_package = path is None or TREE in path.parents
    source = f"{name}.yaml" if is_package else str(path)
    content = group_values(name) if path is None else load_file(path)
    values = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    for section in reversed(package.split(".") if package else ()):
        values = {section: values}
    return Layer(source, name, is_package, values)


def to_container(config: DictConfig, *, resolve: bool = True) -> dict[str, Any]:
    """Converts `config` to plain containers; `resolve`: with interpolations resolved."""
    container = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}


def ancestors(key: str) -> list[str]:
    """The sections that contain `key`, outermost first."""
    names = key.split(".")
    return [".".join(names[:depth]) for depth in range(1, len(names))]
