"""`PPOTrainer`: the synchronous training loop, PPO and GRPO alike.

One step, as `training_step` reads: take a batch, repeat each prompt `rollout.n` times, roll out (each trajectory is
scored the moment it ends), old log-probs, reference log-probs, values, advantages, update critic, update actor, sync
weights; then `fit` logs, dumps, checkpoints and validates. The trainer computes advantages itself and reaches everything
else through worker groups.

Invariant: nothing that infrastructure broke is trained on, and what is trained on is exactly what was sampled.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.algorithms import KLController, compute_advantage, kl_penalty, masked_mean
from etude.data import ResumableLoader, RLDataset
from etude.distributed import InProcessWorkerGroup, WorkerGroup
from etude.errors import ConfigError, EtudeError, one_line
from etude.protocol import DataProto
from etude.rewards import duplicate_judge
from etude.trainer.checkpoints import Checkpoints
from etude.trainer.display import Display
from etude.trainer.dumps import written_atomically
from etude.trainer.interrupts import Interrupts
from etude.trainer.metrics import data_metrics, timing_metrics
from etude.trainer.report import write_report
from etude.trainer.rollouts import Rollouts, dump, joined, mean_figures, spread_groups, survivors
from etude.trainer.setup import RunSetup, plain_config
from etude.trainer.timing import Timings
from etude.trainer.tracking import Tracking
from etude.workers import ActorRolloutRefWorker, CriticWorker, RewardWorker

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


class PPOTrainer:
    """Trains a policy; see the module's docstring. `fit` is the whole run."""

    def __init__(self, setup: RunSetup) -> None:
        """Reads the data and opens nothing else.

        Raises:
            ConfigError, DataError: no training files, or something wrong in one.
        """
        self.setup, self.options, self.algorithm = setup, setup.trainer, setup.algorithm
        if not setup.data.train_files:
            raise ConfigError("data.train_files is empty: give one or more parquet or JSON-lines files")
        self.run_dir = Path(self.options.default_local_dir)
        train = setup.dataset(setup.data.train_files)
        self._warn_of_two_judges(train)
        self.loader = ResumableLoader(
            train, setup.data.train_batch_size, shuffle=setup.data.shuffle, seed=setup.data.seed
        )
        self.val_set = setup.validation_set()
        self.total_steps = self.options.total_training_steps or self.options.total_epochs * len(self.loader)
        if not self.total_steps:
            raise ConfigError(
                f"data.train_batch_size={setup.data.train_batch_size} is more than the {len(train)} rows of data.train_files"
            )
        self.kl = KLController(**vars(self.algorithm.kl_ctrl))
        self.checkpoints = Checkpoints(self.run_dir, self.options.max_actor_ckpt_to_keep)
        self.global_step = 0
        self._batches = iter(self.loader)
        self._loader_state = self.loader.state_dict()

    def _warn_of_two_judges(self, train: RLDataset) -> None:
        if self.setup.roles.reward.enable and len(train):
            row = train[0]
            if duplicate_judge(row, row.get("tools_kwargs")):
                logger.warning(
                    "a tool and the reward manager both judge reward_model.ground_truth, so a right answer counts twice; "
                    "set reward_model.enable=false or one of the weights to 0"
                )

    def init_workers(self) -> None:
        """Starts the groups and loads the models."""
        roles = replace(self.setup.roles, total_steps=self.total_steps * self._updates_per_step())
        self.policy_wg: WorkerGroup = InProcessWorkerGroup(ActorRolloutRefWorker, 1, roles, self.setup.tools)
        self.reward_wg: WorkerGroup = InProcessWorkerGroup(RewardWorker, 1, roles, self.setup.tokenizer)
        self.critic_wg: WorkerGroup | None = None
        self.policy_wg.init_model()
        self.rollouts = Rollouts(self.setup, self.policy_wg, self.reward_wg)
        if self.algorithm.needs_critic:
            self.critic_wg = InProcessWorkerGroup(CriticWorker, 1, roles)
            self.critic_wg.init_model()

    def _updates_per_step(self) -> int:
        """Optimizer steps a full batch takes: the unit of the learning-rate schedules."""
        actor = self.setup.roles.actor
        return actor.ppo_epochs * -(-self.setup.data.train_batch_size // actor.ppo_mini_batch_size)

    # -- the run -------------------------------------------------------------------------------------------------

    def fit(self) -> Metrics:
        """Runs to `total_training_steps`, to an interrupt, or to an error; returns the last validation's figures.

        Raises:
            TrainingStopped: too many trajectories were lost (a checkpoint was saved first).
            CheckpointError: a checkpoint could not be written or read.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._resume()
        with written_atomically(self.run_dir / "config.yaml") as file:
            file.write(plain_config(self.setup.config).encode())
        experiment = f"{self.options.project_name}/{self.options.experiment_name}"
        tracking = Tracking(self.options.logger, self.run_dir, experiment, resume_step=self.global_step)
        console = "console" in self.options.logger
        with Display(self.total_steps, experiment, enabled=console) as display, Interrupts(display.note) as interrupts:
            self.policy_wg.set_progress(display.rollout_progress)
            try:
                return self._loop(tracking, display, interrupts)
            finally:
                tracking.close()
                if self.options.report:
                    display.note(self._report())

    def _report(self) -> str:
        """Writes the report; what is wrong with it is told, and hides no other error."""
        try:
            page = write_report(
                self.run_dir, rollouts=self.options.rollout_data_dir, validation=self.options.validation_data_dir
            )
        except (EtudeError, OSError) as error:
            return f"no report: {one_line(error)}"
        return f"report: {page}"

    def _loop(self, tracking: Tracking, display: Display, interrupts: Interrupts) -> Metrics:
        validated: Metrics = {}
        if self.global_step == 0 and self.options.val_before_train and self.val_set is not None:
            validated = self._validate(self.val_set)
            tracking.log(validated, 0)
            display.step(0, validated)
        saved_at = self.global_step
        try:
            while self.global_step < self.total_steps and not interrupts.stop:
                metrics = self.training_step(interrupts)
                last = self.global_step == self.total_steps
                if self.val_set is not None and (last or _due(self.options.test_freq, self.global_step)):
                    validated = self._validate(self.val_set)
                    metrics |= validated
                tracking.log(metrics, self.global_step)
                display.step(self.global_step, metrics)
                if last or _due(self.options.save_freq, self.global_step):
                    self.save()
                    saved_at = self.global_step
        except KeyboardInterrupt:
            display.note(f"step {self.global_step + 1} was abandoned")
        finally:
            if saved_at != self.global_step:
                self.save()
        return validated

    # -- one step ------------------------------------------------------------------------------------------------

    def training_step(self, interrupts: Interrupts) -> Metrics:
        """One step of the list in the module's docstring; returns its figures."""
        timings = Timings()
        self._loader_state = self.loader.state_dict()  # where an abandoned step goes back to
        with timings("step"):
            with timings("gen"), interrupts.abandonable():
                batch, metrics = self._roll_out()
            metrics |= data_metrics(self._with_rewards(batch, timings), self.setup.data.max_response_length)
            learned = batch.select_idxs(spread_groups(batch)) if self.algorithm.filter_groups.enable else batch
            metrics["training/filter_groups/kept"] = len(learned) / len(batch)
            if len(learned):
                if self.critic_wg is not None:
                    with timings("update_critic"):
                        metrics |= mean_figures(self.critic_wg.update_critic(learned))
                if self.global_step >= self.options.critic_warmup:
                    with timings("update_actor"):  # and sync weights: the engine shares them
                        metrics |= mean_figures(self.policy_wg.update_actor(learned))
        self.global_step += 1
        self._loader_state = self.loader.state_dict()
        tokens = int(batch.batch["attention_mask"].sum())
        metrics |= timing_metrics(timings.seconds, tokens) | {"perf/cpu_seconds": timings.cpu()}
        metrics |= {"training/global_step": self.global_step}
        if self.options.rollout_data_dir:
            dump(self.options.rollout_data_dir, self.global_step, batch, self.setup.chat, self.setup.roles.reward)
        return metrics

    def _roll_out(self) -> tuple[DataProto, Metrics]:
        """Trajectories for `train_batch_size` prompts; with group filtering, again until enough groups have spread."""
        parts: list[DataProto] = []
        all_figures: list[Metrics] = []
        limit = self.algorithm.filter_groups.max_num_gen_batches if self.algorithm.filter_groups.enable else 1
        wanted = self.setup.data.train_batch_size * self.setup.roles.rollout.n
        for attempt in range(limit):
            rolled, figures = self.rollouts.training(self._next_rows(), self.global_step + 1, attempt)
            all_figures.append(figures)
            parts.append(survivors(rolled, self.options.min_valid_fraction))
            if sum(len(spread_groups(part)) for part in parts) >= wanted:
                break
        return joined(parts), mean_figures(all_figures)

    def _with_rewards(self, batch: DataProto, timings: Timings) -> DataProto:
        """Adds old and reference log-probs, values, rewards, advantages and returns."""
        batch.meta_info |= {
            "temperature": self.setup.roles.rollout.temperature,
            "global_step": self.global_step,
        }
        if self.algorithm.rollout_correction.bypass_mode:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        elif self._updates_per_step() > 1:  # a single update's own log-probs are the old ones
            with timings("old_log_prob"):
                batch = batch.union(self.policy_wg.compute_log_prob(batch))
        if self.setup.roles.needs_ref:
            with timings("ref"):
                batch = batch.union(self.policy_wg.compute_ref_log_prob(batch))
        if self.critic_wg is not None:
            with timings("values"):
                batch = batch.union(self.critic_wg.compute_values(batch))
        with timings("adv"):
            self._rewards_and_advantages(batch)
        return batch

    def _rewards_and_advantages(self, batch: DataProto) -> None:
        columns, algorithm = batch.batch, self.algorithm
        mask = columns["response_mask"]
        rewards = columns["token_level_scores"]
        if algorithm.use_kl_in_reward:
            old = columns.get("old_log_probs", columns["rollout_log_probs"])
            penalty = kl_penalty(old, columns["ref_log_prob"], algorithm.kl_penalty) * mask
            rewards = rewards - self.kl.kl_coef * penalty
            self.kl.update(float(masked_mean(penalty, mask)), n_steps=len(batch))
        columns["token_level_rewards"] = rewards
        columns["advantages"], columns["returns"] = compute_advantage(
            algorithm.adv_estimator,
            token_level_rewards=rewards,
            response_mask=mask,
            index=batch.non_tensor_batch["uid"],
            values=columns.get("values", None),
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        )

    def _next_rows(self) -> list[dict[str, Any]]:
        """The next batch of rows; a new epoch begins where one ends."""
        rows = next(self._batches, None)
        if rows is None:
            self._batches = iter(self.loader)
            rows = next(self._batches)
        return rows

    def _validate(self, validation: RLDataset) -> Metrics:
        batch, metrics = self.rollouts.validate(validation)
        if self.options.validation_data_dir:
            dump(self.options.validation_data_dir, self.global_step, batch, self.setup.chat, self.setup.roles.reward)
        return metrics

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Writes the checkpoint of the last finished step."""
        state = {"loader": self._loader_state, "kl_coef": self.kl.kl_coef}
        return self.checkpoints.save(self.global_step, state, self._write_roles)

    def _write_roles(self, folder: str) -> None:
        self.policy_wg.save_checkpoint(folder)
        if self.critic_wg is not None:
            self.critic_wg.save_checkpoint(folder)

    def _resume(self) -> None:
        """Restores everything from the checkpoint that `trainer.resume_mode` names, if there is one."""
        if self.options.resume_mode == "disable":
            return
        given = self.options.resume_from_path if self.options.resume_mode == "resume_path" else None
        folder = Path(given) if given else self.checkpoints.latest()
        if folder is None:
            return
        state = Checkpoints.read_state(folder)
        self.loader.load_state_dict(state["loader"])
        self._loader_state = state["loader"]
        self._batches = iter(self.loader)
        self.kl.kl_coef = state["kl_coef"]
        self.policy_wg.load_checkpoint(str(folder))
        if self.critic_wg is not None:
            self.critic_wg.load_checkpoint(str(folder))
        self.global_step = state["step"]
        logger.info("resumed from %s", folder)


def _due(frequency: int, step: int) -> bool:
    return frequency > 0 and step % frequency == 0
