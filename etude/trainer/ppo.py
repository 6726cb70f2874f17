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

from etude.algorithms import KLController, kl_penalty, masked_mean
from etude.data import ResumableLoader, RLDataset
from etude.distributed import InProcessWorkerGroup, WorkerGroup
from etude.errors import CheckpointError, ConfigError, EtudeError, one_line
from etude.options import ActorOptions, CriticOptions, updates_per_step
from etude.protocol import DataProto
from etude.rewards import duplicate_judge
from etude.trainer.checkpoints import Checkpoints
from etude.trainer.display import Display
from etude.trainer.dumps import written_atomically
from etude.trainer.interrupts import Interrupted, Interrupts
from etude.trainer.metrics import data_metrics, timing_metrics
from etude.trainer.rollouts import Rollouts, dump, joined, main_rows, mean_figures, spread_groups, survivors
from etude.trainer.sequences import expanded, sequence_advantages, sequence_scores
from etude.trainer.setup import RunSetup, config_yaml
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
        self.kl = KLController(**vars(self.algorithm.kl_ctrl))
        self.checkpoints = Checkpoints(self.run_dir, self.options.max_actor_ckpt_to_keep)
        self.global_step = self._saved_at = 0
        self._batches = self.loader.endless()
        self._state = self._loop_state()
        self._updating = False

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
        roles = replace(self.setup.roles, total_steps=self.total_steps * self._updates_per_step(self.setup.roles.actor))
        self.policy_wg: WorkerGroup = InProcessWorkerGroup(ActorRolloutRefWorker, 1, roles, self.setup.parts)
        self.reward_wg: WorkerGroup = InProcessWorkerGroup(RewardWorker, 1, roles, self.setup.tokenizer)
        self.critic_wg: WorkerGroup | None = None
        self.policy_wg.init_model()
        self.rollouts = Rollouts(self.setup, self.policy_wg, self.reward_wg)
        if self.algorithm.needs_critic:
            updates = self._updates_per_step(roles.critic)
            self.critic_wg = InProcessWorkerGroup(
                CriticWorker, 1, replace(roles, total_steps=self.total_steps * updates)
            )
            self.critic_wg.init_model()

    def _updates_per_step(self, options: ActorOptions | CriticOptions) -> int:
        """Optimizer steps a full batch takes: the unit of the learning-rate schedules."""
        return updates_per_step(self.setup.data.train_batch_size, options)

    # -- the run -------------------------------------------------------------------------------------------------

    def fit(self) -> Metrics:
        """Runs to `total_training_steps`; returns the last validation's figures.

        Raises:
            Interrupted: a signal ended it earlier, with a checkpoint.
            TrainingStopped: too many trajectories were lost; a checkpoint holds the steps before.
            CheckpointError: a checkpoint could not be written or read.
        """
        resumed = self._resume()
        with written_atomically(self.run_dir / "config.yaml") as file:
            file.write(config_yaml(self.setup.config).encode())
        experiment = f"{self.options.project_name}/{self.options.experiment_name}"
        tracking = Tracking(self.options.logger, self.run_dir, experiment, resume_step=self.global_step)
        console = "console" in self.options.logger
        with Display(self.total_steps, experiment, enabled=console) as display, Interrupts(display.note) as interrupts:
            self.policy_wg.set_progress(display.rollout_progress)
            if resumed is not None:
                display.note(self._resume_note(resumed))
            try:
                return self._loop(tracking, display, interrupts)
            finally:
                tracking.close()
                if self.options.report:
                    display.note(self._report())

    def _report(self) -> str:
        """Writes the report; what is wrong with it is told, and hides no other error."""
        from etude.trainer.report import write_report  # draws charts: nothing before the end waits for them

        try:
            page = write_report(
                self.run_dir, rollouts=self.options.rollout_data_dir, validation=self.options.validation_data_dir
            )
        except (EtudeError, OSError) as error:
            return f"no report: {one_line(error)}"
        return f"report: {page}"

    def _loop(self, tracking: Tracking, display: Display, interrupts: Interrupts) -> Metrics:
        validated: Metrics = {}
        abandoned = False
        try:
            if self.global_step == 0 and self.options.val_before_train and self.val_set is not None:
                validated = self._validate(self.val_set, interrupts)
                tracking.log(validated, 0)
                display.step(0, validated)
            while self.global_step < self.total_steps and not interrupts.stop:
                validated = self._advance(tracking, display, interrupts) or validated
        except KeyboardInterrupt:
            abandoned = True
            display.note(f"what followed step {self.global_step} was abandoned")
        except Exception as error:
            self._rescue(error)
            raise
        if self._saved_at != self.global_step:
            self.save()
        if abandoned or self.global_step < self.total_steps:
            done = f"stopped after step {self.global_step} of {self.total_steps}"
            where = f"; {self.run_dir} holds its checkpoint, and the same command goes on" if self.global_step else ""
            raise Interrupted(done + where, interrupts.signal_number)
        return validated

    def _advance(self, tracking: Tracking, display: Display, interrupts: Interrupts) -> Metrics:
        """A step, and the validation and checkpoint that are due after it; returns the validation's figures, if any."""
        metrics, validated = self.training_step(interrupts), Metrics()
        last = self.global_step == self.total_steps
        try:
            if self.val_set is not None and (last or _due(self.options.test_freq, self.global_step)):
                validated = self._validate(self.val_set, interrupts)
        finally:  # the step is done, whatever became of its validation
            tracking.log(metrics | validated, self.global_step)
            display.step(self.global_step, metrics | validated)
        if last or _due(self.options.save_freq, self.global_step):
            self.save()
        return validated

    def _rescue(self, error: Exception) -> None:
        """Saves the finished steps before `error` ends the run, unless the weights are no longer theirs."""
        if self._saved_at == self.global_step or self._updating or isinstance(error, CheckpointError):
            return
        try:
            self.save()
        except CheckpointError as second:  # must not hide the first
            logger.warning("%s", one_line(second))

    # -- one step ------------------------------------------------------------------------------------------------

    def training_step(self, interrupts: Interrupts) -> Metrics:
        """One step, in the order of the module's docstring; returns its figures."""
        timings = Timings()
        with timings("step"):
            with timings("gen"), interrupts.abandonable():
                rollouts, metrics = self._roll_out()
            batch = expanded(rollouts, self.setup.tokenizer.pad_token_id or 0)
            if len(batch):
                batch.meta_info |= {
                    "temperature": self.setup.roles.rollout.temperature,
                    "global_step": self.global_step,
                }
                with timings("old_log_prob"):
                    batch = self._with_old_log_probs(batch)
                with timings("ref"):
                    batch = self._with_ref_log_probs(batch)
                with timings("values"):
                    batch = self._with_values(batch)
                with timings("adv"):
                    self._add_advantages(batch)
                metrics |= data_metrics(batch, self.setup.data.max_response_length)
            learned = self._learned(batch)
            kept = int(main_rows(learned).sum())
            metrics["training/filter_groups/kept"] = kept / max(len(rollouts), 1)
            if len(learned):
                self._updating = True
                with timings("update_critic"):
                    metrics |= self._update_critic(learned)
                with timings("update_actor"):  # and sync weights: the engine shares them
                    metrics |= self._update_actor(learned)
        self.global_step += 1
        self._updating, self._state = False, self._loop_state()
        tokens = int(batch.batch["attention_mask"].sum())
        metrics |= timing_metrics(timings.of_work(), tokens) | {"perf/cpu_seconds": timings.cpu()}
        metrics |= {"training/global_step": self.global_step}
        if self.options.rollout_data_dir:
            dump(self.options.rollout_data_dir, self.global_step, rollouts, self.setup.chat, self.setup.roles.reward)
        return metrics

    def _roll_out(self) -> tuple[DataProto, Metrics]:
        """Trajectories for `train_batch_size` prompts; with group filtering, again until enough groups have spread."""
        parts: list[DataProto] = []
        all_figures: list[Metrics] = []
        limit = self.algorithm.filter_groups.max_num_gen_batches if self.algorithm.filter_groups.enable else 1
        for attempt in range(limit):
            rolled, figures = self.rollouts.training(next(self._batches), self.global_step + 1, attempt)
            all_figures.append(figures)
            parts.append(survivors(rolled, self.options.min_valid_fraction))
            if sum(len(spread_groups(part)) for part in parts) >= self.setup.data.train_batch_size:
                break
        return joined(parts), mean_figures(all_figures)

    def _with_old_log_probs(self, batch: DataProto) -> DataProto:
        """Adds `old_log_probs`, unless the batch gets a single update: then that update's own values are the old ones."""
        if self.algorithm.rollout_correction.bypass_mode:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        elif self._updates_per_step(self.setup.roles.actor) > 1:
            batch = batch.union(self.policy_wg.compute_log_prob(batch))
        return batch

    def _with_ref_log_probs(self, batch: DataProto) -> DataProto:
        return batch.union(self.policy_wg.compute_ref_log_prob(batch)) if self.setup.roles.needs_ref else batch

    def _with_values(self, batch: DataProto) -> DataProto:
        return batch if self.critic_wg is None else batch.union(self.critic_wg.compute_values(batch))

    def _add_advantages(self, batch: DataProto) -> None:
        """Adds `token_level_rewards`, `advantages` and `returns`."""
        columns, algorithm = batch.batch, self.algorithm
        mask, episodes = columns["response_mask"], algorithm.needs_critic
        rewards = sequence_scores(batch, episodes=episodes)
        if algorithm.use_kl_in_reward:
            old = columns.get("old_log_probs", columns["rollout_log_probs"])
            penalty = kl_penalty(old, columns["ref_log_prob"], algorithm.kl_penalty) * mask
            rewards = rewards - self.kl.kl_coef * penalty
            self.kl.update(float(masked_mean(penalty, mask)), n_steps=int(main_rows(batch).sum()))
        columns["token_level_rewards"], columns["advantages"], columns["returns"] = sequence_advantages(
            algorithm.adv_estimator,
            batch,
            rewards,
            episodes=episodes,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        )

    def _learned(self, batch: DataProto) -> DataProto:
        """What of the batch is trained on; with group filtering, at most `train_batch_size` groups that have spread."""
        if not self.algorithm.filter_groups.enable:
            return batch
        groups = spread_groups(batch)[: self.setup.data.train_batch_size]
        return batch.select_idxs([row for rows in groups for row in rows])

    def _update_critic(self, batch: DataProto) -> Metrics:
        return {} if self.critic_wg is None else mean_figures(self.critic_wg.update_critic(batch))

    def _update_actor(self, batch: DataProto) -> Metrics:
        warming_up = self.critic_wg is not None and self.global_step < self.options.critic_warmup
        return {} if warming_up else mean_figures(self.policy_wg.update_actor(batch))

    def _validate(self, validation: RLDataset, interrupts: Interrupts) -> Metrics:
        with interrupts.abandonable():
            batch, metrics = self.rollouts.validate(validation)
        if self.options.validation_data_dir:
            dump(self.options.validation_data_dir, self.global_step, batch, self.setup.chat, self.setup.roles.reward)
        return metrics

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Writes the checkpoint of the last finished step."""
        folder = self.checkpoints.save(self.global_step, self._state, self._write_roles)
        self._saved_at = self.global_step
        return folder

    def _loop_state(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "kl_coef": self.kl.kl_coef}

    def _write_roles(self, folder: str) -> None:
        self.policy_wg.save_checkpoint(folder)
        if self.critic_wg is not None:
            self.critic_wg.save_checkpoint(folder)

    def _resume(self) -> Path | None:
        """Restores everything from the checkpoint that `trainer.resume_mode` names, if there is one; its folder."""
        if self.options.resume_mode == "disable":
            return None
        given = self.options.resume_from_path if self.options.resume_mode == "resume_path" else None
        folder = Path(given) if given else self.checkpoints.latest()
        if folder is None:
            return None
        state = Checkpoints.read_state(folder)
        try:
            self._restore(folder, state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            advice = "set trainer.resume_mode=disable or another trainer.default_local_dir"
            raise CheckpointError(f"{folder} does not fit this configuration: {one_line(error)}; {advice}") from error
        return folder

    def _resume_note(self, folder: Path) -> str:
        if self.global_step < self.total_steps:
            return f"resumed from {folder}"
        return (
            f"{folder} is already at the last step: raise trainer.total_training_steps, or set "
            "trainer.default_local_dir to start another run"
        )

    def _restore(self, folder: Path, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self._batches = self.loader.endless()
        self.kl.kl_coef = float(state["kl_coef"])
        self._state = self._loop_state()
        self.policy_wg.load_checkpoint(str(folder))
        if self.critic_wg is not None:
            self.critic_wg.load_checkpoint(str(folder))
        self.global_step = self._saved_at = state["step"]


def _due(frequency: int, step: int) -> bool:
    return frequency > 0 and step % frequency == 0
