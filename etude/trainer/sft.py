"""`SFTTrainer`: supervised fine-tuning on conversations with tool calls, on the best rollouts of a dump, or on pairs of them
(DPO), with the same workers as reinforcement learning.

With `target_success`, the model is evaluated on sampled rollouts every few steps, and the run keeps the *last* snapshot
whose success rate lies in the target window: a policy that succeeds often enough for reinforcement learning to have a
signal, and fails often enough to improve. A run that never enters the window fails and leaves no model.

Checkpoints and resuming work as in reinforcement learning: every `save_freq` steps, at the end and when interrupted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from etude.agents.images import read_image
from etude.checks.setup import check_placement, register_names, resolve_device
from etude.data import ResumableLoader, RLDataset, SFTDataset
from etude.data.blobs import Blobs
from etude.data.dumped import is_dump, rank_pairs, read_dumps, select_rollouts
from etude.data.images import image_tokens
from etude.errors import WARNING, ConfigError, DataError, EtudeError, TrainingStopped, one_line
from etude.metrics import add_metrics, finish_metrics
from etude.models.loading import model_config
from etude.options import Options, SFTOptions
from etude.registry import did_you_mean
from etude.run_folder import run_record
from etude.schemas import ImageInput
from etude.scratch import write_whole
from etude.seeds import trial_seed
from etude.trainer.checkpoints import Checkpoints
from etude.trainer.events import EventSink, Notice, RunEnded, RunStarted, StepFinished, ignore_event
from etude.trainer.interrupts import Interrupted, Interrupts
from etude.trainer.metrics import CostMeter, SkippedSteps, Timings, reward_source_metrics, tool_metrics
from etude.trainer.minibatches import rank_parts
from etude.trainer.preference import preference_step
from etude.trainer.resume import find_resumption, used_values, write_config
from etude.trainer.rollouts import first_cause, rollout_batch, rollouts_of
from etude.trainer.run_facts import describe_run, warn_of_changes
from etude.trainer.tracking import Tracking, starting_over
from etude.trainer.worker_groups import open_groups
from etude.training import demonstrations_to_batch
from etude.training.demonstrations import Demonstration
from etude.workers.context import ToolCatalogue
from etude.workers.role import Placement
from etude.workers.tokenizer_bundle import load_tokenizer_bundle

logger = logging.getLogger(__name__)


class SFTTrainer:
    """Trains `model.path` on `data.train_files` and writes the result to `{default_local_dir}/huggingface`."""

    def __init__(self, options: Options, *, restarts: bool = False, resume_from: Path | None = None) -> None:
        """Checks the configuration and reads the data; loads no model. `restarts`, `resume_from`: see `restart_on_loss`.

        Raises:
            ConfigError, DataError: one line that names the key, file or row.
        """
        if not isinstance(options, SFTOptions):
            raise ConfigError(
                "these are not the options of fine-tuning", fix='give etude.config.compose(…, root="sft")'
            )
        register_names(options)
        self.options, self.run, model = options, options.trainer, options.model
        if model.path is None:
            raise ConfigError("model.path is not set", key="model.path", fix="give the folder of a Hugging Face model")
        self.device = resolve_device(self.run.device)
        check_placement(options.for_workers(), self.device)
        bundle = load_tokenizer_bundle(model, options.data.apply_chat_template_kwargs, options.multi_turn)
        self.tokenizer, self.chat, self.images = bundle.tokenizer, bundle.chat, bundle.images
        rows = model_config(model.path).get("vocab_size")  # embedding rows; can exceed the tokenizer's vocabulary
        self._vocabulary = max(len(self.tokenizer), rows if isinstance(rows, int) else 0)
        self.run_dir = Path(self.run.default_local_dir)
        self.checkpoints = Checkpoints(self.run_dir, self.run.max_actor_ckpt_to_keep, in_background=self.run.async_save)
        self.resumption = find_resumption(options, self.checkpoints, resume_from)
        self.used_config = used_values(options, self.resumption)
        self.step = 0
        self._measured = list[float]()  # the success rate of each trial
        self._kept: int | None = None  # the step of the snapshot that was kept
        self._skipped = SkippedSteps(self.run.max_skipped_steps)
        self.groups = open_groups(options, Placement(self.device), restarts=restarts)
        with self.groups.closed_on_error():
            catalogue, *_ = self.groups.rollout.load_tools()
            self.examples, data = self._read_examples(list(catalogue.schemas.values())), options.data
            self.loader = ResumableLoader(
                self.examples, data.train_batch_size, data.shuffle, data.seed, drop_last=False
            )
            self.total_steps = self.run.total_training_steps or self.run.total_epochs * len(self.loader)
            self.trial = self._trial_rows(catalogue)
            if self.resumption is not None:
                with self.resumption.restoring(self.loader) as state:
                    self._measured, self._kept = state["trials"]["measured"], state["trials"]["kept"]
                    self.step = state["step"]

    def _read_examples(self, schemas: list[dict[str, Any]]) -> _Examples:
        """Reads the examples: `demonstration`s from conversations and dumped rollouts, or `pair`s for DPO.

        Raises:
            ConfigError: DPO, and a file is not a rollout dump.
            DataError: an example is invalid or longer than `data.max_length`; names its row.
        """
        data, dumps = self.options.data, [file for file in self.options.data.train_files if is_dump(file)]
        talks = [file for file in data.train_files if file not in dumps]
        rollouts = read_dumps(dumps)
        for rollout in rollouts:
            for sequence in rollout.sequences:
                self._check_sequence(sequence, rollout.place)
        if self.options.loss.name == "dpo":
            if talks:
                raise ConfigError(
                    f"loss.name=dpo learns from rollout dumps (trainer.rollout_data_dir); {talks[0]} is none"
                )
            pairs = rank_pairs(rollouts, data.min_score, data.max_per_prompt)
            return _Examples(
                [{"pair": (chosen.sequences, rejected.sequences)} for chosen, rejected in pairs], data.train_files
            )
        examples = self._tokenise(SFTDataset(talks, data.image_key), schemas) if talks or not dumps else ()
        kept = select_rollouts(rollouts, data.min_score, data.max_per_prompt) if dumps else []
        dumped = ({"demonstration": runs} for rollout in kept for runs in rollout.sequences)
        return _Examples(chain(examples, dumped), data.train_files)

    def _tokenise(self, rows: SFTDataset, schemas: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields conversations as tokens; their images are read later, when a step trains on them.

        Raises:
            DataError: a row is not a valid conversation; names it.
        """
        unknown: str | None = None
        for where, row in zip(rows.locations, rows):
            images = row.get("images", ())
            tokens, tools = image_tokens(self.images, images, where), row.get("tools") or schemas
            try:
                demonstration = self.chat.demonstration(row["messages"], tools or None, tokens)
            except (EtudeError, ValueError) as error:
                raise DataError(f"{where}: {one_line(error)}") from error
            if unknown is None and (unknown := _unknown_call(row["messages"], tools)):
                logger.warning(WARNING, f"{where} {unknown}", "nothing to do if the mistake is meant")
            elif unknown is None and self.chat.shows_tools and (unknown := _unshown_call(row["messages"], tools)):
                fix = "set multi_turn.tool_config_path, or write tools; nothing to do if a message describes it"
                logger.warning(WARNING, f"{where} {unknown}", fix)
            self._check_sequence(demonstration, where)
            yield {"demonstration": demonstration} | ({"images": images, "where": where} if images else {})

    def _check_sequence(self, sequence: Demonstration, where: str) -> None:
        length = sum(len(ids) for ids, _ in sequence)
        if length > self.options.data.max_length:
            raise DataError(
                f"{where} has {length} tokens, more than data.max_length={self.options.data.max_length}",
                fix="raise data.max_length, or leave the row out",
            )
        if not all(0 <= token < self._vocabulary for ids, _ in sequence for token in ids):
            raise DataError(f"{where} has token ids that the tokenizer of {self.options.model.path} does not have")

    def _trial_rows(self, catalogue: ToolCatalogue) -> RLDataset | None:
        target = self.options.target_success
        files = target.data_files
        if not files:
            return None
        rows = RLDataset(
            files,
            chat=self.chat,
            tool_schemas=catalogue.schemas,
            interactions=catalogue.interactions,
            options=self.options.for_workers().data,
            images=self.images,
            max_samples=target.samples,
            scored=True,
        )
        if len(rows) < target.samples:
            raise ConfigError(
                f"target_success.samples={target.samples}, but {', '.join(files)} has only {len(rows)} rows that fit"
            )
        return rows

    def fit(self, emit: EventSink = ignore_event) -> Path:
        """Trains and returns the folder of the resulting model.

        Raises:
            EtudeError: the success rate never entered the target window.
            TrainingStopped: too many steps in a row were skipped; a checkpoint holds the earlier steps.
            Interrupted: a signal stopped the run; a checkpoint is saved and, without a target window, the current model too.
            CheckpointError: the model could not be written.
        """
        if begins := (
            self.resumption.announce(self.run_dir, self.total_steps)
            if self.resumption is not None
            else starting_over(self.run_dir, self.run)
        ):
            emit(Notice(begins))
        self.groups.actor.init_model(self.total_steps)
        if self.resumption is not None:
            with self.resumption.restoring():
                self.groups.actor.load_checkpoint(str(self.resumption.folder))
        if left := self.step < self.total_steps:
            write_config(self.run_dir, self.used_config)
        experiment = f"{self.run.project_name}/{self.run.experiment_name}"
        resumed = self.resumption.folder if self.resumption else None
        goes_on = resumed is not None and self.checkpoints.holds(resumed)  # with what the folder has
        tracking = Tracking(self.run.logger, self.run_dir, experiment, resume_step=self.step if goes_on else 0)
        if moved := self.checkpoints.set_aside_later(resumed):
            emit(Notice(moved))
        with Interrupts(emit) as interrupts, self.checkpoints.awaited():
            try:
                emit(RunStarted(experiment, self.total_steps, self.run, step=self.step))
                self._cost = CostMeter(self.groups.usage)
                facts = describe_run("sft", self.used_config, self.total_steps)
                if self.resumption is not None and left:
                    warn_of_changes(self.resumption.folder.parent, facts, self.step)
                with run_record(self.run_dir, facts, goes_on, left), self.groups.report_progress(emit):
                    return self._loop(self.run_dir / "huggingface", tracking, emit, interrupts)
            except KeyboardInterrupt:
                raise Interrupted(
                    "stopped during a trial; the same command repeats it", interrupts.signal_number
                ) from None
            finally:
                tracking.close()
                emit(RunEnded())

    def _loop(self, result: Path, tracking: Tracking, emit: EventSink, interrupts: Interrupts) -> Path:
        batches = self.loader.cycle()
        while self.step < self.total_steps and not interrupts.stop:
            self._advance(next(batches), result, tracking, emit, interrupts)
        if self.trial is None and self.step:
            self._write(result)
        self.checkpoints.wait()
        if self.step < self.total_steps:
            raise interrupts.stopped(self.step, self.total_steps, self.run_dir)
        if self.trial is not None and self._kept is None:
            target = self.options.target_success
            raise EtudeError(
                f"sampled success never lay within target_success [{target.low}, {target.high}]; measured "
                f"{', '.join(f'{s:.2f}' for s in self._measured)}: change trainer.total_training_steps, optim.lr or "
                "the demonstrations"
            )
        return result

    def _advance(
        self, rows: list[dict[str, Any]], result: Path, tracking: Tracking, emit: EventSink, interrupts: Interrupts
    ) -> None:
        """Runs one step and any trial and checkpoint due after it."""
        self.checkpoints.wait(only_if_done=True)
        metrics = self._update(rows)
        self.step += 1
        last = self.step == self.total_steps
        if self.trial is not None and (last or self.step % self.options.target_success.every == 0):
            with interrupts.abandonable():
                tried = self._try_out(self.trial, self.step)
            metrics |= tried
            self._measured.append(tried["reward/success/mean"])
            if self.options.target_success.low <= self._measured[-1] <= self.options.target_success.high:
                self._write(result)
                self._kept = self.step
        metrics |= self._cost.measure()
        tracking.log(metrics, self.step)
        emit(StepFinished(self.step, self.total_steps, metrics))
        try:
            self._skipped.note(metrics)
        except TrainingStopped:
            self._save()
            raise
        due = self.run.save_freq > 0 and self.step % self.run.save_freq == 0
        if last or due or interrupts.stop:
            self._save()

    def _save(self) -> None:
        trials = {"measured": self._measured, "kept": self._kept}
        state = {"loader": self.loader.state_dict(), "trials": trials, "config": self.used_config}
        self.checkpoints.save(self.step, state, self.groups.actor.save_checkpoint, self.groups.actor.copy_state)

    def _update(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        timings, actor, pad = Timings(), self.groups.actor, self.tokenizer.pad_token_id or 0
        with timings("step"):
            if self.options.loss.name == "dpo":
                pairs = [row["pair"] for row in rows]
                metrics = preference_step(actor, pairs, beta=self.options.loss.beta, pad_token_id=pad, step=self.step)
            else:
                images = [self._read_images(row) for row in rows]
                batch = demonstrations_to_batch([row["demonstration"] for row in rows], pad, images)
                batch.meta_info["global_step"] = self.step
                metrics = finish_metrics(add_metrics(actor.update_sft(rank_parts(batch, actor.dp_size))))
        seconds = timings.seconds["step"]
        return metrics | {"timing_s/step": seconds, "perf/time_per_step": seconds}

    def _read_images(self, row: dict[str, Any]) -> list[ImageInput]:
        if self.images is None:
            return []
        return [
            read_image(self.images, each, f"{row['where']}: image {n}") for n, each in enumerate(row.get("images", ()))
        ]

    def _try_out(self, rows: RLDataset, step: int) -> dict[str, float]:
        """Rolls out the trial rows with the current weights and returns their reward and tool metrics."""
        seed = trial_seed(self.run.seed, step)
        prompts = rollout_batch(list(rows), n=1, label=f"trial.{step}", seed=seed, validate=False)
        self.groups.rollout.update_weights(step)
        batch = prompts.union(self.groups.rollout.generate_sequences(prompts))
        batch.meta_info.pop("metrics", None)
        results = rollouts_of(batch)
        trajectories = [whole for result in results if (whole := result.whole()) is not None]
        if not trajectories:
            raise EtudeError(f"all {len(batch)} trial rollouts were dropped; the first cause: {first_cause(results)}")
        return reward_source_metrics(trajectories) | tool_metrics(trajectories)

    def _write(self, folder: Path) -> None:
        """Replaces the result atomically, so that a reader never sees a partial model."""
        self.checkpoints.wait()  # a background save removes temporary folders here, which would include ours
        with write_whole(folder) as temporary:
            self.groups.actor.save_model(str(temporary))


def _unknown_call(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Says which tool an assistant calls that is none of `tools`, if there are any, or with an argument that is none of the
    tool's; or that the last turn is empty."""
    known = {each.get("name"): each.get("parameters") or {} for each in (tool.get("function", tool) for tool in tools)}
    calls = [call for each in messages if each["role"] == "assistant" for call in each.get("tool_calls") or ()]
    for call in (call.get("function", call) for call in calls if known):
        if (name := call.get("name")) not in known:
            return f"calls '{name}', and the tools are {', '.join(map(str, known))}{did_you_mean(str(name), known)}"
        given, taken = call.get("arguments"), known[name].get("properties")
        if not isinstance(given, dict) or not taken or known[name].get("additionalProperties"):
            continue
        if unknown := next((each for each in given if each not in taken), None):
            near = did_you_mean(str(unknown), taken)
            return f"calls '{name}' with '{unknown}', and its arguments are {', '.join(map(str, taken))}{near}"
    if not any(str(value).strip() for key, value in messages[-1].items() if key != "role"):
        return "ends in an empty answer: the model learns to say nothing"
    return None


def _unshown_call(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Says which tool an assistant calls where there are no `tools`, and no system message names it."""
    told = " ".join(str(each.get("content")) for each in messages if each["role"] in ("system", "developer"))
    calls = [call for each in messages if each["role"] == "assistant" for call in each.get("tool_calls") or ()]
    for name in (call.get("function", call).get("name") for call in calls if not tools):
        if str(name) not in told:
            return f"calls '{name}', and the prompt shows no tool: the model learns to call what it is not shown"
    return None


class _Examples:
    """Tokenised demonstrations or pairs as a data set for `ResumableLoader`; image bytes are kept in a file."""

    def __init__(self, rows: Iterable[dict[str, Any]], files: Sequence[str]) -> None:
        self._blobs, digest = Blobs(), hashlib.sha256()
        self._rows = [self._blobs.store(row) for row in rows]
        for row in self._rows:
            digest.update(repr({key: value for key, value in row.items() if key != "where"}).encode())
        self.fingerprints = {", ".join(files): digest.hexdigest()[:16]}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self._blobs.restore(self._rows[number])
        return row
