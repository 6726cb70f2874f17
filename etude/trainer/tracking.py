"""`Tracking`: writes a step's metrics to every tracker in `trainer.logger`.

Invariant: `metrics.jsonl` holds each step's line once, in order, and survives a kill. On resume, lines after the
checkpoint's step are dropped, because those steps run again; a fresh start renames an earlier file. Nothing else is removed.

Every other tracker runs in its own thread, fed by a bounded queue: if it raises, hangs or falls behind, it warns once and
may miss steps, and training goes on. Console output belongs to the display; `metrics` computes the numbers.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from etude.errors import ConfigError, DataError, EtudeError, MissingExtraError, one_line
from etude.jsonl import json_line, write_atomically
from etude.options import RunOptions
from etude.options.validate import flatten
from etude.registry import Registry
from etude.run_folder import METRICS_FILE, read_config, read_steps
from etude.scratch import free_path

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A destination for scalars."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the scalars of one step."""

    def close(self) -> None:
        """Flushes and closes."""


TrackerFactory = Callable[[Path, str, int], "Tracker | None"]  # (run folder, experiment, step resumed from)
TRACKERS: Registry[TrackerFactory] = Registry("trainer.logger")

_MAX_QUEUED = 256  # steps that a tracker may lag
_START_SECONDS = 120.0
_CLOSE_SECONDS = 60.0
_Call = Callable[["Tracker"], None]


