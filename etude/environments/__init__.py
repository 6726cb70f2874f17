"""Environments: what a model acts in. `Environment` is the one interface; Gymnasium's `TextEnv`, users of the model and
RL-Factory's `Env` are adapted to it, and so are environments of other packages."""

from etude.environments.base import (
    ENVIRONMENTS,
    Environment,
    EnvironmentFull,
    InvalidAction,
    Step,
    environment,
    tool,
)
from etude.environments.entry import EnvironmentEntry, Environments
from etude.environments.session import EnvironmentSession
from etude.environments.text_env import TextEnv

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentEntry",
    "EnvironmentFull",
    "EnvironmentSession",
    "Environments",
    "InvalidAction",
    "Step",
    "TextEnv",
    "environment",
    "tool",
]
