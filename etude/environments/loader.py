"""Opens environments by id: a registered name, or `package:name` of a package that has an adapter here.

Invariant: a wrong id or argument is a `ConfigError` before a model is loaded; it names the key and the closest known name,
or what to install.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from etude.environments.base import ENVIRONMENTS, Environment
from etude.environments.entry import EnvironmentEntry
from etude.environments.text_env import TextEnvironment, is_gym_shaped
from etude.errors import ConfigError, one_line


def registered_entry(name: str, args: Mapping[str, Any], **given: Any) -> EnvironmentEntry:
    """The environment registered as `name`: an `Environment`, or a class with Gymnasium's methods.

    Raises:
        ConfigError: nothing is registered as `name`, it is neither, or it does not take `args`.
    """
    found = ENVIRONMENTS.get(name)
    is_own = isinstance(found, type) and issubclass(found, Environment)
    if not is_own and not is_gym_shaped(found):
        raise ConfigError(f"environment '{name}' is neither an Environment nor a class with the methods reset and step")
    try:
        inspect.signature(found).bind(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment '{name}': args: {one_line(error)}") from error
    make = partial(found, **args)
    return EnvironmentEntry.of(
        name,
        make if is_own else partial(TextEnvironment, make),
        found if is_own else TextEnvironment,
        version=getattr(found, "version", ""),
        **given,
    )
