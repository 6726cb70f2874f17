"""The entry points that every way of starting a run shares: train, fine-tune, evaluate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from etude.distributed import InProcessWorkerGroup
from etude.errors import ConfigError, EtudeError
from etude.inference import check_trainable
from etude.trainer.dumps import written_atomically
from etude.trainer.metrics import is_success, wilson_interval
from etude.trainer.ppo import PPOTrainer
from etude.trainer.rollouts import Rollouts, dump, first_cause, results_of, trajectories_of
from etude.trainer.setup import prepare
from etude.trainer.sft import SFTTrainer
from etude.workers import ActorRolloutRefWorker, RewardWorker


def train(config: DictConfig) -> dict[str, float]:
    """A whole reinforcement-learning run; returns the figures of the last validation.

    Raises:
        ConfigError: before any model is loaded, among others for an engine that can only evaluate.
    """
    setup = prepare(config)
    check_trainable(setup.roles.rollout.name)
    trainer = PPOTrainer(setup)
    trainer.init_workers()
    return trainer.fit()


def fine_tune(config: DictConfig) -> Path:
    """A whole supervised run; returns the model's folder."""
    return SFTTrainer(config).fit()


def evaluate(
    config: DictConfig, *, output: Path | None = None, dump_folder: Path | None = None, step: int = 0
) -> dict[str, Any]:
    """Rolls out `data.val_files` with `rollout.val_kwargs` and scores them.

    Returns:
        `samples`, `dropped`, `success` and `tool_use` (share of trajectories with a successful call), each with its 95 %
        Wilson interval `…_low`, `…_high`, and `reward`. They are written to `output` as JSON if given, the trajectories
        to `dump_folder`, numbered `step`.

    Raises:
        ConfigError, DataError: one line that names the key, file or row, before any model is loaded.
        EtudeError: no trajectory was left to judge by.
    """
    setup = prepare(config)
    dataset = setup.validation_set()
    if dataset is None:
        raise ConfigError("data.val_files is empty: give the rows to evaluate on")
    reward_group = InProcessWorkerGroup(RewardWorker, 1, setup.roles, setup.tokenizer)
    roles = replace(setup.roles, needs_ref=False, trains=False)
    policy = InProcessWorkerGroup(ActorRolloutRefWorker, 1, roles, setup.parts)
    policy.init_model()
    batch = Rollouts(setup, policy, reward_group).validation(dataset)
    trajectories = trajectories_of(batch)
    if not trajectories:
        raise EtudeError(
            f"all {len(batch)} trajectories were lost; the first failure: {first_cause(results_of(batch))}"
        )
    reward = setup.roles.reward
    weights = (reward.tool_reward_weight, reward.score_weight)
    successes = sum(is_success(t.rewards, *weights) for t in trajectories)
    used_tool = sum(any(call.error is None for call in t.tool_calls) for t in trajectories)
    result = {
        "samples": len(trajectories),
        "dropped": len(batch) - len(trajectories),
        **_share("success", successes, len(trajectories)),
        **_share("tool_use", used_tool, len(trajectories)),
        "reward": sum(t.rewards.total(*weights) for t in trajectories) / len(trajectories),
    }
    if output is not None:
        with written_atomically(output) as file:
            file.write(json.dumps(result, indent=1).encode())
    if dump_folder is not None:
        dump(dump_folder, step, batch, setup.chat, reward)
    return result


def _share(name: str, count: int, total: int) -> dict[str, float]:
    low, high = wilson_interval(count, total)
    return {name: count / max(total, 1), f"{name}_low": low, f"{name}_high": high}
