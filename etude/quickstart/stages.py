"""The quickstart's stages, each the same call that a command makes: data, `etude sft`, `etude eval`, `etude train`.

Invariant: a stage that finished left a file that says so, and is not run again; the folder of an interrupted quickstart
continues where it stopped, and ends as it would have ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from etude.errors import ConfigError
from etude.jsonl import write_json
from etude.quickstart.prepare import Sizes, prepare

Note = Callable[[str], None]

_SIZES = Sizes()


class Quickstart:
    """One quickstart in `folder`; `overrides` go to `etude train`, for instance trainer.total_training_steps=5, and
    `warm_up_overrides` to `etude sft`."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        overrides: tuple[str, ...],
        note: Note,
        *,
        sizes: Sizes = _SIZES,
        warm_up_overrides: tuple[str, ...] = (),
    ) -> None:
        """Raises ConfigError where the folder holds the quickstart of another seed, or something else."""
        self.folder, self.seed, self.overrides, self._note = folder, seed, overrides, note
        self.sizes, self.warm_up_overrides = sizes, warm_up_overrides
        self._ledger = folder / "quickstart.json"
        self._times = self._read_ledger()

    def _read_ledger(self) -> dict[str, dict[str, float]]:
        if not self._ledger.exists():
            return {}
        try:
            held = json.loads(self._ledger.read_text())
            seed, stages = held["seed"], dict(held["stages"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._ledger} is no quickstart's record: give another --output-dir") from error
        if seed != self.seed:
            raise ConfigError(f"{self.folder} holds the quickstart of seed {seed}: give another --output-dir")
        return stages

    def run(self) -> dict[str, Any]:
        """All stages; returns the summary, which also stands in `summary.json`."""
        self.warm_up()
        self._stage("evaluate_before", "evaluating before", lambda: self._evaluate("before", self._warm_model))
        self._stage("train", "reinforcement learning: GRPO over rollouts with the calculator", self._train)
        self._stage("evaluate_after", "evaluating after", lambda: self._evaluate("after", self._trained_model()))
        return self._summary()

    def warm_up(self) -> None:
        """The first stages only: data, and the model that reinforcement learning starts from."""
        self._config()  # a wrong key is told before anything is made, a wrong value before the warm-up
        self._stage("data", "making tasks, demonstrations and an untrained model", self._prepare)
        if "train" not in self._times:
            self._check()
        self._stage("warm_up", "supervised warm-up: learns to talk, and mostly to guess", self._warm_up)

    def _stage(self, name: str, text: str, work: Callable[[], None]) -> None:
        if name in self._times:
            self._note(f"{text}: done before")
            return
        self._note(text)
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self._times[name] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        write_json(self._ledger, {"seed": self.seed, "stages": self._times})

    # -- stages --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        prepare(self.folder, self.seed, self.sizes)

    def _check(self) -> None:
        from etude.trainer.ppo import PPOTrainer
        from etude.trainer.setup import prepare as checked

        fresh = (
            f"actor_rollout_ref.model.path={self.folder}/model",
            "trainer.resume_mode=disable",
        )  # before the warm-up
        setup = checked(self._config(*fresh))
        with closing(setup.groups):
            PPOTrainer(setup)

    @property
    def _warm_model(self) -> Path:
        return self.folder / "warm_up" / "huggingface"

    def _warm_up(self) -> None:
        from etude.config import compose
        from etude.trainer.run import fine_tune
        from etude.viewer.display import Display

        data = self.folder / "data"
        fine_tune(
            compose(
                "quickstart_sft",
                [
                    f"data.train_files={data}/demonstrations.parquet",
                    f"target_success.data_files={data}/val.parquet",
                    f"model.path={self.folder}/model",
                    f"trainer.default_local_dir={self.folder}/warm_up",
                    f"trainer.seed={self.seed}",
                    *self.warm_up_overrides,
                ],
                root="sft",
            ),
            Display(),
        )

    def _config(self, *overrides: str) -> Any:
        from etude.config import compose

        data = self.folder / "data"
        return compose(
            "quickstart",
            [
                f"data.train_files={data}/train.parquet",
                f"data.val_files={data}/val.parquet",
                f"actor_rollout_ref.model.path={self._warm_model}",
                f"trainer.default_local_dir={self.folder}",
                f"trainer.rollout_data_dir={self.folder}/rollouts",
                "trainer.rollout_token_values=true",
                f"trainer.seed={self.seed}",
                *self.overrides,
                *overrides,
            ],
        )

    def _train(self) -> None:
        from etude.trainer.run import train
        from etude.viewer.display import Display

        train(self._config(), Display())

    def _trained_model(self) -> Path:
        from etude.trainer.checkpoints import Checkpoints

        latest = Checkpoints(self._config().trainer.default_local_dir, None).latest()
        assert latest is not None
        return latest / "actor" / "huggingface"

    def _evaluate(self, when: str, model: Path) -> None:
        from etude.trainer.run import evaluate
        from etude.viewer.display import RolloutBar

        common = [f"data.val_files={self.folder}/data/test.parquet", "data.val_max_samples=-1"]
        val = "actor_rollout_ref.rollout.val_kwargs"
        step = 0 if when == "before" else int(model.parents[1].name.removeprefix("global_step_"))
        for how, sampling in (
            ("greedy", [f"{val}.do_sample=false"]),
            ("sampled", [f"{val}.do_sample=true"]),
        ):
            config = self._config(*common, f"actor_rollout_ref.model.path={model}", *sampling)
            folder = self.folder / "evaluation"
            folder.mkdir(exist_ok=True)
            evaluate(config, RolloutBar(), output=folder / f"{how}_{when}.json", dump_folder=folder / how, step=step)

    # -- what came of it -----------------------------------------------------------------------------------------

    def _summary(self) -> dict[str, Any]:
        evaluated = {
            (how, when): json.loads((self.folder / "evaluation" / f"{how}_{when}.json").read_text())
            for how in ("sampled", "greedy")
            for when in ("before", "after")
        }
        summary: dict[str, Any] = {"seed": self.seed}
        for when in ("before", "after"):
            sampled, greedy = evaluated["sampled", when], evaluated["greedy", when]
            summary[f"success_{when}"], summary[f"greedy_{when}"] = sampled["success"], greedy["success"]
            summary[f"tool_use_{when}"] = sampled["tool_use"]
            summary[when] = {
                "success, sampled": _interval(sampled, "success"),
                "success, greedy": _interval(greedy, "success"),
                "tool use, sampled": _interval(sampled, "tool_use"),
            }
        summary["samples"] = evaluated["sampled", "after"]["samples"]
        summary["seconds"] = {name: t["seconds"] for name, t in self._times.items()}
        summary["cpu_seconds"] = {name: t["cpu_seconds"] for name, t in self._times.items()}
        summary["model"] = str(self._trained_model())
        write_json(self.folder / "summary.json", summary)
        return summary


def _interval(result: dict[str, float], name: str) -> dict[str, float]:
    return {"value": result[name], "low": result[f"{name}_low"], "high": result[f"{name}_high"]}
