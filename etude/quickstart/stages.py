"""`Quickstart`: runs the stages of an example: data, warm-up (as `etude sft`), evaluation (`etude eval`) and training
(`etude train`).

Invariant: finished stages are recorded in `quickstart.json` and not repeated, so that an interrupted example resumes where
it stopped and gives the same result. Two processes never work in one folder at once: the second waits for a lock.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.dumps import read_rollouts
from etude.errors import ConfigError, plural, user_file
from etude.jsonl import json_safe, write_json
from etude.options.model_path import NAMED_MODELS, named_folder
from etude.quickstart.example import Example, Rows, find_example
from etude.quickstart.prepare import write_model, write_tables
from etude.registry import digest_code

Note = Callable[[str], None]
_LEDGER = "quickstart.json"


class Quickstart:
    """Runs an example in `folder`. `overrides` go to the training run, for instance trainer.total_training_steps=5, and
    `warm_up_overrides` to the warm-up; `rows` replaces the example's numbers of rows."""

    def __init__(
        self,
        example: Example,
        folder: Path,
        seed: int,
        overrides: tuple[str, ...],
        note: Note,
        *,
        rows: Rows | None = None,
        warm_up_overrides: tuple[str, ...] = (),
    ) -> None:
        """Raises ConfigError if the folder belongs to another example or seed, or its `quickstart.json` is malformed."""
        self.example, self.folder, self.seed, self.overrides, self._note = example, folder, seed, overrides, note
        self.rows, self.warm_up_overrides = rows or example.options.rows, warm_up_overrides
        self._start = self._find_other(example.options.start)
        self._teacher = self._find_other(example.options.teacher)
        self._data: Path = folder / "data" if self._start is None or example.prepare is not None else self._start._data
        self._ledger = folder / _LEDGER
        self._got: dict[str, dict[str, float]] = {}
        # digests of what made the rows, and of what the run was given; numbers of rows
        self._inputs = {"code": "", "settings": "", "rows": ""}
        self._made_of = dict[str, str]()  # the same, of the run in the folder
        self._times = self._read_ledger()

    def _find_other(self, name: str | None) -> Quickstart | None:
        if name is None:
            return None
        example = find_example(name)
        return Quickstart(example, example.run_folder(self.seed), self.seed, (), self._note)

    def _read_ledger(self) -> dict[str, dict[str, float]]:
        if not self._ledger.exists():
            return {}
        try:
            ledger = json.loads(self._ledger.read_text())
            name, seed, stages = ledger["example"], ledger["seed"], dict(ledger["stages"])
            self._made_of = {each: ledger[each] for each in self._inputs if each in ledger}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._ledger} is no quickstart's record: give another --output-dir") from error
        if (name, seed) != (self.example.root, self.seed):
            raise ConfigError(f"{self.folder} holds the {name} of seed {seed}: give another --output-dir")
        return stages

    def run(self) -> dict[str, Any]:
        """Runs all stages; returns the summary, which is also written to `summary.json`."""
        self.check_keys()
        self.example.warn_of_model()
        self.get_model()
        with self._open(), self._serve():
            if self._teacher is not None:
                self._teacher.run()
            self._warm_up_stages()
            self._stage("evaluate_before", "evaluating before", lambda: self._evaluate("before", self._warm_model))
            self._stage("train", "reinforcement learning", self._train)
            self._stage("evaluate_after", "evaluating after", lambda: self._evaluate("after", self.trained_model()))
        return self._summary()

    def plan(self) -> list[str]:
        """What `run` does and how long each stage is, a line a stage; raises ConfigError as `check_keys` does."""
        config, lines = self._config(), list[str]()
        asking = self if self._start is None or self.example.prepare is not None else self._start
        if self._teacher is not None and "train" not in self._teacher._times:
            lines.append(f"example {self._teacher.example.name}: all of its stages, for the teacher")
        if self._start is not None and "evaluate_before" not in self._times:
            lines.append(f"example {self._start.example.name}: its rows, and the model that this one starts from")
        if self._warms_up:
            warm_up = self._warm_up_config()
            lines.append(f"supervised warm-up: {_length(warm_up)} of {warm_up.data.train_batch_size} conversations")
        n, batch = config.actor_rollout_ref.rollout.n, config.data.train_batch_size
        every = config.trainer.save_freq
        saved = f"every {plural(every, 'step')}".replace(" 1 ", " ") if every > 0 else "at the end"
        lines += [
            f"evaluating before: {asking.rows.test} questions, {' and '.join(self._ways)}",
            f"reinforcement learning: {_length(config)} of {batch} questions with {n} answers each, a checkpoint {saved}",
            "evaluating after: the same questions",
        ]
        return [f"{number} {line}" for number, line in enumerate(lines, 1)]

    def check_keys(self) -> None:
        """Raises ConfigError if the overrides have an unknown key; invalid values are found before training."""
        self._config()

    def get_model(self) -> None:
        """Gets the pretrained model that the example starts from, if any and if it is not there.

        Raises:
            ConfigError: it cannot be downloaded, converted or written.
        """
        name = self.example.options.model
        if name in NAMED_MODELS and not named_folder(name).is_dir():
            from etude.models.download import get_model

            self._got["model"] = self._measure(f"getting the model {name}", lambda: get_model(name))

    def warm_up(self) -> None:
        """Runs the first stages only: data, and the warmed-up model that reinforcement learning starts from."""
        with self._open(), self._serve():
            self._warm_up_stages()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Locks the folder and makes the data."""
        self.check_keys()  # before anything is written
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "quickstart.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._note(f"waiting: another process works in {self.folder}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._times = self._read_ledger() | self._got
            files = [self.example.folder / name for name in ("agent.yaml", "example.yaml")]
            given = [*(each.read_text(encoding="utf-8") for each in files), *self.overrides, *self.warm_up_overrides]
            settings = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
            prepare = self.example.prepare
            self._inputs |= {"settings": settings}
            if prepare is not None:
                rows = ", ".join(f"{name} {number}" for name, number in asdict(self.rows).items())
                self._inputs |= {"code": digest_code(prepare), "rows": rows}
            self._refuse_changes()
            if prepare is not None:
                text = "making tasks and demonstrations" if self.rows.demonstrations else "making tasks"
                self._stage("data", text, self._make_data)
            yield

    @contextmanager
    def _serve(self) -> Iterator[None]:
        """Runs the example's service with its address in the environment; its CPU time is recorded as a separate stage."""
        began = os.times()
        with self.example.serve(self.folder) as variables:
            before = {name: os.environ.get(name) for name in variables}
            os.environ.update(variables)
            try:
                yield
            finally:
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
        if variables:
            self._times.setdefault("service", {"seconds": 0.0, "cpu_seconds": 0.0})
            self._times["service"]["cpu_seconds"] += _children(os.times()) - _children(began)
            self._write_ledger()

    def _warm_up_stages(self) -> None:
        if self._start is not None:
            self._start.warm_up()
        elif self.example.options.model is None:
            self._stage("model", "making an untrained model", self._make_model)
        if "train" not in self._times:
            self._check()
        if self._warms_up:
            self._stage("warm_up", "supervised warm-up on demonstrations", self._warm_up)

    def _stage(self, name: str, text: str, work: Callable[[], object]) -> None:
        if name in self._times:
            self._note(f"{text}: done before")
            return
        self._times[name] = self._measure(text, work)
        self._write_ledger()

    def _measure(self, text: str, work: Callable[[], object]) -> dict[str, float]:
        self._note(text)
        wall, cpu = time.perf_counter(), cpu_seconds()
        work()
        gc.collect()  # a stage's models and caches refer to each other: the next one needs their memory
        return {"seconds": time.perf_counter() - wall, "cpu_seconds": cpu_seconds() - cpu}

    def _write_ledger(self) -> None:
        ledger = {"example": self.example.root, "seed": self.seed, **self._inputs, "stages": self._times}
        write_json(self._ledger, ledger)

    def _refuse_changes(self) -> None:
        """Raises ConfigError if rows would be kept that other code has made, or the result of other settings."""
        code, settings, rows = (self._made_of.get(name, now) != now for name, now in self._inputs.items())
        fix = "give another --output-dir, or delete that folder and start anew"
        if code and "data" in self._times:
            made = f"changed since it made the rows in {self.folder}"
            raise ConfigError(f"{self.example.folder / 'agent.py'}, or what it imports, {made}", fix=fix)
        if rows and "data" in self._times:
            held, asked = self._made_of["rows"], self._inputs["rows"]
            line = f"{self.folder} holds other numbers of rows ({held}) than {self.example.folder / 'example.yaml'} asks for"
            raise ConfigError(f"{line} ({asked})", fix=fix)
        if settings and "train" in self._times:
            raise ConfigError(
                f"{self.folder} is finished, with another agent.yaml, example.yaml or command line", fix=fix
            )

    # -- stages --------------------------------------------------------------------------------------------------

    def _make_data(self) -> None:
        write_tables(self.example, self.folder, self.seed, self.rows)

    def _make_model(self) -> None:
        write_model(self.folder, self._tool_files(), self.seed, self.example.options.vocabulary)

    def _tool_files(self) -> list[str]:
        named = self._config().actor_rollout_ref.rollout.multi_turn.tool_config_path or []
        return [named] if isinstance(named, str) else list(named)

    def _check(self) -> None:
        from etude.testing.run import require_score
        from etude.trainer.ppo import PPOTrainer
        from etude.trainer.setup import prepare as checked

        model = self._first_model if self._warms_up else self._warm_model
        setup, groups = checked(self._config(f"actor_rollout_ref.model.path={model}", "trainer.resume_mode=disable"))
        with closing(groups):
            PPOTrainer(setup, groups)
        if user_file(str(self.example.folder / "example.yaml")) or any(
            each.startswith("custom_reward_function") for each in self.overrides
        ):  # the package's own are tested
            require_score(setup.options)

    @property
    def _warms_up(self) -> bool:
        """Whether a supervised stage comes before the reinforcement learning."""
        return self._start is None and bool(self.example.options.model is None or self.rows.demonstrations)

    @property
    def _first_model(self) -> Path:
        """What the warm-up starts from."""
        name = self.example.options.model
        return self.folder / "model" if name is None else named_folder(name) if name in NAMED_MODELS else Path(name)

    @property
    def _warm_model(self) -> Path:
        """What the reinforcement learning starts from."""
        if self._start is not None:
            return self._start._warm_model
        return self.folder / "warm_up" / "huggingface" if self._warms_up else self._first_model

    def _warm_up(self) -> None:
        from etude.trainer.run import fine_tune
        from etude.viewer.display import Display

        fine_tune(self._warm_up_config(), Display())

    def _warm_up_config(self) -> Any:
        from etude.config import compose

        return compose(
            "quickstart_sft",
            [
                f"data.train_files={self._data}/demonstrations.parquet",
                f"target_success.data_files={self._data}/val.parquet",
                f"model.path={self._first_model}",
                f"multi_turn.tool_config_path=[{','.join(self._tool_files())}]",
                f"trainer.default_local_dir={self.folder}/warm_up",
                f"trainer.seed={self.seed}",
                *self.example.options.warm_up,
                *self.warm_up_overrides,
            ],
            root="sft",
        )

    def _config(self, *overrides: str) -> Any:
        from etude.config import compose

        teacher = self._teacher and (self._teacher.trained_model() or "teacher")  # a placeholder until it is trained
        return compose(
            "agent",
            [
                f"data.train_files={self._data}/train.parquet",
                f"data.val_files={self._data}/val.parquet",
                f"actor_rollout_ref.model.path={self._warm_model}",
                f"trainer.default_local_dir={self.folder}",
                f"trainer.rollout_data_dir={self.folder}/rollouts",
                "trainer.report=false",  # written at the end, with the evaluations
                "trainer.rollout_token_values=true",
                f"trainer.seed={self.seed}",
                *([f"distillation.teachers={{default: {teacher}}}"] if teacher else []),
                *self.overrides,
                *overrides,
            ],
            self.example.folder,
        )

    def _train(self) -> None:
        from etude.trainer.run import train
        from etude.viewer.display import Display

        train(self._config(), Display())

    def trained_model(self) -> Path | None:
        """Returns the model folder of the last checkpoint; None before the first."""
        from etude.trainer.checkpoints import Checkpoints

        latest = Checkpoints(self._config().trainer.default_local_dir, None).latest()
        return None if latest is None else latest / "actor" / "huggingface"

    def _evaluate(self, when: str, model: Path | None) -> None:
        from etude.trainer.run import evaluate
        from etude.viewer.display import RolloutBar

        assert model is not None
        common = [f"data.val_files={self._data}/test.parquet", "data.val_max_samples=-1"]
        val = "actor_rollout_ref.rollout.val_kwargs"
        for how in self._ways:
            settings = [*common, f"actor_rollout_ref.model.path={model}", f"{val}.do_sample={how == 'sampled'}"]
            settings += [] if how == "sampled" else [f"{val}.n=1"]  # greedy answers are all the same
            folder = self.folder / "evaluation"
            folder.mkdir(exist_ok=True)
            step = 0 if when == "before" else int(model.parents[1].name.removeprefix("global_step_"))
            result = evaluate(self._config(*settings), RolloutBar(), dump_folder=folder / how, step=step)
            turns = _count_turns(folder / how / f"{step}.jsonl")
            write_json(folder / f"{how}_{when}.json", json_safe(result | turns))

    @property
    def _ways(self) -> tuple[str, ...]:
        return ("greedy", "sampled") if self.example.options.greedy else ("sampled",)

    # -- summary -------------------------------------------------------------------------------------------------

    def _summary(self) -> dict[str, Any]:
        results = {
            (how, when): json.loads((self.folder / "evaluation" / f"{how}_{when}.json").read_text())
            for how in self._ways
            for when in ("before", "after")
        }
        claim = self.example.options
        summary: dict[str, Any] = {"example": self.example.name, "seed": self.seed}
        for when in ("before", "after"):
            sampled = results["sampled", when]
            summary[f"success_{when}"], summary[f"tool_use_{when}"] = sampled["success"], sampled["tool_use"]
            summary[when] = {"success, sampled": _interval(sampled, "success")}
            if (greedy := results.get(("greedy", when))) is not None:
                summary[f"greedy_{when}"] = greedy["success"]
                summary[when]["success, greedy"] = _interval(greedy, "success")
            summary[when]["tool use, sampled"] = _interval(sampled, "tool_use")
            if claim.metric in ("reward", "turns"):  # means, not proportions: only if the claim is about them
                summary[when][f"{claim.metric}, sampled"] = sampled[claim.metric]
        before, after = (_interval(results["sampled", when], claim.metric) for when in ("before", "after"))
        rise = after["value"] - before["value"]
        held = rise >= claim.margin if claim.margin > 0 else rise <= claim.margin
        summary["claim"] = {
            "metric": claim.metric,
            "margin": claim.margin,
            "before": before,
            "after": after,
            "held": held,
        }
        summary["tasks"] = results["sampled", "after"]["prompts"]
        summary["seconds"] = {name: t["seconds"] for name, t in self._times.items()}
        summary["cpu_seconds"] = {name: t["cpu_seconds"] for name, t in self._times.items()}
        summary["model"] = str(self.trained_model())
        write_json(self.folder / "summary.json", summary)
        return summary


def was_started(example: Example, folder: Path) -> bool:
    """Returns whether `folder` holds a run of the example."""
    try:
        return bool(json.loads((folder / _LEDGER).read_text())["example"] == example.root)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def cpu_seconds() -> float:
    """Returns the CPU time of this process and its terminated children, in seconds."""
    times = os.times()
    return times.user + times.system + _children(times)


def _children(times: os.times_result) -> float:
    return times.children_user + times.children_system


def _length(config: Any) -> str:
    steps, epochs = config.trainer.total_training_steps, config.trainer.total_epochs
    return plural(epochs, "epoch") + " in steps" if steps is None else plural(steps, "step")


def _count_turns(dump: Path) -> dict[str, float]:
    """Returns `turns`, the mean number of assistant turns, with a bootstrapped 95 % interval."""
    from etude.trainer.validation_metrics import estimate

    turns = estimate([record["assistant_turns"] for record in read_rollouts(dump)], proportion=False)
    return {"turns": turns.value, "turns_low": turns.low, "turns_high": turns.high}


def _interval(result: Mapping[str, float], name: str) -> dict[str, float]:
    return {"value": result[name], "low": result[f"{name}_low"], "high": result[f"{name}_high"]}
