"""`reproduce`: runs the configuration of an earlier run again in a new folder, and compares the metrics of both.

Invariant: the original run's folder is only read. Changes since then (code, packages, machine, files) are reported before
anything runs; metrics of time and of the machine are not compared.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import etude
from etude.config import compose_with_sources, quoted
from etude.errors import CheckpointError, ConfigError, raise_faults
from etude.options import Options, SFTOptions, TrainOptions, declarations
from etude.options.validate import flatten
from etude.run_folder import (
    CONFIG_FILE,
    METRICS_FILE,
    RECONFIGURED,
    REDACTED,
    RUN_FILE,
    hardware,
    list_checkpoints,
    read_config,
    read_metrics,
    read_run_record,
    versions,
)
from etude.trainer.events import Event, EventSink, Notice, StepFinished
from etude.trainer.interrupts import Interrupted
from etude.trainer.run import fine_tune, train
from etude.trainer.run_facts import digest_path, git_state
from etude.trainer.verify import use_threads_of

_OF_TIME = ("timing_s/", "timing_per_token_ms/", "perf/")
_TIMED = ("latency", "seconds", "_per_s", "throughput")


@dataclass(frozen=True)
class Reproduction:
    """`steps`: number of steps that both runs have; `differences` between their metrics: (step, name, then, now)."""

    steps: int
    differences: tuple[tuple[int, str, Any, Any], ...]


def reproduce(
    run_dir: Path,
    target: Path,
    overrides: Sequence[str] = (),
    *,
    steps: int | None = None,
    from_step: int | None = None,
    emit: EventSink,
    note: Callable[[str], None],
) -> Reproduction:
    """Runs the configuration of `run_dir` again in `target`, at most its first `steps` steps; the configured length, and so
    every schedule, stays the same. `note` is called with one line per change since then.

    Args:
        from_step: begins after this step, from the run's own checkpoint; `steps` counts from there.

    Raises:
        ConfigError: `run_dir` has no configuration, or secrets are missing from `overrides`, or `target` is in `run_dir`.
        CheckpointError: the run has no checkpoint of `from_step`; names those that it has.
        EtudeError: the run failed.
    """
    target, run_dir, record = target.resolve(), run_dir.resolve(), read_run_record(run_dir)
    kind = record.get("kind", "train")
    if kind not in ("train", "sft"):
        raise ConfigError(f"{run_dir}: a run of kind {kind!r} cannot be reproduced, only train and sft")
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} has no {CONFIG_FILE}: it is no run's folder")
    if target == run_dir or run_dir in target.parents:
        raise ConfigError(f"{target} is in the run's own folder: give another --output")
    if from_step is not None:
        if (target / RUN_FILE).exists():
            raise ConfigError(f"{target} holds a run", fix="give another --output")
        checkpoint = _checkpoint_of(run_dir, from_step)
        overrides = [f"trainer.resume_from_path={quoted(checkpoint)}", "trainer.resume_mode=resume_path", *overrides]
        steps = None if steps is None else from_step + steps
    use_threads_of(run_dir)  # otherwise the machine would differ
    for line in describe_changes(record):
        note(line)
    folder = Path(str(record.get("working_folder") or "."))
    if folder.is_dir():
        os.chdir(folder)  # paths in the configuration are relative to it
    config = _config(kind, run_dir, target, overrides)
    sink = emit if steps is None else _stop_after(steps, emit)
    try:
        (train if kind == "train" else fine_tune)(config, sink)
    except Interrupted:
        if steps is None:
            raise
    return compare_metrics(read_metrics(run_dir / METRICS_FILE), read_metrics(target / METRICS_FILE), steps)


def _checkpoint_of(run_dir: Path, step: int) -> Path:
    found = run_dir / f"global_step_{step}"
    if not (found / "trainer.json").is_file():
        kept = list_checkpoints(run_dir)
        known = f"it has those of {', '.join(map(str, kept))}" if kept else "it has none"
        raise CheckpointError(
            f"{run_dir} has no checkpoint of step {step}", fix=f"{known}; trainer.save_freq makes more"
        )
    return found


def describe_changes(record: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each change since the run started: code, packages, machine, and files."""
    if not record.get("code"):
        yield "the run has no record of its code and files: only its configuration is known"
        return
    code = record["code"]
    if code.get("version") != etude.__version__:
        yield f"etude {etude.__version__}, then {code.get('version')}"
    now = {"etude": git_state(Path(etude.__file__).parent, "__init__.py"), "project": git_state(Path.cwd())}
    for name, state in now.items():
        then = code.get(name)
        if then is not None and then != state:
            yield f"code of {name}: {_code(state)}, then {_code(then)}"
    for name, found in (("versions", versions()), ("hardware", hardware())):
        if record.get(name) != found:
            yield f"{name}: {found}; then {record.get(name)}"
    for each in record.get(RECONFIGURED, ()):
        yield f"resumed after step {each['step']} with other {', '.join(each['keys'])}: the steps before had not these"
    working = Path(str(record.get("working_folder") or "."))
    for name, then in record.get("files", {}).items():
        if then.get("sha256") is not None and digest_path(working / name)["sha256"] != then["sha256"]:
            yield f"{then.get('key')}: {name} is {'not what it was' if (working / name).exists() else 'gone'}"


