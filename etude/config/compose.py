"""Composes a configuration from its four layers: group defaults < a package root < the user's YAML < the command line.

Invariant: the result has exactly the keys of the package's tree (except in free-form sections), each with a value of its
type, interpolations resolved; anything else raises a `ConfigError` that names the key, where it was set and the closest
known key. Hydra leaves no output folder, logging setup or global state behind.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from etude.checks.settings import COMMAND_LINE, problems_with, remarks
from etude.checks.start import Command, start_problems, start_remarks
from etude.config.layers import (
    TREE,
    Layer,
    ancestors,
    command_line_layer,
    file_layers,
    load_file,
    package_roots,
    parse_arguments,
    root_layers,
    to_container,
)
from etude.config.translation import set_key, translate
from etude.errors import ConfigError, raise_faults
from etude.options import Options, SFTOptions, TrainOptions, declarations
from etude.options.validate import flatten, plain
from etude.registry import suggestion

logger = logging.getLogger(__name__)

DEFAULT_ROOT = "ppo_trainer"
_MULTI_TURN = ("tool_config_path", "function_tool_path", "interaction_config_path")
_IDENTITY = (
    *("actor_rollout_ref.model.path", "model.path", "trainer.seed", "custom_reward_function", "reward_model"),
    *(f"actor_rollout_ref.rollout.multi_turn.{name}" for name in _MULTI_TURN),
    *(f"multi_turn.{name}" for name in _MULTI_TURN),
    *(f"data.{name}" for name in ("train_files", "train_batch_size", "shuffle", "seed")),
    *("env", "actor_rollout_ref.env", "algorithm.adv_estimator", "actor_rollout_ref.actor.optim.name", "optim.name"),
)
"""Keys that identify an experiment, for `etude train` and `etude sft`; they include all that must not change when a run is
resumed."""


@dataclass(frozen=True)
class Composition:
    """A composed configuration: `config` as a tree of keys, `options` validated, `sources` the origin of each dotted key.
    `remarks` are one line each; values of the wrong type are replaced by their defaults in `options`."""

    config: DictConfig
    sources: dict[str, str]
    options: Options
    faults: tuple[ConfigError, ...] = ()
    remarks: tuple[str, ...] = ()


def compose(
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    config_path: str | Path | None = None,
    *,
    root: str = DEFAULT_ROOT,
    command: Command | None = None,
) -> Options:
    """Composes the configuration `config_name` with the key=value arguments `overrides`, as the frozen options that every
    process of a run reads; see `compose_with_sources`. With `command`, for a run that is about to start, it checks that this
    machine has what it needs, before torch is imported."""
    return compose_with_sources(config_name, overrides, config_path, root=root, command=command).options


def compose_with_sources(
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    config_path: str | Path | None = None,
    *,
    root: str = DEFAULT_ROOT,
    resolve: bool = True,
    command: Command | Literal["check"] | None = None,
    collect: bool = False,
) -> Composition:
    """Composes a configuration and remembers where its values came from.

    Args:
        config_name: a root of the package, or the user's YAML (with or without ".yaml"). None: `root` itself.
        overrides: command-line arguments, `key=value` or `group=option`.
        config_path: folder of the user's YAML. None: a root of the package, else `config/` and the current folder.
        root: the package root below the user's YAML, unless its defaults list names another.
        resolve: resolve interpolations in `config` (types are always checked with interpolations resolved).
        command: the command about to start; this machine must have what the configuration names. "check": the command that
            the configuration is for. None: no such check.
        collect: return faults of keys and values, and remarks, instead of raising and logging them.

    Raises:
        ConfigError: something is missing, unknown, contradictory or of the wrong type; names key and file.
    """
    for name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    if config_path is None and config_name in package_roots():
        _tell_namesakes(config_name)
    package, user = _layers(config_name or root, overrides, config_path, root)
    base = root_layers(*package)
    tree = TrainOptions if any("actor_rollout_ref" in layer.values for layer in base) else SFTOptions
    starting = _command_for(tree, command, config_name or root) if command else None
    translation = translate(user, tree, base)
    own = [layer for layer in user if not layer.is_package]
    for layer in own:
        if layer.source != COMMAND_LINE:
            _anchor_paths(layer, tree)
    config, sources = _merge(user, onto=_package_defaults(*package)), _sources([*base, *user])
    faults = translation.faults + _unify_aliases(config, sources, own)
    raw, defaults = _leaves(config), _leaves(_package_defaults(*package))

    def more(options: Options) -> Iterable[ConfigError]:
        return start_problems(options, starting) if starting else ()

    options, wrong = problems_with(tree, _resolve(config, sources), raw, sources, more)
    if not collect:
        raise_faults([*faults, *wrong.values()])
    set_by_user = {key for layer in own for key, _ in flatten(layer.values)} - wrong.keys()
    implied = _implied(config, {key: defaults[key] for key in set_by_user if "${" in str(defaults.get(key))}, sources)
    changed = [key for key in raw if key in set_by_user and raw[key] not in (defaults.get(key), implied.get(key))]
    noted = (translation.inert_line(),) if translation.inert else ()
    noted += (*remarks(options, changed, sources), *(start_remarks(options) if starting else ()))
    for line in () if collect else noted:
        logger.warning("%s", line)
    result = _as_config(options, {} if resolve else raw)
    # A free-form section with a wrong entry was replaced by its default, and has the source of its last entry.
    known = {
        key: sources.get(key)
        or next(source for name, source in reversed(sources.items()) if name.startswith(f"{key}."))
        for key in _leaves(result)
    }
    return Composition(result, known, options, (*faults, *wrong.values()), noted)


def _command_for(tree: type[Options], command: Command | Literal["check"], config_name: str) -> Command:
    """Resolves "check" to the command that the configuration is for; rejects a command that takes the other kind."""
    fitting: tuple[Command, ...] = ("train", "eval") if tree is TrainOptions else ("sft",)
    if command == "check":
        return fitting[0]
    if command not in fitting:
        raise ConfigError(f"{config_name} is a configuration of `etude {fitting[0]}`", fix="give it to that command")
    return command


def _layers(
    config_name: str, overrides: Sequence[str], config_path: str | Path | None, root: str
) -> tuple[tuple[str, tuple[str, ...]], list[Layer]]:
    """Returns ((package root, its group choices), the user's own layers, lowest precedence first)."""
    name, folder = _locate(config_name, config_path)
    values, choices = parse_arguments(overrides, folder)
    if folder == TREE:
        package, user = (name, tuple(choices)), list[Layer]()
    else:
        lists_defaults = "defaults" in load_file(folder / f"{name}.yaml")
        user = file_layers(name, folder, choices if lists_defaults else ())
        listed = [layer.name for layer in user if layer.is_package and layer.name in package_roots()]
        # A root in the YAML's defaults list wins.
        package = listed[-1] if listed else root, () if lists_defaults else tuple(choices)
    return package, [*user, command_line_layer(values)] if values else user


def _locate(config_name: str, config_path: str | Path | None) -> tuple[str, Path]:
    """Returns (name without suffix, folder) of a configuration file."""
    given = Path(config_name)
    name = given.name.removesuffix(".yaml").removesuffix(".yml")
    if config_path is None and given.parent == Path() and name == config_name and name in package_roots():
        return name, TREE
    if config_path is not None and Path(config_path).is_file():
        place = Path(config_path)
        fix = f"name its folder, --config-path {place.parent} --config-name {place.stem}"
        raise ConfigError(f"--config-path {place} is a file", fix=fix)
    places = [Path(config_path)] if config_path is not None else [Path("config"), Path()]
    folders = [(place.expanduser() / given.parent).resolve() for place in places]
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return name, folder
    if config_path is not None and not folders[0].is_dir():
        parent = folders[0].parent
        near = suggestion(folders[0].name, (each.name for each in parent.iterdir())) if parent.is_dir() else ""
        if folders[0].name == Path.cwd().name:
            near = "this is that folder: write --config-path ."
        raise ConfigError(f"--config-path {config_path}: there is no such folder", fix=near)
    where = " or ".join(str(folder) for folder in folders)
    present = [path.stem for folder in folders for path in folder.glob("*.yaml")]
    fix = suggestion(name, [*present, *package_roots()]) or "give its folder with --config-path"
    raise ConfigError(f"no {name}.yaml in {where} (Étude's own: {', '.join(package_roots())})", fix=fix)


def _tell_namesakes(root: str) -> None:
    """Warns of a YAML of the user's that is not read, because a root of the package has its name."""
    for file in (Path("config", f"{root}.yaml"), Path(f"{root}.yaml")):
        if file.is_file():
            yours = f"for yours add --config-path {file.parent}"
            logger.warning("--config-name %s is Étude's own configuration, not %s: %s", root, file, yours)


@cache
def _package_defaults(root: str, choices: tuple[str, ...]) -> DictConfig:
    """The merged layers of a package root; read-only."""
    return _merge(root_layers(root, choices), onto=OmegaConf.create())


def _merge(layers: Sequence[Layer], onto: DictConfig) -> DictConfig:
    """Returns a copy of `onto` with the layers merged into it in order; lists are replaced, free-form sections merged by
    key."""
    config = copy.deepcopy(onto)
    for layer in layers:
        try:
            config.merge_with(layer.values)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{layer.source}: {_reason(error)}") from error
    return config


def _anchor_paths(layer: Layer, tree: type[Options]) -> None:
    """Makes relative paths in a user's YAML absolute, in place, if they name (or nearly name) something next to that file;
    other paths stay relative to the working directory. Output paths are never changed."""
    folder, declared = Path(layer.source).parent, declarations(tree)
    for key, value in list(flatten(layer.values)):  # one with dots of its own gets a section beside it
        about = declared[key].about if key in declared else None
        kind = declared[about.alias_of].about.path if about and about.alias_of else about.path if about else ""
        if kind in ("file", "code", "model", "checkpoint"):
            anchored = _anchor(value, folder, or_folder=kind in ("model", "checkpoint"))
            if anchored != value:
                set_key(layer.values, key, anchored)
        elif key == "env" and isinstance(value, list):
            set_key(layer.values, key, [_anchor_environment(each, folder) for each in value])


def _anchor_environment(entry: Any, folder: Path) -> Any:
    """Anchors the folder or file of an entry's id, its interpreter, and the files among its arguments."""
    if isinstance(entry, str):
        prefix, colon, place = entry.partition(":")
        return f"{prefix}{colon}{_anchor(place, folder, or_folder=True)}"
    if not isinstance(entry, dict) or not isinstance(args := entry.get("args", {}), dict):
        return entry  # the error comes later
    made = {key: _anchor_environment(entry[key], folder) for key in ("id",) if key in entry}
    if "python" in entry:
        made["python"] = _anchor(entry["python"], folder, or_folder=False)
    if args:
        made["args"] = {key: _anchor(value, folder, or_folder=key == "val") for key, value in args.items()}
    return {**entry, **made}


_SUFFIXES = (".py", ".yaml", ".yml", ".json", ".jsonl", ".parquet")
"""Suffixes of files; other names may be modules or models on a hub."""


def _anchor(value: Any, folder: Path, or_folder: bool) -> Any:
    if isinstance(value, list):
        return [_anchor(each, folder, or_folder) for each in value]
    if isinstance(value, dict):  # an entry of custom_reward_function.rewards
        return {name: _anchor(each, folder, or_folder) if name == "path" else each for name, each in value.items()}
    if not isinstance(value, str) or not value or "${" in value:
        return value
    name, colon, attribute = value.rpartition(":") if ".py:" in value else (value, "", "")
    near = folder / name
    exists = near.is_file() or (or_folder and near.is_dir())
    missing = near.suffix in _SUFFIXES and not or_folder and near.parent.is_dir() and not Path(name).exists()
    return f"{near}{colon}{attribute}" if exists or missing else value  # the error names this place


def _sources(layers: Sequence[Layer]) -> dict[str, str]:
    """Maps each dotted key to its source, a file or "command line": the last layer that sets it."""
    sources: dict[str, str] = {}
    for layer in layers:
        for key, _ in flatten(layer.values):
            for section in ancestors(key):  # a free-form section that was empty
                sources.pop(section, None)
            sources[key] = layer.source
    return sources


def _unify_aliases(config: DictConfig, sources: dict[str, str], user: Sequence[Layer]) -> list[ConfigError]:
    """Gives a key and its aliases the same value: what the user set for one of them, else the key's default.

    Returns an error for each key that was set to different values, naming both sources.
    """
    merged, faults = _leaves(config), list[ConfigError]()
    for key, aliases in _aliases().items():
        names = [name for name in (key, *aliases) if name in merged]
        if len(names) < 2:
            continue
        setting, fault = _last_setting(names, user)
        faults += [fault] if fault else []
        value, source = setting or (merged[key], sources[key])
        for name in names:
            OmegaConf.update(config, name, value)
            sources[name] = source
    return faults


@cache
def _aliases() -> dict[str, list[str]]:
    """Maps each key to its aliases."""
    aliases: dict[str, list[str]] = {}
    for key, declaration in declarations(TrainOptions).items():
        if declaration.about.alias_of:
            aliases.setdefault(declaration.about.alias_of, []).append(key)
    return aliases


def _last_setting(names: Sequence[str], user: Sequence[Layer]) -> tuple[tuple[Any, str] | None, ConfigError | None]:
    """Returns ((value, source) of the user's last setting for one of `names`, or None; the conflict, or None). A layer that
    only sets null clears all of them; an interpolation from one to another does not count."""
    held: tuple[str, Any, str] | None = None
    links = [f"${{{name}}}" for name in names]
    for layer in user:
        here = [(name, value) for name, value in flatten(layer.values) if name in names and value not in links]
        given = [(name, value, layer.source) for name, value in here if value is not None]
        if here and not given:
            held = (names[0], None, layer.source)
        for setting in given:
            if held and held[1] is not None and held[0] != setting[0] and _as_list(held[1]) != _as_list(setting[1]):
                both = f"{held[0]} ({held[2]}) and {setting[0]} ({setting[2]})"
                return held[1:], ConfigError(
                    f"{both} mean the same but are set to different values",
                    fix=f"set one of {held[0]} and {setting[0]}",
                )
            held = setting
    return held[1:] if held else None, None


def _resolve(config: DictConfig, sources: dict[str, str]) -> dict[str, Any]:
    """Converts `config` to plain containers with interpolations resolved."""
    try:
        return to_container(config)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        raise ConfigError(f"{key} ({sources.get(key, 'unknown place')}): {_reason(error)}") from error


def _implied(config: DictConfig, links: Mapping[str, Any], sources: dict[str, str]) -> dict[str, Any]:
    """What keys whose defaults are interpolations would have here: a run's own config.yaml has these values in full."""
    if not links:
        return {}
    linked = copy.deepcopy(config)
    for key, link in links.items():
        OmegaConf.update(linked, key, link, merge=False)
    return {key: value for key, value in flatten(_resolve(linked, sources)) if key in links}


def _as_config(options: Options, raw: dict[str, Any]) -> DictConfig:
    """The options as a tree in struct mode; of the leaves `raw`, interpolations are kept."""
    result = OmegaConf.create(plain(options))
    for key, value in raw.items():
        if isinstance(value, str) and "${" in value:
            OmegaConf.update(result, key, value, merge=False)
    OmegaConf.set_struct(result, True)
    return result


def _leaves(config: DictConfig) -> dict[str, Any]:
    """Maps dotted keys to values, interpolations unresolved."""
    return dict(flatten(to_container(config, resolve=False)))


def _reason(error: OmegaConfBaseException) -> str:
    return str(error).splitlines()[0]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _builtin_tools(*names: str) -> str | list[str]:
    """`${etude.builtin_tools:calculator}`: the path of a built-in tool file; for several names a list of paths, which
    `tool_config_path` accepts."""
    from etude.tools.builtin import builtin_config

    paths = [str(builtin_config(name)) for name in names]
    return paths[0] if len(paths) == 1 else paths


def _experiment(name: str, *, _root_: DictConfig) -> str:
    """`${etude.experiment:name}`: `name-` plus an eight-digit hash of the `_IDENTITY` keys, so that each experiment has its
    own folder; hashes the values as written (interpolations unresolved)."""
    whole: Any = OmegaConf.to_container(_root_, resolve=False)
    chosen: list[Any] = []
    for key in _IDENTITY:
        value = whole
        for part in key.split("."):
            value = (value or {}).get(part)
        chosen.append(value)
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True, default=str).encode()).hexdigest()
    return f"{name}-{digest[:8]}"


def _correction(max_staleness: int, bypass_mode: bool) -> str | None:
    """`${etude.correction:max_staleness,bypass_mode}`: the level of the importance weights that stale rollouts need, unless
    the loss's own ratio corrects them."""
    return "token" if max_staleness and not bypass_mode else None


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "etude.builtin_tools": _builtin_tools,
    "etude.experiment": _experiment,
    "etude.correction": _correction,
}
