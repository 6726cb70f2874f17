"""`load_environment`: the section `actor_rollout_ref.env` as the environment of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from etude.agents.environments.env import ENVIRONMENTS, Env
from etude.agents.environments.gym import is_gym_shaped
from etude.agents.environments.lockstep import LockStep
from etude.agents.environments.loop import Environment
from etude.errors import ConfigError, one_line
from etude.tools import BaseTool


@dataclass(frozen=True)
class EnvOptions:
    """`actor_rollout_ref.env`; with neither `name` nor `tool_manager` there is no environment."""

    name: str | None = None
    config_path: str | list[str] | None = None
    tool_manager: str | None = None
    use_process_reward: bool = False
    timeout: float = 60.0

    @property
    def chosen(self) -> bool:
        """Whether there is an environment."""
        return self.name is not None or self.tool_manager is not None

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ConfigError(f"actor_rollout_ref.env.timeout must be a positive number, not {self.timeout}")


def load_environment(options: EnvOptions, tools: Mapping[str, BaseTool], *, lockstep: bool) -> Environment | None:
    """The environment that `options` name, with the run's configured `tools`; None without a name.

    Raises:
        ConfigError: there is none of that name, or it cannot be made.
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
        except Exception as error:  # whatever a user's constructor raises is theirs to read
            raise ConfigError(f"environment '{name}': {type(error).__name__}: {one_line(error)}") from error
        return Environment(name, env, options.timeout, LockStep() if lockstep else None)
    if not is_gym_shaped(found):
        raise ConfigError(f"environment '{name}' is neither an Env nor has it the methods reset and step")
    return Environment(name, found, options.timeout)
