"""Opens environments by id: a registered name, or `package:name` of a package that has an adapter here.

Invariant: a wrong id or argument is a `ConfigError` before a model is loaded; it names the key and the closest known name,
or what to install.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from etude.environments.arguments import check_arguments
from etude.environments.base import ENVIRONMENTS, Environment, tool_methods
from etude.environments.entry import EnvironmentEntry, Environments
from etude.environments.text_env import TextEnvironment, is_gym_shaped
from etude.errors import ConfigError, MissingExtraError, one_line
from etude.options import EnvironmentOptions
from etude.registry import unknown_name


@dataclass(frozen=True)
class Adapter:
    """Environments of another package: `module` here opens them, `distribution` is what pip installs, `package` what Python
    imports; empty where nothing is needed. `name` is what stands after the colon of an id."""

    module: str
    package: str
    distribution: str
    what: str
    name: str = "NAME"
    extra: str = "environments"

    @property
    def is_installed(self) -> bool:
        """Whether the package can be imported."""
        return not self.package or importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str:
        """The installed version; empty where nothing is needed."""
        return importlib.metadata.version(self.distribution) if self.distribution else ""


_HERE = "etude.environments.adapters"
ADAPTERS = {
    "reasoning_gym": Adapter(f"{_HERE}.reasoning_gym", "reasoning_gym", "reasoning-gym", "generated questions"),
    "gym": Adapter(f"{_HERE}.gym", "gymnasium", "gymnasium", "environments whose spaces can be said in words"),
    "textarena": Adapter(f"{_HERE}.textarena", "textarena", "textarena", "text games"),
    "inspect": Adapter(
        f"{_HERE}.inspect", "inspect_ai", "inspect-ai", "tasks of Inspect", "FILE.py:FUNCTION", "inspect"
    ),
    "openenv": Adapter(f"{_HERE}.openenv", "", "", "sessions of a server of OpenEnv", "URL"),
    "harbor": Adapter(f"{_HERE}.harbor", "", "", "tasks in Harbor's format, in the sandbox", "FOLDER"),
    "verifiers": Adapter(f"{_HERE}.verifiers", "", "", "tasksets of verifiers, in the interpreter that `python` names"),
    "nemo_gym": Adapter(f"{_HERE}.nemo_gym", "", "", "tasks of a resources server of NeMo Gym", "URL"),
}


def load_environments(options: Sequence[EnvironmentOptions]) -> Environments | None:
    """Opens the entries of `env`; None if there are none.

    Raises:
        ConfigError: an id or an argument is wrong, or two entries have one name; names the entry.
        MissingExtraError: an entry's package is not installed.
    """
    return Environments.of(_entry(each, f"env[{n}]") for n, each in enumerate(options)) if options else None


def _entry(options: EnvironmentOptions, key: str) -> EnvironmentEntry:
    prefix, colon, name = options.id.partition(":")
    given: dict[str, Any] = {"timeout": options.timeout, "limit": options.limit, "key": key}
    try:
        if not colon:
            return registered_entry(options.id, options.args, name=options.label, **given)
        own = {} if options.python is None else {"python": options.python}
        adapter, args = adapter_of(prefix), {**options.args, **own}
        opened = importlib.import_module(adapter.module).open_environment
        check_arguments(opened, args, options.id)
        made = opened(name, **args)
        make, version = made if isinstance(made, tuple) else (made, adapter.version)
        named = {"id": options.id, "args": options.args, "version": version}
        return EnvironmentEntry(options.label, make, make.func, **named, **given)
    except ConfigError as error:
        raise error.at(key) from error


def adapter_of(prefix: str) -> Adapter:
    """The adapter of a package that can be used.

    Raises:
        ConfigError: there is no such adapter.
        MissingExtraError: the package is not installed.
    """
    if prefix.endswith(".py"):
        raise ConfigError(
            f"'{prefix}' is no package of environments",
            fix=f"write @environment(NAME) before the class, env=NAME and plugins=[{prefix}] (--plugins {prefix})",
        )
    if prefix not in ADAPTERS:
        known = [f"{each}:" for each in ADAPTERS]
        raise unknown_name(
            ConfigError, f"no package is called '{prefix}:'", f"{prefix}:", known, f"({', '.join(known)})"
        )
    adapter = ADAPTERS[prefix]
    if not adapter.is_installed:
        raise MissingExtraError(f"environment '{prefix}:' ({adapter.distribution})", adapter.extra)
    return adapter


def registered_entry(id: str, args: Mapping[str, Any], *, name: str = "", **given: Any) -> EnvironmentEntry:
    """The environment registered as `id`: an `Environment`, or a class with Gymnasium's methods.

    Raises:
        ConfigError: nothing is registered as `id`, it is neither, or it does not take `args`.
    """
    try:
        found = ENVIRONMENTS.get(id)
    except ConfigError as error:
        register = f"write @environment('{id}') before its class, and name the file in plugins (--plugins)"
        more = f"{register}; of a class of TRL's, docs/from-trl.md says what to change"
        raise ConfigError(error.message, fix=error.fix or more) from error
    is_own = isinstance(found, type) and issubclass(found, Environment)
    if not is_own and not is_gym_shaped(found):
        fix = "RL-Factory's Env is chosen by actor_rollout_ref.env.name" if hasattr(found, "tool_manager") else ""
        if hasattr(found, "reset"):
            fix = f"write {_as_environment(found)} (docs/from-trl.md)"
        raise ConfigError(
            f"environment '{id}' is neither an Environment nor a class with the methods reset and step", fix=fix
        )
    if is_own and not _takes_task_and_seed(found.reset):
        raise ConfigError(f"environment '{id}': reset takes other arguments", fix=f"write {_as_environment(found)}")
    try:
        inspect.signature(found).bind(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment '{id}': args: {one_line(error)}") from error
    check_arguments(found, args, f"environment '{id}'")
    make = partial(found, **args)
    return EnvironmentEntry(
        name or id,
        make if is_own else partial(TextEnvironment, make),
        found if is_own else TextEnvironment,
        id=id,
        args=args,
        version=str(getattr(found, "version", "")),
        **given,
    )


def _as_environment(other: Any) -> str:
    """What all is left to change in another framework's class for it to be an `Environment`."""
    cls = other if isinstance(other, type) else type(other)
    public = [each for each in dir(cls) if callable(getattr(cls, each)) and each[0] != "_"]
    rewards = [each for each in public if "reward" in each]
    parts = [] if issubclass(cls, Environment) else [f"class {cls.__name__}(Environment)"]
    parts.append("reset(self, task, seed)")
    if tools := [each for each in public if each not in {*rewards, *tool_methods(cls), *dir(Environment)}]:
        parts.append(f"@tool before {', '.join(tools)}")
    if getattr(cls, "score", None) in (None, Environment.score):
        parts.append(f"score(self) in place of {rewards[0]}" if rewards else "score(self), which returns the reward")
    return ", and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _takes_task_and_seed(reset: Callable[..., Any]) -> bool:
    """Whether it takes those, and not the columns of a row by name, as TRL's does: `reset(self, goal=None, **row)`."""
    signature = inspect.signature(reset)
    try:
        signature.bind(None, {}, 0)
    except TypeError:
        return False
    _, *parameters = signature.parameters.values()
    return parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD or parameters[0].default is inspect.Parameter.empty
