"""The quickstart's stages, each the same call that a command makes: data, `etude sft`, `etude eval`, `etude train`.

Invariant: a stage that finished left a file that says so, and is not run again; the folder of an interrupted quickstart
continues where it stopped, and ends as it would have ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etude.errors import ConfigError
from etude.quickstart.prepare import TOOLS, prepare

Note = Callable[[str], None]


class Quickstart:
    """One quickstart in `folder`; `overrides` go to `etude train`, for instance trainer.total_training_steps=5."""

    def __init__(self, folder: Path, seed: int, overrides: tuple[str, ...], note: Note) -> None:
        """Raises ConfigError where the folder holds the quickstart of another seed."""
        self.folder, self.seed, self.overrides, self._note = folder, seed, overrides, note
        self._ledger = folder / "quickstart.json"
        self._times: dict[str, dict[str, float]] = {}
        if self._ledger.exists():
            held = json.loads(self._ledger.read_text())
            if held.get("seed") != seed:
                raise ConfigError(
                    f"{folder} holds the quickstart of seed {held.get('seed')}: give another --output-dir"
                )
            self._times = held["stages"]

    def run(self) -> dict[str, Any]:
        """All stages; returns the summary, which also stands in `summary.json`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stage("data", "making tasks, demonstrations and an untrained model", self._prepare)
        self._stage("warm_up", "supervised warm-up: learns to talk, and mostly to guess", self._warm_up)
        self._stage("evaluate_before", "evaluating before", lambda: self._evaluate("before", self._warm_model))
        self._stage("train", "reinforcement learning: GRPO over rollouts with the calculator", self._train)
        self._stage("evaluate_after", "evaluating after", lambda: self._evaluate("after", self._trained_model()))
        return self._summary()

    def _stage(self, name: str, text: str, work: Callable[[], None]) -> None:
        if name in self._times:
            self._note(f"{text}: done before")
            return
        self._note(text)
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self._times[name] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        self._ledger.write_text(json.dumps({"seed": self.seed, "stages": self._times}, indent=1))

    # -- stages --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        prepare(self.folder, self.seed)

    @property
    def _warm_model(self) -> Path:
        return self.folder / "warm_up" / "huggingface"

    def _warm_up(self) -> None:
        from etude.config import compose
        from etude.trainer.run import fine_tune

        data = self.folder / "data"
        fine_tune(
            compose(
                "quickstart_sft",
                [
                    f"data.train_files={data}/demonstrations.parquet",
                    f"target_success.data_files={data}/val.parquet",
                    f"model.path={self.folder}/model",
                    f"multi_turn.tool_config_path={TOOLS}",
                    f"trainer.default_local_dir={self.folder}/warm_up",
                    f"trainer.seed={self.seed}",
                ],
                root="sft",
            )
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
                f"actor_rollout_ref.rollout.multi_turn.tool_config_path={TOOLS}",
                f"trainer.default_local_dir={self.folder}",
                f"trainer.rollout_data_dir={self.folder}/rollouts",
                f"trainer.seed={self.seed}",
                *self.overrides,
                *overrides,
            ],
        )

    def _train(self) -> None:
        from etude.errors import TrainingStopped
        from etude.trainer.run import train

        config = self._config()
        train(config)
        steps = config.trainer.total_training_steps
        if not self._trained_model().parents[1].name == f"global_step_{steps}":
            raise TrainingStopped(f"stopped before step {steps}; the same command goes on from here")

    def _trained_model(self) -> Path:
        step = (self.folder / "latest_checkpointed_iteration.txt").read_text().strip()
        return self.folder / f"global_step_{step}" / "actor" / "huggingface"

    def _evaluate(self, when: str, model: Path) -> None:
        from etude.trainer.run import evaluate

        common = [f"data.val_files={self.folder}/data/test.parquet", "data.val_max_samples=-1"]
        val = "actor_rollout_ref.rollout.val_kwargs"
        step = 0 if when == "before" else int(model.parents[1].name.removeprefix("global_step_"))
        for how, sampling in (
            ("greedy", [f"{val}.do_sample=false"]),
            ("sampled", [f"{val}.do_sample=true", f"{val}.temperature=1.0"]),
        ):
            config = self._config(*common, f"actor_rollout_ref.model.path={model}", *sampling)
            folder = self.folder / "evaluation"
            folder.mkdir(exist_ok=True)
            evaluate(config, output=folder / f"{how}_{when}.json", dump_folder=folder / how, step=step)

    # -- what came of it -----------------------------------------------------------------------------------------

    def _summary(self) -> dict[str, Any]:
        figures = {
            (how, when): json.loads((self.folder / "evaluation" / f"{how}_{when}.json").read_text())
            for how in ("sampled", "greedy")
            for when in ("before", "after")
        }
        summary: dict[str, Any] = {"seed": self.seed}
        for when in ("before", "after"):
            sampled, greedy = figures["sampled", when], figures["greedy", when]
            summary[f"success_{when}"], summary[f"greedy_{when}"] = sampled["success"], greedy["success"]
            summary[f"tool_use_{when}"] = sampled["tool_use"]
            summary[when] = {
                "success, sampled": _interval(sampled, "success"),
                "success, greedy": _interval(greedy, "success"),
                "tool use, sampled": _interval(sampled, "tool_use"),
            }
        summary["samples"] = figures["sampled", "after"]["samples"]
        summary["seconds"] = {name: t["seconds"] for name, t in self._times.items()}
        summary["cpu_seconds"] = {name: t["cpu_seconds"] for name, t in self._times.items()}
        summary["model"] = str(self._trained_model())
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1))
        return summary


def _interval(result: dict[str, float], name: str) -> dict[str, float]:
    return {"value": result[name], "low": result[f"{name}_low"], "high": result[f"{name}_high"]}