class Tracking:
    """The trackers of one run.

    Args:
        logger: names registered in `TRACKERS`.
        run_dir: the run's folder, created if absent.
        experiment: the run's name in trackers that have one.
        resume_step: the step of the run's own checkpoint resumed from; 0: nothing that is there is of this run.

    Raises:
        ConfigError: a name is unknown (the message suggests the nearest), or a tracker cannot start.
        MissingExtraError: a tracker's package is not installed.
        EtudeError: the metrics file cannot be written.
    """

    def __init__(self, logger: Sequence[str], run_dir: Path | str, experiment: str, resume_step: int = 0) -> None:
        names = [logger] if isinstance(logger, str) else list(dict.fromkeys(logger))
        factories = {TRACKERS.get(name): name for name in names}  # one tracker each, even if named by two aliases
        self._trackers: dict[str, Tracker] = {}
        for factory, name in factories.items():
            try:
                if factory is JsonlTracker:
                    self._trackers[name] = JsonlTracker(Path(run_dir), experiment, resume_step)
                elif factory is not _console:
                    self._trackers[name] = _ThreadedTracker(
                        name, partial(factory, Path(run_dir), experiment, resume_step)
                    )
            except EtudeError:
                self.close()
                raise
            except Exception as error:  # raised by the tracker's package: shown to the user
                self.close()
                reason = f"{type(error).__name__}: {one_line(error)}"
                raise ConfigError(f"trainer.logger: '{name}' cannot start: {reason}") from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records one step's scalars in every tracker.

        Raises:
            EtudeError: `metrics.jsonl` cannot be written; failures of other trackers only warn once.
        """
        for tracker in self._trackers.values():
            tracker.log(metrics, step)

    def close(self) -> None:
        """Closes every tracker; idempotent."""
        while self._trackers:
            self._trackers.popitem()[1].close()


class _ThreadedTracker:
    """Creates and calls a tracker in its own thread, so that its failures and delays do not affect the run."""

    def __init__(self, name: str, make: Callable[[], Tracker | None]) -> None:
        """Raises what `make` raises, and TimeoutError if that takes longer than two minutes."""
        self._name, self._warned = name, False
        self._calls: queue.Queue[_Call | None] = queue.Queue(_MAX_QUEUED)
        self._failure: BaseException | None = None
        started = threading.Event()

        def run() -> None:
            try:
                tracker = make()
            except BaseException as error:
                self._failure = error
                return
            finally:
                started.set()
            while (call := self._calls.get()) is not None:
                if tracker is not None:
                    self._guard(call, tracker)

        self._thread = threading.Thread(target=run, name=f"etude-tracker-{name}", daemon=True)
        self._thread.start()
        if not started.wait(_START_SECONDS):
            raise TimeoutError(f"no answer within {_START_SECONDS:.0f} s")
        if self._failure is not None:
            raise self._failure

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queues the scalars; never blocks."""
        held = dict(metrics)
        try:
            self._calls.put_nowait(lambda tracker: tracker.log(held, step))
        except queue.Full:
            self._warn(f"it is {_MAX_QUEUED} steps behind")

    def close(self) -> None:
        """Waits, up to a minute, until the queue is written."""
        try:
            for last in (lambda tracker: tracker.close(), None):
                self._calls.put(last, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._warn(f"it did not finish within {_CLOSE_SECONDS:.0f} s")

    def _guard(self, call: _Call, tracker: Tracker) -> None:
        try:
            call(tracker)
        except Exception as error:  # logging must not end a run
            self._warn(one_line(error))

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("logger '%s' failed and may miss steps from here on: %s", self._name, why)


@TRACKERS.register("console")
def _console(run_dir: Path, experiment: str, resume_step: int) -> None:
    """Does nothing: the display shows the run."""
    return


@TRACKERS.register("jsonl")
class JsonlTracker:
    """`metrics.jsonl`: one object per step, written line by line without buffering; non-finite numbers are null."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int, name: str = METRICS_FILE) -> None:
        self._path = run_dir / name
        if self._path.exists() and resume_step > 0:  # without lines of later steps and a truncated last line
            with write_atomically(self._path) as kept:
                for line, record in read_steps(self._path):
                    if record is not None and record["step"] <= resume_step:
                        kept.write(line)
        elif self._path.exists():
            aside = free_path(self._path)
            try:
                os.replace(self._path, aside)
            except OSError as error:
                what = f"{self._path} of an earlier run to {aside.name}"
                raise EtudeError(f"cannot move {what}: {one_line(error)}") from error
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

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
            raise _cannot_write(self._path, error) from error

    def close(self) -> None:
        self._file.close()


def _cannot_write(path: Path, error: Exception) -> EtudeError:
    return EtudeError(f"cannot write {path}: {one_line(error)}; check folder and disk space")


TRACKERS.register("file")(JsonlTracker)  # verl's name


def starting_over(run_dir: Path, run: RunOptions) -> str | None:
    """Says that the steps of an earlier run in `run_dir` will be made again, of which no checkpoint is resumed."""
    path = run_dir / METRICS_FILE
    records = [record for _, record in read_steps(path)] if path.exists() else []
    steps = len({record["step"] for record in records if record is not None and record["step"] > 0})
    if not steps:
        return None
    return (
        f"starting over: {run_dir} has {steps} steps of an earlier run, of which no checkpoint is resumed "
        f"(trainer.save_freq={run.save_freq}, resume_mode={run.resume_mode}); its files are kept as {free_path(path).name} …"
    )


@TRACKERS.register("tensorboard")
class TensorboardTracker:
    """TensorBoard event files in `{run_dir}/tensorboard`; steps repeated after a resume replace their first versions, and a
    run that starts over hides an earlier one's.

    Records are written here, because the thread of TensorBoard's own writer prints a traceback when a disk is full."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # slow to import
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = run_dir / "tensorboard" / name
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(self._path.open("wb"))
            self._write(file_version="brain.Event:2")
            first = resume_step + 1 if resume_step > 0 else 0  # what is there of this step and later ones is hidden
            self._write(step=first, session_log=SessionLog(status=SessionLog.START))
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def _write(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **event).SerializeToString())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes the scalars of one step.

        Raises:
            EtudeError: they cannot be written; names the file.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        try:
            self._write(step=step, summary=Summary(value=values))
            self._records.flush()
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self) -> None:
        try:
            self._records.close()
        except OSError as error:
            raise _cannot_write(self._path, error) from error


