"""`load_environment`: the section `actor_rollout_ref.env` as the environment of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from etude.agents.environments.env import ENVIRONMENTS, Env
from etude.agents.environments.gym import is_gym_shaped
from etude.agents.environments.lockstep import LockStep
from etude.agents.environments.loop import Environment
from etude.errors import ConfigError, one_line
from etude.options import EnvOptions
from etude.tools import BaseTool


def load_environment(options: EnvOptions, tools: Mapping[str, BaseTool], *, lockstep: bool) -> Environment | None:
    """The environment that `options` name, with the run's configured `tools`; None without a name.

    Raises:
        ConfigError: there is none with that name, or it cannot be created.
    """
    if not options.chosen:
        return None
    name = options.name or "base"
    found = ENVIRONMENTS.get(name)
    if isinstance(found, type) and issubclass(found, Env):
        try:
            env = found({**asdict(options), "_tools": tools})
        except ConfigError:
            raise
        except Exception as error:  # a user's constructor may raise anything
            raise ConfigError(f"environment '{name}': {type(error).__name__}: {one_line(error)}") from error
        return Environment(name, env, options.timeout, LockStep() if lockstep else None)
    if not is_gym_shaped(found):
        raise ConfigError(f"environment '{name}' is neither an Env nor a class with the methods reset and step")
    return Environment(name, found, options.timeout)
