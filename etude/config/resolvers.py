"""The `${etude.…}` interpolations of our YAML.

`${etude.builtin_tools:calculator}` is the path of a built-in tool file; with several names it is the list of their paths,
which `tool_config_path` accepts. `${etude.experiment:name}` is `name-` and an eight-digit hash of what the run trains on
(model, data, tools, reward, estimator, seed): each experiment has its own folder.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from omegaconf import DictConfig, OmegaConf

_MULTI_TURN = ("tool_config_path", "function_tool_path", "interaction_config_path")
_IDENTITY = (
    *("actor_rollout_ref.model.path", "model.path", "trainer.seed", "custom_reward_function", "reward_model"),
    *(f"actor_rollout_ref.rollout.multi_turn.{name}" for name in _MULTI_TURN),
    *(f"multi_turn.{name}" for name in _MULTI_TURN),
    *(f"data.{name}" for name in ("train_files", "train_batch_size", "shuffle", "seed")),
    *("actor_rollout_ref.env", "algorithm.adv_estimator", "actor_rollout_ref.actor.optim.name", "optim.name"),
)
"""Keys that identify an experiment, for `etude train` and `etude sft`: they include all that a resumed run may not
change."""


def builtin_tools(*names: str) -> str | list[str]:
    """Path of the built-in tool file `names[0]`, or the list of paths where there are several names."""
    from etude.tools.builtin import builtin_config

    paths = [str(builtin_config(name)) for name in names]
    return paths[0] if len(paths) == 1 else paths


def experiment(name: str, *, _root_: DictConfig) -> str:
    """`name` with a digest of the experiment's identity, from values as they were written (interpolations unfilled)."""
    whole: Any = OmegaConf.to_container(_root_, resolve=False)
    chosen: list[Any] = []
    for key in _IDENTITY:
        value = whole
        for part in key.split("."):
            value = (value or {}).get(part)
        chosen.append(value)
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True, default=str).encode()).hexdigest()
    return f"{name}-{digest[:8]}"


def register_resolvers() -> None:
    """Registers `${etude.…}` with OmegaConf; idempotent."""
    OmegaConf.register_new_resolver("etude.builtin_tools", builtin_tools, replace=True)
    OmegaConf.register_new_resolver("etude.experiment", experiment, replace=True)
