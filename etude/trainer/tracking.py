"""`Tracking`: writes a step's named scalars to every place that `trainer.logger` names.

Invariant: `metrics.jsonl` holds each step's line once, in order, and survives a kill. On resume, lines after the
checkpoint's step are dropped, because those steps run again; a fresh start moves an earlier file aside. Nothing else is
removed.

A backend that is not a plain file may fail (a full disk, a network): it warns once, and training goes on. The console
is the display's part; computing the numbers is that of `metrics`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from etude.errors import ConfigError, EtudeError, MissingExtraError, one_line
from etude.jsonl import json_line, write_atomically
from etude.registry import Registry
from etude.run_folder import METRICS_FILE, read_steps

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A destination for scalars."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the scalars of one step."""

    def close(self) -> None:
        """Flushes and closes."""


TrackerFactory = Callable[[Path, str, int], "Tracker | None"]  # (run folder, experiment, step resumed from)
TRACKERS: Registry[TrackerFactory] = Registry("trainer.logger")


class Tracking:
    """The trackers of one run.

    Args:
        logger: names: `console`, `jsonl`, `tensorboard`, `wandb`, `mlflow`.
        run_dir: the run's folder, made if absent.
        experiment: the run's name in trackers that have one.
        resume_step: the last step of the checkpoint resumed from, 0 for a fresh start.

    Raises:
        ConfigError: a name is unknown (the message gives the nearest), or a tracker cannot start.
        MissingExtraError: a tracker's package is not installed.
        EtudeError: the metrics file cannot be written.
    """

    def __init__(self, logger: Sequence[str], run_dir: Path | str, experiment: str, resume_step: int = 0) -> None:
        names = [logger] if isinstance(logger, str) else list(dict.fromkeys(logger))
        factories = {name: TRACKERS.get(name) for name in names}
        self._trackers: dict[str, Tracker] = {}
        self._warned: set[str] = set()
        for name, factory in factories.items():
            try:
                tracker = factory(Path(run_dir), experiment, resume_step)
            except EtudeError:
                self.close()
                raise
            except Exception as error:  # the tracker package's own error, for the user to read
                self.close()
                reason = f"{type(error).__name__}: {one_line(error)}"
                raise ConfigError(f"trainer.logger: '{name}' cannot start: {reason}") from error
            if tracker is not None:
                self._trackers[name] = tracker

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records one step's scalars everywhere.

        Raises:
            EtudeError: `metrics.jsonl` cannot be written; every other failure is one warning.
        """
        for name in self._trackers:
            self._guarded(name, lambda tracker: tracker.log(metrics, step))

    def close(self) -> None:
        """Closes every tracker; a second call does nothing."""
        for name in list(self._trackers):
            self._guarded(name, lambda tracker: tracker.close())
            del self._trackers[name]

    def _guarded(self, name: str, action: Callable[[Tracker], None]) -> None:
        try:
            action(self._trackers[name])
        except EtudeError:
            raise
        except Exception as error:  # logging must not end a run
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("logger '%s' failed and may miss steps from here on: %s", name, one_line(error))


@TRACKERS.register("console")
def _console(run_dir: Path, experiment: str, resume_step: int) -> None:
    """No tracker: the display shows the run."""
    return


@TRACKERS.register("jsonl")
class JsonlTracker:
    """`metrics.jsonl`: one object a step, flushed line by line; numbers that are not finite are null."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int, name: str = METRICS_FILE) -> None:
        self._path = run_dir / name
        if self._path.exists() and resume_step > 0:
            _drop_steps_after(self._path, resume_step)
        elif self._path.exists():
            _move_aside(self._path)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise self._failure(error) from error

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Appends one line.

        Raises:
            EtudeError: the line cannot be written; names the file.
        """
        line = memoryview(json_line({"step": step} | dict(metrics)))
        try:
            while line:  # an unbuffered write may be partial
                line = line[self._file.write(line) :]
        except (OSError, ValueError) as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _failure(self, error: Exception) -> EtudeError:
        return EtudeError(f"cannot write {self._path}: {one_line(error)}; check folder and disk space")


def _drop_steps_after(path: Path, step: int) -> None:
    """Rewrites the file without the lines of later steps and without a line that a kill cut short."""
    with write_atomically(path) as kept:
        for line, record in read_steps(path):
            if record is not None and record["step"] <= step:
                kept.write(line)


def _move_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    try:
        os.replace(path, aside)
    except OSError as error:
        raise EtudeError(f"cannot move {path} of an earlier run to {aside.name}: {one_line(error)}") from error


@TRACKERS.register("tensorboard")
class TensorboardTracker:
    """TensorBoard event files in `{run_dir}/tensorboard`; steps repeated after a resume replace their first versions."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge_step = resume_step + 1 if resume_step > 0 else 0
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the scalars of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


@TRACKERS.register("wandb")
class WandbTracker:
    """Weights & Biases; the project is the name of the folder above the run's. A resumed run continues its W&B run."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int) -> None:
        wandb = _extra("wandb")
        id_file = run_dir / "wandb_run_id.txt"
        known = _read_id(id_file) if resume_step > 0 else None
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run_dir.resolve().parent.name, name=experiment, dir=str(run_dir), id=known, resume="allow"
        )
        id_file.write_text(self._run.id, encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the scalars of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Uploads what is pending."""
        self._run.finish()


@TRACKERS.register("mlflow")
class MlflowTracker:
    """MLflow at `MLFLOW_TRACKING_URI`; `@` in a name becomes `_at_`. A resumed run continues its MLflow run."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int) -> None:
        client_class = _extra("mlflow").tracking.MlflowClient
        id_file = run_dir / "mlflow_run_id.txt"
        self._client = client_class()
        self._run_id = _read_id(id_file) if resume_step > 0 else None
        if self._run_id is None:
            project = run_dir.resolve().parent.name
            found = self._client.get_experiment_by_name(project)
            experiment_id = found.experiment_id if found else self._client.create_experiment(project)
            self._run_id = self._client.create_run(experiment_id, run_name=experiment).info.run_id
        run_dir.mkdir(parents=True, exist_ok=True)
        id_file.write_text(self._run_id, encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the scalars of one step."""
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name.replace("@", "_at_"), value, step=step)

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run_id)


def _extra(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtraError(f"trainer.logger={package}", package) from error


def _read_id(path: Path) -> str | None:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None
