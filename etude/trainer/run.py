"""The entry points of every kind of run: train, fine-tune, evaluate.

Each takes a sink for the events of the run, such as a display of `etude.viewer`; without one nothing is displayed, and no
report is written.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from omegaconf import DictConfig

from etude.events import EventSink, ignore_event
from etude.inference import check_returns_kept_ids, check_trainable
from etude.trainer.evaluation import evaluate
from etude.trainer.ppo import PPOTrainer
from etude.trainer.resume import run_lock
from etude.trainer.setup import prepare
from etude.trainer.sft import SFTTrainer

__all__ = ["evaluate", "fine_tune", "train"]


def train(config: DictConfig, emit: EventSink = ignore_event) -> dict[str, float]:
    """A whole reinforcement-learning run; returns the metrics of the last validation.

    Raises:
        ConfigError: before any model is loaded, among others for an engine that can only evaluate.
    """
    setup = prepare(config)
    with closing(setup.groups):
        check_trainable(setup.roles.rollout.name)
        check_returns_kept_ids(setup.roles.rollout)
        trainer = PPOTrainer(setup)
        with run_lock(trainer.run_dir):
            trainer.init_workers()
            return trainer.fit(emit)


def fine_tune(config: DictConfig, emit: EventSink = ignore_event) -> Path:
    """A whole supervised run; returns the model's folder."""
    trainer = SFTTrainer(config)
    with closing(trainer.groups), run_lock(trainer.run_dir):
        return trainer.fit(emit)
