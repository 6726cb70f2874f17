"""The entry points of each kind of run: train, fine-tune, evaluate.

Each takes a sink for the run's events, such as a display of `etude.viewer`; without one, nothing is displayed and no report
is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from etude.checks.findings import Finding, Findings, Level
from etude.checks.resources import slow_dtypes
from etude.errors import WARNING
from etude.inference import check_returns_kept_ids, check_trainable
from etude.options import Options
from etude.trainer.evaluation import evaluate
from etude.trainer.events import EventSink, ignore_event
from etude.trainer.ppo import PPOTrainer
from etude.trainer.restarts import restart_on_loss
from etude.trainer.setup import prepare
from etude.trainer.sft import SFTTrainer

__all__ = ["evaluate", "fine_tune", "train"]

logger = logging.getLogger(__name__)


def train(options: Options, emit: EventSink = ignore_event) -> dict[str, float]:
    """Runs reinforcement learning; returns the metrics of the last validation.

    Raises:
        ConfigError: the configuration is invalid, for instance an engine that can only evaluate; raised before any model is
            loaded.
    """

    def open_trainer(restarts: bool, resume_from: Path | None) -> PPOTrainer:
        setup, groups = prepare(options, restarts=restarts)
        with groups.closed_on_error():
            check_trainable(setup.options.rollout.name)
            correction = setup.options.algorithm.rollout_correction
            check_returns_kept_ids(setup.options.rollout, correction.score_centering_topk)
            trainer = PPOTrainer(setup, groups, resume_from)
            # Only warnings: a service may still start, an estimate be wrong.
            _warn(Findings().run_stage("loaded", setup, fix="`etude check` says more").all)
            return trainer

    def run(trainer: PPOTrainer) -> dict[str, float]:
        trainer.announce(emit)
        trainer.init_workers()
        return trainer.fit(emit)

    return restart_on_loss(open_trainer, run)


def fine_tune(options: Options, emit: EventSink = ignore_event) -> Path:
    """Runs supervised fine-tuning; returns the folder of the model."""

    def open_trainer(restarts: bool, resume_from: Path | None) -> SFTTrainer:
        trainer = SFTTrainer(options, restarts=restarts, resume_from=resume_from)
        _warn(slow_dtypes(trainer.device, trainer.options.model.dtype_on(trainer.device), "model.dtype"))
        return trainer

    return restart_on_loss(open_trainer, lambda trainer: trainer.fit(emit))


def _warn(findings: Iterable[Finding]) -> None:
    for found in findings:
        if found.level in (Level.WARNING, Level.ERROR):
            logger.warning(WARNING, f"{found.subject}: {found.message}", found.fix)
