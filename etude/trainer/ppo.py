"""`PPOTrainer`: the training loop for PPO and GRPO.

One step, in the order of `training_step`: take a batch, repeat each prompt `rollout.n` times, roll out and score each
trajectory as soon as it ends (with `max_staleness`, rollouts overlap with the training of earlier steps: see
`rollout_source`), compute old, reference and teacher log-probs, values and advantages, correct the mismatch between engine
and trainer, update the critic, update the actor, sync weights, dump the rollouts. `fit` then validates, logs and writes
checkpoints. The trainer computes advantages itself; everything that needs a model goes through worker groups.

Invariant: rollouts that infrastructure failures broke are never trained on, and the tokens trained on are exactly those
sampled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from etude.algorithms import ADVANTAGE_ESTIMATORS
from etude.checks.setup import Setup, resolve_device, warn_of_rewards, warn_of_tools
from etude.data import ResumableLoader, RLDataset, open_sampler
from etude.data.loader import changed_files
from etude.distributed import WorkerGroup
from etude.dumps import TOKEN_VALUES, read_rollouts, set_aside_later
from etude.errors import CheckpointError, ConfigError, EtudeError, WorkerLost, one_line
from etude.metrics import Metrics as MetricParts
from etude.metrics import add_metrics, finish_metrics
from etude.options import ActorOptions, CriticOptions, has_several_updates
from etude.run_folder import metrics_of, run_record
from etude.trainer.accounting import PROMPTS_FILE, account, accounting_metrics
from etude.trainer.batch_functions import (
    advantage_columns,
    compute_advantages,
    count_rollouts,
    engine_log_probs,
    measure_batch,
    measure_staleness,
    number_rows,
    uids_of,
)
from etude.trainer.checkpoints import Checkpoints
from etude.trainer.correction import MismatchAlarm, correct_mismatch
from etude.trainer.distillation import ask_teachers, check_teachers
from etude.trainer.events import EventSink, Notice, RunEnded, RunStarted, StepFinished, ignore_event
from etude.trainer.group_filter import choose_groups, spread_columns
from etude.trainer.interrupts import Interrupts
from etude.trainer.learning_signal import EmptySteps, JudgeBudget
from etude.trainer.metrics import (
    CostMeter,
    Metrics,
    SkippedSteps,
    Timings,
    find_disappointments,
    gain_costs,
    timing_metrics,
)
from etude.trainer.minibatches import count_updates, update_parts
from etude.trainer.resume import Effect, Resumption, find_resumption, plain_values, used_values, write_config
from etude.trainer.rollout_source import DirectFeed, PromptQueue, StepRollouts, StreamingFeed
from etude.trainer.rollouts import MAIN_SEQUENCE, Batch, Rollouts, dump
from etude.trainer.run_facts import describe_run, parent_of, warn_of_changes
from etude.trainer.sentinel import load_sentinel, second_opinion
from etude.trainer.sequences import expand_sequences
from etude.trainer.tracking import JsonlTracker, Tracking, starting_over
from etude.trainer.verify import check_verifiable, verify_step
from etude.trainer.worker_groups import WorkerGroups

logger = logging.getLogger(__name__)

VERIFY_SHARE = 0.02
"""Of the run's time, what `trainer.verify_every` may take: while it is over, a verification that is due is left out."""