class _RunTracker:
    """A tracker whose package logs a whole step at once."""

    _run: Any

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@TRACKERS.register("wandb")
class WandbTracker(_RunTracker):
    """Weights & Biases; the project is the name of the folder above the run's. A resumed run continues its W&B run."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int) -> None:
        wandb = _extra("wandb")
        id_file, known = _open_id(run_dir / "wandb_run_id.txt", resume_step)
        self._run = wandb.init(
            project=_project(run_dir),
            name=experiment,
            dir=str(run_dir),
            id=known,
            resume="allow",
            config=_config(run_dir),
        )
        id_file.write_text(self._run.id, encoding="utf-8")


@TRACKERS.register("mlflow")
class MlflowTracker:
    """MLflow at `MLFLOW_TRACKING_URI`; `@` in a name becomes `_at_`, what MLflow refuses `_`, and a name below another joins
    it (`mean@1/ci95_low`: `mean_at_1_ci95_low`). A resumed run continues its MLflow run."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int) -> None:
        client_class = _extra("mlflow").tracking.MlflowClient
        id_file, self._run_id = _open_id(run_dir / "mlflow_run_id.txt", resume_step)
        self._client = client_class()
        if self._run_id is None:
            project = _project(run_dir)
            found = self._client.get_experiment_by_name(project)
            experiment_id = found.experiment_id if found else self._client.create_experiment(project)
            self._run_id = self._client.create_run(experiment_id, run_name=experiment).info.run_id
        id_file.write_text(self._run_id, encoding="utf-8")
        for key, value in dict(flatten(_config(run_dir))).items() if resume_step == 0 else ():
            self._client.log_param(self._run_id, key, str(value)[:500])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            # A file store keeps a metric in a file of its name: none can lie below it.
            path = "".join("_" if char == "/" and name[:i] in metrics else char for i, char in enumerate(name))
            allowed = re.sub(r"[^/\w.\- :]", "_", path.replace("@", "_at_"))
            parts = [part if part.strip(".") else "_" for part in allowed.split("/")]  # not as of `ws://host`
            self._client.log_metric(self._run_id, "/".join(parts), value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


@TRACKERS.register("swanlab")
class SwanlabTracker(_RunTracker):
    """SwanLab, in the mode `SWANLAB_MODE` (cloud, local, offline); files are in `{run_dir}/swanlog` unless `SWANLAB_LOG_DIR`
    is set. A resumed run continues its SwanLab run only in cloud mode."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int) -> None:
        swanlab = self._run = _extra("swanlab")
        id_file, known = _open_id(run_dir / "swanlab_run_id.txt", resume_step)
        mode = os.environ.get("SWANLAB_MODE", "cloud")
        resumed = {"id": known, "resume": "allow"} if known and mode == "cloud" else {}
        run = swanlab.init(
            project=_project(run_dir),
            experiment_name=experiment,
            config=_config(run_dir),
            logdir=os.environ.get("SWANLAB_LOG_DIR", str(run_dir / "swanlog")),
            mode=mode,
            **resumed,
        )
        id_file.write_text(str(getattr(run, "id", None) or getattr(run.public, "run_id", "")), encoding="utf-8")


@TRACKERS.register("trackio")
class TrackioTracker(_RunTracker):
    """Trackio: a local database (`TRACKIO_DIR`), or with `TRACKIO_SPACE_ID` a dashboard on a hub. A resumed run continues
    the Trackio run of the same name."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int) -> None:
        trackio = _extra("trackio")
        # Trackio uses names as folders.
        self._run = trackio.init(
            project=_project(run_dir),
            name=experiment.replace("/", "-"),
            config=_config(run_dir),
            resume="allow" if resume_step > 0 else "never",
        )


@TRACKERS.register("clearml")
class ClearmlTracker:
    """ClearML; with `CLEARML_OFFLINE_MODE=1` a local session. A resumed run continues its task."""

    def __init__(self, run_dir: Path, experiment: str, resume_step: int) -> None:
        task = _extra("clearml").Task
        id_file, known = _open_id(run_dir / "clearml_task_id.txt", resume_step)
        self._task = task.init(
            project_name=_project(run_dir),
            task_name=experiment,
            reuse_last_task_id=False,
            continue_last_task=known or False,
            auto_connect_frameworks=False,
            auto_connect_arg_parser=False,
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        self._task.connect_configuration(_config(run_dir), name="configuration")
        id_file.write_text(self._task.id, encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            title, _, series = name.rpartition("/")
            self._task.get_logger().report_scalar(title or name, series, value, step)

    def close(self) -> None:
        self._task.close()


def _project(run_dir: Path) -> str:
    """Returns the name of the run folder's parent."""
    return run_dir.resolve().parent.name


def _config(run_dir: Path) -> dict[str, Any]:
    """Returns the run's configuration, without secrets; empty if it was not written."""
    try:
        return read_config(run_dir)
    except DataError:
        return {}


def _extra(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtraError(f"trainer.logger={package}", package) from error


def _open_id(path: Path, resume_step: int) -> tuple[Path, str | None]:
    """Returns the file for the tracker's run id (its folder is created) and, for a resumed run, the id stored there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path, path.read_text(encoding="utf-8").strip() if resume_step > 0 and path.is_file() else None