def _code(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "no git checkout"
    changes = f" with changes ({state.get('changes_sha256')})" if state.get("dirty") else ""
    return f"commit {str(state.get('commit'))[:12]}{changes}"


def _config(kind: str, run_dir: Path, target: Path, overrides: Sequence[str]) -> Options:
    """Returns the run's configuration with its output paths moved from `run_dir` to `target`."""
    tree, root = (TrainOptions, "ppo_trainer") if kind == "train" else (SFTOptions, "sft")
    held = dict(flatten(read_config(run_dir)))
    given = {each.partition("=")[0].lstrip("+~") for each in overrides}
    secret = [key for key, value in held.items() if REDACTED in str(value) and key not in given]
    if secret:
        raise ConfigError(f"{run_dir} keeps no secrets: give {', '.join(f'{key}=…' for key in secret)} again")
    moved = [f"trainer.default_local_dir={quoted(target)}"]
    for key, declared in declarations(tree).items():
        path = held.get(key)
        if declared.about.path == "output" and isinstance(path, str) and key != "trainer.default_local_dir":
            moved.append(f"{key}={quoted(target / Path(path).name)}")
    found = compose_with_sources(
        "config", [*moved, *overrides], run_dir, root=root, command="train" if kind == "train" else "sft", collect=True
    )
    raise_faults(found.faults)
    return found.options  # remarks are dropped: a resolved configuration sets every key, so each would get one


def _stop_after(steps: int, emit: EventSink) -> EventSink:
    """Wraps `emit`: raises SIGTERM after step `steps`, on which the run stops; of that nothing is said."""
    stopping = False

    def sink(event: Event) -> None:
        nonlocal stopping
        if not (stopping and isinstance(event, Notice)):
            emit(event)
        if isinstance(event, StepFinished) and event.step == steps < event.total_steps:
            stopping = True
            signal.raise_signal(signal.SIGTERM)

    return sink


def compare_metrics(
    then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], steps: int | None = None
) -> Reproduction:
    """Compares two runs' metrics step by step and bit for bit; metrics of time and of the machine are left out."""
    before, after = ({record["step"]: record for record in records} for records in (then, now))
    common = [step for step in before if step in after and (steps is None or step <= steps)]
    found = []
    for step in common:
        for name in dict.fromkeys([*before[step], *after[step]]):
            pair = before[step].get(name), after[step].get(name)
            timed = name.startswith(_OF_TIME) or any(part in name for part in _TIMED)
            if pair[0] != pair[1] and not timed:
                found.append((step, name, *pair))
    return Reproduction(sum(step > 0 for step in common), tuple(found))