class PPOTrainer:
    """Trains a policy; see the module's docstring. `fit` runs the whole loop."""

    def __init__(self, setup: Setup, groups: WorkerGroups, resume_from: Path | None = None) -> None:
        """Reads the data and the checkpoint's loop state, without loading a model.

        Args:
            resume_from: the checkpoint to resume from; None follows `trainer.resume_mode`.

        Raises:
            ConfigError, DataError: training files are missing or invalid, or the checkpoint's configuration is incompatible.
        """
        self.setup, self.options, self.groups = setup, setup.options, groups
        data = self.options.data
        self.run_dir = Path(self.options.trainer.default_local_dir)
        train = setup.dataset(data.train_files)
        warn_of_tools(train)
        warn_of_rewards(setup, train)
        check_teachers(setup, train.data_sources)
        self.loader = ResumableLoader(
            train,
            data.train_batch_size,
            shuffle=data.shuffle,
            seed=data.seed,
            sampler=open_sampler(replace(data, sampler=self.options.sampler), train),
        )
        self.val_set = setup.validation_set()
        self.total_steps = self.options.trainer.total_training_steps or self.options.trainer.total_epochs * len(
            self.loader
        )
        self.kl_coef = self.options.algorithm.kl_ctrl.kl_coef
        self.role_means: dict[str, float] = {}  # of rewards, by "data source/role"
        self._began, self._verify_seconds = time.monotonic(), 0.0
        self._sentinel = load_sentinel(self.options.trainer.sentinel)
        if self.options.trainer.verify_every:
            check_verifiable(plain_values(self.options), "trainer.verify_every")
        self.checkpoints = Checkpoints(
            self.run_dir, self.options.trainer.max_actor_ckpt_to_keep, in_background=self.options.trainer.async_save
        )
        self.resumption = find_resumption(self.options, self.checkpoints, resume_from)
        self.used_config = used_values(self.options, self.resumption)
        epochs = self.options.trainer.total_epochs if self.options.trainer.total_training_steps is None else None
        self.prompts = PromptQueue(self.loader, epochs)
        self.global_step = self._saved_at = 0
        self._told_solved = False
        self._midstep = False  # the weights or `prompts.jsonl` do not match `global_step`
        self._budget = JudgeBudget(self.options.reward_model.budget)
        self._empty = EmptySteps(data.train_batch_size, ends_run=self.options.trainer.on_solved == "stop")
        if self.resumption is not None:
            self._restore_loop(self.resumption)
        self._unvalidated = self._lacks_validation()
        self._skipped = SkippedSteps(
            self.options.trainer.max_skipped_steps, self.options.trainer.max_infra_failure_share
        )
        self._alarm = MismatchAlarm(self.options.algorithm.rollout_correction.alarm_threshold)

    def announce(self, emit: EventSink) -> None:
        """Tells where the run begins, unless it is the first in its folder; before anything that takes long."""
        if self.resumption is None:
            begins = starting_over(self.run_dir, self.options.trainer)
        elif self._empty.ends_run:
            begins = f"{self.resumption.folder}: {self._empty.explain()}; trainer.on_solved=continue goes on"
        else:
            begins = self.resumption.announce(self.run_dir, self.total_steps, self._unvalidated)
        if begins:
            emit(Notice(begins))

    def init_workers(self) -> None:
        """Loads the models, from the checkpoint if resuming, and sends the weights to the engine."""
        groups = self.groups
        for group in groups.trained:
            group.init_model(self.total_steps)
        for frozen in (groups.rollout, groups.reward, *groups.teachers.values()):
            if frozen is not None and frozen is not groups.actor:
                frozen.init_model()
        self.rollouts = Rollouts(self.options, groups)
        feed = StreamingFeed if self.options.trainer.max_staleness else DirectFeed
        self.feed = feed(self.options, self.rollouts, self.prompts)
        self._state = self._loop_state()
        if self.resumption is not None:
            with self.resumption.restoring():
                for group in groups.trained:
                    group.load_checkpoint(str(self.resumption.folder))
        self._version = self.global_step  # of the engine's weights
        if self.global_step < self.total_steps or self._unvalidated:
            groups.sync_weights(self._version)

    @property
    def _computes_log_probs(self) -> bool:
        """Whether a forward pass is needed before the update: there are several updates, or something else reads it. Else
        the update's own log-probs are the old ones."""
        options, needs = self.options, self.options.needs
        several = has_several_updates(options.actor, options.data.train_batch_size)
        own = not options.algorithm.rollout_correction.bypass_mode and (several or "old_log_probs" in needs)
        return own or bool(needs & {"entropys", "sum_pi_squared"})

    @property
    def _critic(self) -> WorkerGroup | None:
        """The group that computes values: a critic, the actor with a value head, or None."""
        return self.groups.actor if self.options.value_head else self.groups.critic

    def fit(self, emit: EventSink = ignore_event) -> Metrics:
        """Trains up to the last step and returns the metrics of the last validation.

        Raises:
            Interrupted: a signal stopped the run early; a checkpoint is saved.
            WorkerLost, LostSamplesError: a worker died, or its samples are lost; a new trainer can resume.
            TrainingStopped: too many trajectories were dropped, too many steps were skipped or had no token to train on, or
                the judge budget is spent; a checkpoint is saved.
            CheckpointError: a checkpoint could not be written or read.
        """
        options, trainer = self.options, self.options.trainer
        resumed = self.resumption.folder if self.resumption else None
        goes_on = resumed is not None and self.checkpoints.holds(resumed)  # with what the folder has
        kept = self.global_step if goes_on else 0
        if left := self.global_step < self.total_steps or self._unvalidated:
            write_config(self.run_dir, self.used_config)
        experiment = f"{trainer.project_name}/{trainer.experiment_name}"
        tracking = Tracking(trainer.logger, self.run_dir, experiment, resume_step=kept)
        done = kept if goes_on else -1  # a fresh start dumps step 0
        dumps = filter(None, (trainer.rollout_data_dir, trainer.validation_data_dir))
        moved = [aside for folder in dumps if (aside := set_aside_later(folder, done)) is not None]
        saved = self.checkpoints.set_aside_later(resumed)
        val = options.rollout.val_kwargs
        validation: Literal["greedy", "sampled"] = "sampled" if val.do_sample and val.temperature > 0 else "greedy"
        with Interrupts(emit) as interrupts, self.checkpoints.awaited():
            try:
                emit(RunStarted(experiment, self.total_steps, trainer, validation, self.global_step))
                for aside in moved:
                    emit(Notice(f"dumps of later steps than {max(done, 0)}, of an earlier run, are now in {aside}"))
                if saved:
                    emit(Notice(saved))
                self._cost = CostMeter(self.groups.usage)
                facts = describe_run("train", self.used_config, self.total_steps)
                if self.resumption is not None and left:
                    keys = [change.key for change in self.resumption.having(Effect.HONOURED)]
                    warn_of_changes(self.resumption.folder.parent, facts, self.global_step, keys)
                    if parent := parent_of(self.run_dir, self.resumption.folder, self.global_step):
                        facts["parent"] = parent
                self._accounts = JsonlTracker(self.run_dir, "", kept, PROMPTS_FILE)
                record = run_record(self.run_dir, facts, goes_on, left)
                with closing(self._accounts), record, self.groups.report_progress(emit):
                    validated = self._loop(tracking, emit, interrupts)
                    for line in find_disappointments(self.run_dir):
                        emit(Notice(line))
                    return validated
            finally:
                tracking.close()
                emit(RunEnded())

    def _loop(self, tracking: Tracking, emit: EventSink, interrupts: Interrupts) -> Metrics:
        validated: Metrics = {}
        abandoned = False
        try:
            first = self.global_step == 0 and self.options.trainer.val_before_train
            if self.val_set is not None and (first or self._unvalidated):
                validated = self._validate(self.val_set, interrupts)
                self._budget.note(validated)
                metrics = validated | (self._cost.measure() if first else {})  # a step made before has its cost
                tracking.log(metrics, self.global_step)
                emit(StepFinished(self.global_step, self.total_steps, metrics))
            while self.global_step < self.total_steps and not interrupts.stop:
                validated = self._advance(tracking, emit, interrupts) or validated
        except KeyboardInterrupt:
            abandoned = True
            emit(Notice(f"what followed step {self.global_step} was abandoned"))
        except Exception as error:
            self._rescue(error)
            raise
        if self._saved_at != self.global_step:
            self.save()
        self.checkpoints.wait()
        if abandoned or self.global_step < self.total_steps:
            raise interrupts.stopped(self.global_step, self.total_steps, self.run_dir)
        return validated

    def _advance(self, tracking: Tracking, emit: EventSink, interrupts: Interrupts) -> Metrics:
        """Runs one step and any validation and checkpoint due after it; returns the validation's metrics, if any."""
        self.checkpoints.wait(only_if_done=True)
        self._budget.check()
        done, validated = self.global_step, Metrics()
        in_budget = self._verify_seconds <= VERIFY_SHARE * (time.monotonic() - self._began)
        verifies = done > 0 and _due(self.options.trainer.verify_every, done + 1) and in_budget
        if verifies and self._saved_at != done:
            self.save()
        try:
            metrics = self.training_step(interrupts)
            interrupts.step_seconds = metrics["perf/time_per_step"]
        except BaseException:
            if self.global_step > done:
                self._budget.note(self._metrics_of_step)
                tracking.log(self._metrics_of_step, self.global_step)
            raise
        finally:  # the step counts even if its dump or the next step's rollouts failed
            if self.global_step > done:
                self._accounts.log(self._prompts_of_step, self.global_step)
                self._midstep = False
        last = self.global_step == self.total_steps
        if verifies:
            metrics |= self._verify(metrics)
        try:
            if self.val_set is not None and self._validation_due(self.global_step):
                validated = self._validate(self.val_set, interrupts)
        finally:  # the step counts even if its validation failed
            self._budget.note(metrics | validated)
            metrics |= self._cost.measure()
            if validated:
                metrics |= gain_costs(self.run_dir, metrics | validated, self.global_step)
            tracking.log(metrics | validated, self.global_step)
            emit(StepFinished(self.global_step, self.total_steps, metrics | validated, self._evidence))
        self._alarm.note(metrics, emit)
        self._skipped.note(metrics)
        self._empty.check()
        self._announce_solved(emit)
        if last or _due(self.options.trainer.save_freq, self.global_step):
            self.save()
        return validated

    def _verify(self, metrics: Metrics) -> Metrics:
        """Makes the step again with the plain trainer, and warns of a term that differs."""
        self.checkpoints.wait()  # for the one before the step
        started = time.monotonic()
        device = resolve_device("cpu" if self.options.trainer.device == "cpu" else "auto")
        try:
            found = verify_step(self.run_dir, self.global_step, device=device, logged=metrics)
        except (EtudeError, MemoryError, RuntimeError) as error:  # must not end the run
            logger.warning("step %d was not verified: %s", self.global_step, one_line(error))
            return {}
        finally:
            self._verify_seconds += time.monotonic() - started
        if found.first is not None:
            logger.warning("%s", found.explain())
        worst = max((term.excess for term in found.terms), default=0.0)
        return {
            "verify/equal": float(found.first is None),
            "verify/difference": min(worst * found.tolerance, 1e9),
            "timing_s/verify": time.monotonic() - started,
        }

    def _announce_solved(self, emit: EventSink) -> None:
        """Tells once that the task is solved, and what follows."""
        if not self._empty.solved or self._told_solved:
            return
        self._told_solved = True
        follows = (
            "the run ends here; =continue goes on" if self._empty.ends_run else "the run goes on; =stop ends it here"
        )
        emit(Notice(f"{self._empty.explain()}; {follows} (trainer.on_solved)"))

    def _rescue(self, error: Exception) -> None:
        """Saves the finished steps before `error` ends the run, unless an unfinished one already changed the weights."""
        if self._saved_at == self.global_step or self._midstep or isinstance(error, CheckpointError):
            return
        try:
            self.save()
        except (CheckpointError, WorkerLost) as second:  # must not hide the original error
            logger.warning("%s", one_line(second))

    def training_step(self, interrupts: Interrupts) -> Metrics:
        """Runs one step, in the order of the module's docstring, and returns its metrics."""
        options, trainer, groups, critic = self.options, self.options.trainer, self.groups, self._critic
        distillation = options.distillation
        timings, tokens = Timings(), (0, 0)
        values: Batch | None = None  # per token, for the dump
        with timings("step"):
            with timings("gen"), interrupts.abandonable():
                taken = self.feed.take(self.global_step + 1, self.total_steps)
            metrics, self._evidence = taken.metrics, taken.evidence
            if self.loader.sampler is not None:
                self.loader.update(taken.batch.fetch())  # the user's sampler runs on the driver
            batch = self._expand(taken)
            if len(batch):
                batch.meta_info.update(temperature=options.rollout.temperature, global_step=self.global_step)
                batch.meta_info["episodes"] = bool(ADVANTAGE_ESTIMATORS.get(options.algorithm.adv_estimator).episodes)
                if self._computes_log_probs:
                    with timings("old_log_prob"):
                        batch = self._with_old_log_probs(batch)
                bypass = options.algorithm.rollout_correction.bypass_mode
                batch.meta_info["compare_rollout"] = bypass or not self._computes_log_probs
                if options.needs_ref:
                    with timings("ref"):
                        batch = batch.union(groups.actor.compute_ref_log_prob(batch))
                if distillation.teachers:
                    with timings("teacher"):
                        scored: Any = ask_teachers(self.setup, groups, batch)
                        batch = batch.union(scored)
                if critic is not None:
                    with timings("values"):
                        batch = batch.union(critic.compute_values(batch))
                with timings("adv"):
                    batch, found = self._with_advantages(batch)
                    limits = options.data.max_response_length, options.longest_sequence
                    measured, tokens = groups.run(measure_batch, batch, *limits)
                    metrics |= found | measured
                    if trainer.max_staleness:
                        metrics |= groups.run(measure_staleness, taken.batch, self._version)
                    if trainer.rollout_data_dir and trainer.rollout_token_values:
                        batch = batch.union(groups.run(number_rows, batch))  # so that updates record their values
                        values = batch.restrict({*TOKEN_VALUES, "response_mask"})
            with timings("adv"):
                learned, found = self._filter_groups(batch)
                learned, corrections = self._correct_mismatch(learned)
                metrics |= found | corrections
                kept = groups.run(count_rollouts, learned) if MAIN_SEQUENCE in learned.columns else len(learned)
                metrics["training/filter_groups/kept"] = kept / max(len(taken.batch), 1)
            if len(learned):
                self._midstep = True
                updates_actor = critic is None or self.global_step >= trainer.critic_warmup
                # A critic on the actor's trunk is trained by the actor's update.
                if not (critic is None or (options.value_head and updates_actor)):
                    with timings("update_critic"):
                        metrics |= self._update_critic(learned)
                if updates_actor:
                    with timings("update_actor"):
                        metrics |= self._update_actor(learned)
                        if distillation.lags and (self.global_step + 1) % distillation.teacher_sync_steps == 0:
                            groups.actor.update_teacher()
                    with timings("update_weights"):
                        self._version = self.global_step + 1  # the number of the step that produced them
                        metrics |= finish_metrics(add_metrics(groups.sync_weights(self._version)))
        self._prompts_of_step = account(taken.rolled, uids_of(taken.batch), uids_of(learned), taken.stale)
        metrics |= accounting_metrics(self._prompts_of_step)
        metrics |= timing_metrics(timings.seconds, *tokens)
        self._midstep = True  # until `prompts.jsonl` has this step
        self.global_step += 1
        metrics |= {"training/global_step": self.global_step}
        self._empty.note(metrics)
        self._metrics_of_step, self._state = metrics, self._loop_state()
        metrics |= self.feed.judged()  # collects: a prompt that ended since is untrained in the state
        # Dynamic sampling takes several batches per step, so `total_epochs` gives fewer steps.
        if self.feed.exhausted or self._empty.ends_run:
            self.total_steps = self.global_step
        self.feed.end_step(self.global_step, self.total_steps)
        if trainer.rollout_data_dir:
            updated = [] if values is None else [values, *groups.actor.take_token_values()]
            of_tokens = [part for part in updated if part is not None]
            metrics |= self._dump(trainer.rollout_data_dir, taken.batch, of_tokens)
        return metrics

    def _expand(self, taken: StepRollouts) -> Batch:
        """Expands rollouts to one row per sampled sequence."""
        if not taken.has_several_sequences:
            return taken.batch
        given = self.setup.tokenizer.pad_token_id or 0, self.options.reward_model
        expanded: Batch = self.groups.run(expand_sequences, taken.batch, *given)
        return expanded

    def _dump(self, folder: str, rollouts: Batch, values: Sequence[Batch] = ()) -> Metrics:
        """Writes the rollouts, and returns what the sentinel finds in them."""
        given = str(folder), self.global_step, rollouts, self.options.reward_model, list(values)
        found: Metrics = self.groups.run(dump, *given, with_chat=True)
        return found

    def _with_old_log_probs(self, batch: Batch) -> Batch:
        """Adds the actor's `old_log_probs`; in bypass mode, the engine's stand in for them later."""
        batch.meta_info["sum_pi_squared"] = "sum_pi_squared" in self.options.needs
        computed = self.groups.actor.compute_log_prob(batch)
        bypass = self.options.algorithm.rollout_correction.bypass_mode
        return batch.union(computed.restrict(computed.columns - {"old_log_probs"}) if bypass else computed)

    def _with_advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Adds rewards, advantages and returns, and adapts the KL coefficient. In bypass mode, the engine's log-probs are
        the old ones."""
        if self.options.algorithm.rollout_correction.bypass_mode:
            batch = batch.union(self.groups.run(engine_log_probs, batch))
        columns = batch.restrict(advantage_columns(self.options))
        found, self.kl_coef, self.role_means, metrics = self.groups.run(
            compute_advantages, columns, self.options, self.kl_coef, self.role_means
        )
        return batch.union(found), metrics

    def _filter_groups(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Leaves out groups with equal scores, if the algorithm does."""
        if not self.options.algorithm.drops_equal_groups:
            return batch, {}
        columns = batch.restrict(spread_columns(self.options.algorithm.filter_groups.metric))
        rows, metrics = self.groups.run(choose_groups, columns, self.options)
        return batch.select_idxs(rows) if len(batch) else batch, metrics

    def _correct_mismatch(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Weighs and rejects rollouts by what engine and trainer disagree on, before any update."""
        correction = self.options.algorithm.rollout_correction
        if not correction.corrects or correction.bypass_mode or not len(batch):
            return batch, {}
        found, rows, metrics = self.groups.run(correct_mismatch, batch, correction, batch.meta_info["episodes"])
        corrected = batch.restrict(batch.columns - found.columns).union(found)
        return corrected.select_idxs(rows) if len(rows) < len(batch) else corrected, metrics

    def _update_critic(self, batch: Batch) -> Metrics:
        """Fits the critic to the returns, in mini-batches."""
        assert self._critic is not None
        return self._update(batch, self.options.critic, self._critic, "update_critic")

    def _update_actor(self, batch: Batch) -> Metrics:
        """Updates the actor with the advantages, in mini-batches."""
        return self._update(batch, self.options.actor, self.groups.actor, "update_actor")

    def _update(self, batch: Batch, options: ActorOptions | CriticOptions, group: WorkerGroup, method: str) -> Metrics:
        """Slices one mini-batch at a time, in the process that holds the batch, because mini-batches are copies; of the
        columns that the update reads."""
        order, parts = self.options.actor, list[MetricParts]()
        if (read := group.columns_of(method)) is not None:
            batch = batch.restrict(read | {"uid", MAIN_SEQUENCE})
        for number in range(count_updates(len(uids_of(batch)), options)):
            cut = batch, options, order.shuffle, order.data_loader_seed, group.dp_size, number
            parts += getattr(group, method)(self.groups.run(update_parts, *cut))
        return finish_metrics(add_metrics(parts))

    def _validation_due(self, step: int) -> bool:
        return step == self.total_steps or _due(self.options.trainer.test_freq, step)

    def _lacks_validation(self) -> bool:
        """Whether the step resumed from is one of this run's, and was due to be validated, but is not: that was abandoned,
        or failed."""
        if self.val_set is None or self.resumption is None or not self.checkpoints.holds(self.resumption.folder):
            return False
        made = next((each for each in metrics_of(self.run_dir) if each["step"] == self.global_step), None)
        if made is None or not self._validation_due(self.global_step):
            return False
        return not any(name.startswith(("val/", "val-core/")) for name in made)

    def _validate(self, validation: RLDataset, interrupts: Interrupts) -> Metrics:
        with interrupts.abandonable():
            batch, metrics = self.rollouts.validate(validation)
        if folder := self.options.trainer.validation_data_dir:
            self._dump(folder, batch)
            if self._sentinel is not None:
                records = read_rollouts(Path(folder) / f"{self.global_step}.jsonl")
                metrics |= second_opinion(records, self._sentinel, self.options.reward_model.score_text)
        return metrics

    def save(self) -> None:
        """Writes the checkpoint of the last finished step; with `trainer.async_save`, only starts writing it."""
        state = self._state | {"config": self.used_config, "judge_cost": self._budget.spent}
        self.checkpoints.save(self.global_step, state, self._write_roles, self._copy_roles)
        self._saved_at = self.global_step

    def _loop_state(self) -> dict[str, Any]:
        # A fixed coefficient is read from the configuration, not from the checkpoint.
        adapted = self.kl_coef if self.options.algorithm.kl_ctrl.type == "adaptive" else None
        own = {"kl_coef": adapted, "empty_steps": self._empty.state(), "val_fingerprints": self._val_fingerprints()}
        return self.feed.state_dict() | own | {"role_means": self.role_means}

    def _val_fingerprints(self) -> dict[str, str]:
        return self.val_set.fingerprints if self.val_set else {}

    def _copy_roles(self) -> None:
        for group in self.groups.trained:
            group.copy_state()

    def _write_roles(self, folder: str) -> None:
        for group in self.groups.trained:
            group.save_checkpoint(folder)

    def _restore_loop(self, resumption: Resumption) -> None:
        with resumption.restoring(self.loader) as state:
            if self.options.algorithm.kl_ctrl.type == "adaptive" and state["kl_coef"] is not None:
                self.kl_coef = float(state["kl_coef"])
            self.role_means = {key: float(mean) for key, mean in state.get("role_means", {}).items()}
            self.global_step = self._saved_at = state["step"]
            self._budget.spent = float(state.get("judge_cost", 0.0))
            self._empty.restore(state.get("empty_steps", {}))
            self.prompts.restore(state)
        if files := changed_files(state.get("val_fingerprints"), self._val_fingerprints()):
            logger.warning("data.val_files: rows changed since %s: %s", resumption.folder.name, ", ".join(files))
        if self.prompts.exhausted or self._empty.ends_run:
            self.total_steps = self.global_step
        if "values" in self.options.needs and not (resumption.folder / "critic").is_dir():
            raise ConfigError(
                f"{resumption.folder} holds no critic, and algorithm.adv_estimator={self.options.algorithm.adv_estimator} "
                "needs one: set the estimator back, or trainer.default_local_dir for a run of its own"
            )


def _due(frequency: int, step: int) -> bool:
    return frequency > 0 and step % frequency == 0
