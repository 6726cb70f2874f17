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
from etude.trainer.dumps import json_safe, written_atomically
from etude.trainer.evaluation import evaluation_figures
from etude.trainer.ppo import PPOTrainer
from etude.trainer.progress import RolloutProgress
from etude.trainer.resume import run_lock
from etude.trainer.rollouts import Rollouts, dump, first_cause, rollouts_of, survivors
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
    with run_lock(trainer.run_dir):
        trainer.init_workers()
        return trainer.fit()


def fine_tune(config: DictConfig) -> Path:
    """A whole supervised run; returns the model's folder."""
    trainer = SFTTrainer(config)
    with run_lock(trainer.run_dir):
        return trainer.fit()


def evaluate(
    config: DictConfig, *, output: Path | None = None, dump_folder: Path | None = None, step: int = 0
) -> dict[str, Any]:
    """Rolls out `data.val_files` with `rollout.val_kwargs` and scores them.

    Returns:
        The figures of `evaluation_figures`, and under `metrics` those of a run's validation (`val-core/*`, `val/*`). They
        are written to `output` as JSON if given, the trajectories to `dump_folder`, numbered `step`.

    Raises:
        ConfigError, DataError: one line that names the key, file or row, before any model is loaded.
        TrainingStopped: infrastructure broke more than `trainer.min_valid_fraction` allows.
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
    with RolloutProgress("evaluating", enabled="console" in setup.trainer.logger) as progress:
        policy.set_progress(progress)
        batch, metrics = Rollouts(setup, policy, reward_group).validate(dataset)
    if dump_folder is not None:
        dump(dump_folder, step, batch, setup.chat, setup.roles.reward)
    survivors(batch, setup.trainer.min_valid_fraction)
    result = evaluation_figures(batch, setup.roles.reward) | {"metrics": metrics}
    if not result["samples"]:
        raise EtudeError(
            f"all {len(batch)} trajectories were dropped; the first cause: {first_cause(rollouts_of(batch))}"
        )
    if output is not None:
        with written_atomically(output) as file:
            file.write(json.dumps(json_safe(result), indent=1).encode())
    return result
