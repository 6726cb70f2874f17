"""The entry points of every kind of run: train, fine-tune, evaluate.

Each takes a sink for the events of the run, such as a display of `etude.viewer`; without one nothing is displayed, and no
report is written.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from etude.errors import ConfigError, EtudeError
from etude.events import EventSink, RunEnded, RunStarted, ignore_event
from etude.inference import check_returns_kept_ids, check_trainable
from etude.jsonl import json_safe, write_json
from etude.options import RewardOptions
from etude.protocol import DataProto
from etude.trainer.metrics import is_success, prompt_mean
from etude.trainer.ppo import PPOTrainer
from etude.trainer.resources import find_shortages
from etude.trainer.restarts import restart_on_loss
from etude.trainer.rollouts import Rollouts, dump, first_cause, rollouts_of, survivors
from etude.trainer.setup import prepare
from etude.trainer.sft import SFTTrainer
from etude.trajectory import Trajectory

logger = logging.getLogger(__name__)

Pair = tuple[str, Trajectory | None]  # (uid of the prompt, value of one sample)


def train(config: DictConfig, emit: EventSink = ignore_event) -> dict[str, float]:
    """A whole reinforcement-learning run; returns the metrics of the last validation.

    Raises:
        ConfigError: before any model is loaded, among others for an engine that can only evaluate.
    """

    def open_trainer(restarts: bool, resume_from: Path | None) -> PPOTrainer:
        setup = prepare(config, restarts=restarts)
        with setup.groups.closed_on_error():
            check_trainable(setup.roles.rollout.name)
            check_returns_kept_ids(setup.roles.rollout)
            trainer = PPOTrainer(setup, resume_from)
            for found in find_shortages(setup):  # a service may yet come up, and an estimate be wrong: none is refused
                logger.warning("%s: %s; %s", found.subject, found.message, found.fix)
            return trainer

    def run(trainer: PPOTrainer) -> dict[str, float]:
        trainer.init_workers()
        return trainer.fit(emit)

    return restart_on_loss(open_trainer, run)


def fine_tune(config: DictConfig, emit: EventSink = ignore_event) -> Path:
    """A whole supervised run; returns the model's folder."""

    def open_trainer(restarts: bool, resume_from: Path | None) -> SFTTrainer:
        return SFTTrainer(config, restarts=restarts, resume_from=resume_from)

    return restart_on_loss(open_trainer, lambda trainer: trainer.fit(emit))


def evaluate(
    config: DictConfig,
    emit: EventSink = ignore_event,
    *,
    output: Path | None = None,
    dump_folder: Path | None = None,
    step: int = 0,
) -> dict[str, Any]:
    """Rolls out `data.val_files` with `rollout.val_kwargs` and scores them.

    Returns:
        The `evaluation_metrics`, and under `metrics` those of a run's validation (`val-core/*`, `val/*`). They are
        written to `output` as JSON if given, the trajectories to `dump_folder`, numbered `step`.

    Raises:
        ConfigError, DataError: one line that names the key, file or row, before any model is loaded.
        TrainingStopped: infrastructure failures dropped more than `trainer.min_valid_fraction` allows.
        EtudeError: no trajectory was left to score.
    """
    setup = prepare(config, trains=False)
    groups = setup.groups
    with closing(groups):
        dataset = setup.validation_set()
        if dataset is None:
            raise ConfigError("data.val_files is empty: give the rows to evaluate on")
        groups.rollout.init_model()
        if groups.reward is not None:
            groups.reward.init_model()
        groups.rollout.update_weights(0)
        emit(RunStarted("evaluating", 0, setup.trainer))
        try:
            with groups.report_progress(emit):
                rolled, metrics = Rollouts(setup, groups.rollout, groups.reward).validate(dataset)
        finally:
            emit(RunEnded())
    batch = rolled.fetch()
    if dump_folder is not None:
        dump(setup.chat, dump_folder, step, batch, setup.roles.reward)
    survivors(batch, setup.trainer.min_valid_fraction)
    result = evaluation_metrics(batch, setup.roles.reward) | {"metrics": metrics}
    if not result["samples"]:
        raise EtudeError(
            f"all {len(batch)} trajectories were dropped; the first cause: {first_cause(rollouts_of(batch))}"
        )
    if output is not None:
        write_json(output, json_safe(result))
    return result


def evaluation_metrics(batch: DataProto, options: RewardOptions) -> dict[str, Any]:
    """`prompts`, `samples`, `dropped`, `success` and `tool_use` with `…_low` and `…_high`, `reward`; and under `sources` the
    same per data source. A source whose samples were all dropped has counts only.

    Samples of a prompt are averaged first, and intervals count prompts; a trajectory dropped for infrastructure counts in
    `dropped` only.
    """
    pairs = [(str(uid), r.trajectory) for uid, r in zip(batch.non_tensor_batch["uid"].tolist(), rollouts_of(batch))]
    sources: dict[str, list[Pair]] = defaultdict(list)
    for source, pair in zip(batch.non_tensor_batch["data_source"].tolist(), pairs):
        sources[str(source)].append(pair)
    each = {source: _summarize(own, options) for source, own in sorted(sources.items())}
    return _summarize(pairs, options) | {"sources": each}


def _summarize(pairs: Sequence[Pair], options: RewardOptions) -> dict[str, Any]:
    weights = (options.tool_reward_weight, options.score_weight)
    prompts: dict[str, list[Trajectory]] = defaultdict(list)
    for uid, trajectory in pairs:
        if trajectory is not None:
            prompts[uid].append(trajectory)
    kept = sum(map(len, prompts.values()))
    metrics: dict[str, Any] = {"prompts": len(prompts), "samples": kept, "dropped": len(pairs) - kept}
    if not prompts:
        return metrics
    values = {
        "success": [[float(is_success(t.rewards, *weights)) for t in own] for own in prompts.values()],
        "tool_use": [
            [float(any(call.error is None for call in t.tool_calls)) for t in own] for own in prompts.values()
        ],
    }
    for name, by_prompt in values.items():
        metrics[name], metrics[f"{name}_low"], metrics[f"{name}_high"] = prompt_mean(by_prompt)
    metrics["reward"] = prompt_mean([[t.rewards.total(*weights) for t in own] for own in prompts.values()])[0]
    return metrics
