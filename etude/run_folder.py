"""The files in a run's folder: their names, functions to read them, `run.json`, which says how the run ended, the lock, and
the redaction of secrets in what is recorded.

Invariant: reading needs no trainer, and a line truncated by a kill is skipped. `run.json` exists from the start with
`ended: null`, so that a killed run can be distinguished from a complete one. `etude.dumps` reads and writes rollouts; the
trainer's tracking writes the metrics, `etude.trainer.resume` the configuration.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import platform
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import yaml

from etude.errors import ConfigError, DataError, one_line
from etude.jsonl import write_json

logger = logging.getLogger(__name__)

_SCATTER = 1.5  # standard errors of the difference of two means of steps
METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
RUN_FILE = "run.json"
LOCK_FILE = ".lock"
LATEST = "latest_checkpointed_iteration.txt"
_PACKAGES = ("etude", "torch", "transformers", "vllm", "sglang")
_COSTS = {  # metric of a step: what it counts towards
    "perf/time_per_step": "seconds",
    "timing_s/testing": "seconds",
    "perf/cpu_seconds": "cpu_seconds",
    "perf/gpu_seconds": "gpu_seconds",
    "perf/joules": "joules",
    "perf/total_num_tokens": "tokens",
}
_JUDGE_COSTS = ("requests", "prompt_tokens", "completion_tokens", "cost")
_MAX_RECORD_BYTES = 4 * 2**20
_MAX_CONFIG_BYTES = 2**20
STOPPED = "stopped"  # begins `ended` of a run that was told to stop
CHANGED = "changed_at"  # in `run.json`: the step after which what rewards depend on last changed, and
VALIDATION_CHANGED = "validation_changed_at"  # likewise for validations
RECONFIGURED = "reconfigured"  # each `step` after which a resumed run had other `keys`
COMPLETED = "completed"  # `ended` in `run.json`; null while the run is active, or after it was killed
_SUCCESS = {  # whether it is measured after the step's update, and what says since when it is the same measure
    "val/reward/success/mean": (1, VALIDATION_CHANGED),
    "reward/success/mean": (0, CHANGED),
}


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Reads the records of a metrics file, one per step, ascending; lines of a step are merged, truncated lines skipped.

    Raises:
        DataError: the file cannot be read.
    """
    steps: dict[int, dict[str, Any]] = {}
    try:
        for _, record in read_steps(Path(path)):
            if record is not None:
                steps.setdefault(record["step"], {}).update(record)
    except OSError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    return [steps[step] for step in sorted(steps)]


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run's steps so far (see `read_metrics`); empty without a metrics file."""
    path = run_dir / METRICS_FILE
    return read_metrics(path) if path.is_file() else []


def list_checkpoints(run_dir: Path) -> list[int]:
    """The steps of which a run has a checkpoint, ascending."""
    numbers = (each.parent.name.removeprefix("global_step_") for each in run_dir.glob("global_step_*/trainer.json"))
    return sorted(int(number) for number in numbers if number.isdecimal() and str(int(number)) == number)


def read_steps(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields each line of a metrics file with its record; None if the line is not the record of a step."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            is_step = isinstance(record, dict) and isinstance(record.get("step"), int)
            yield line.rstrip(b"\n") + b"\n", record if is_step else None


@contextmanager
def run_record(
    run_dir: Path, facts: Mapping[str, Any] | None = None, resumed: bool = False, left: bool = True
) -> Iterator[None]:
    """Writes `run.json` when the block (the run) begins and when it ends; `facts` are recorded from the beginning. A
    `resumed` run keeps when it first `started`. One without steps `left` keeps what is recorded of those that were made:
    `facts` are of none."""
    before = read_run_record(run_dir) if resumed else {}
    if before and not left:
        if before.get("ended") == COMPLETED:
            yield
            return
        record = before | {key: (facts or {}).get(key) for key in ("total_steps", "process")} | {"ended": None}
    else:
        record = {**(facts or {}), "versions": versions(), "hardware": hardware(), "ended": None}
        if first := before.get("started"):
            record |= {"started": first, "resumed": record["started"]}
    write_json(run_dir / RUN_FILE, record)

    def end(how: str) -> None:
        metrics = run_dir / METRICS_FILE
        totals = run_totals(read_metrics(metrics)) if metrics.is_file() else {}
        write_json(run_dir / RUN_FILE, record | {"ended": how, "ended_at": utc_now(), "totals": totals})

    try:
        yield
    except KeyboardInterrupt:
        end(STOPPED)
        raise
    except BaseException as error:
        end(one_line(error))
        raise
    end(COMPLETED)


_HELD_LOCKS = set[tuple[int, int]]()  # (device, inode) of the lock files that this process has locked


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Locks `folder` for this process while the block runs; the system releases the lock however the process ends.

    A POSIX record lock: unlike a `flock` lock, it is not inherited by tool servers and sandboxes that outlive a killed run.

    Raises:
        ConfigError: another process is training into this folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise ConfigError(f"cannot write to trainer.default_local_dir={folder}: {one_line(error)}") from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise _busy(folder) from None
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked against a second process: %s", folder, one_line(error))
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        status = os.fstat(file.fileno())
        _HELD_LOCKS.add((status.st_dev, status.st_ino))
        try:
            yield
        finally:
            _HELD_LOCKS.discard((status.st_dev, status.st_ino))


def _busy(folder: Path) -> ConfigError:
    holder = (folder / LOCK_FILE).read_text(errors="replace")[:100].strip() or "another process"
    return ConfigError(f"{holder} is training into {folder}: wait for it, or set trainer.default_local_dir")


def check_unlocked(folder: Path) -> None:
    """Raises ConfigError if a process is training into `folder` now: at once, before what a run takes seconds to import."""
    if is_locked(folder):
        raise _busy(folder)


def is_locked(folder: Path, *, elsewhere: bool = False) -> bool:
    """Whether a process is training into `folder` now; `elsewhere`: another one than this. Queries the lock without taking
    it; a process id would not do, because two containers may share one."""
    path = folder / LOCK_FILE
    layout, kind = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi4x", 0)  # of the C struct, and its `l_type`
    fields = [0] * 5  # the whole file, from its start
    fields[kind] = fcntl.F_WRLCK
    flock = struct.pack(layout, *fields)
    try:
        status = path.stat()
        if (status.st_dev, status.st_ino) in _HELD_LOCKS:
            return not elsewhere  # opening and closing our own lock file would release the lock
        with path.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, flock)
    except OSError:  # no lock, or a file system without locks
        return False
    return bool(struct.unpack(layout, answer)[kind] != fcntl.F_UNLCK)


def run_totals(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sums what the steps of a run used, over all its restarts: `steps`, `hours`, `cpu_hours`, `gpu_hours`, `joules`,
    `tokens`, `tool_calls`, and, with judges, `judge_requests`, `judge_prompt_tokens`, `judge_completion_tokens`,
    `judge_cost`. Excludes steps that were killed before they finished, and what was not measured."""
    records = list(records)
    sums = {"steps": float(sum(record.get("step") != 0 for record in records))}
    for name, value in _sum_costs(records).items():
        hours = name.endswith("seconds")
        sums[name.replace("seconds", "hours")] = round(value / 3600 if hours else value, 6)
    return sums


def since_change(
    records: Sequence[Mapping[str, Any]], record: Mapping[str, Any], name: str = CHANGED
) -> list[Mapping[str, Any]]:
    """The steps of a run with this `run.json` that can be compared with its last one: those after files or keys changed that
    rewards depend on, or with `name=VALIDATION_CHANGED` validations; all, if there are none after it."""
    changed = record.get(name, 0)
    after = [each for each in records if not changed or each["step"] > changed]
    return after or list(records)


def reward_trend(records: Iterable[Mapping[str, Any]]) -> tuple[bool, float, float, int, int] | None:
    """Whether a run's mean reward rose by a twentieth of its largest or more, and by more than its steps scatter; its means
    over the first and the last half of the steps, and the numbers of both; None for fewer than six steps. The first three
    steps take the first half's place where the reward rose from them alone: early, and fell no more since."""
    steps = [each for each in records if each.get("step", 0) > 0]
    rewards = [float(each["reward/total/mean"]) for each in steps if isinstance(each.get("reward/total/mean"), float)]
    if (half := len(rewards) // 2) < 3:
        return None
    halves = rewards[:half], rewards[-half:]
    first, last = map(fmean, halves)
    clear, noise = 0.05 * max(map(abs, rewards)), variance(halves[1])
    clear = max(clear, _SCATTER * math.sqrt(sum(variance(each) for each in halves) / half))
    if (rose := last - first > clear) or half < 6 or first - last > clear:
        return rose, first, last, half, half
    early = fmean(rewards[:3])
    if last - early > max(clear, 2 * _SCATTER * math.sqrt(noise / 3 + noise / half)):
        return True, early, last, 3, half
    return False, first, last, half, half


def tell_trend(rose: bool, first: float, last: float, firsts: int, lasts: int) -> str:
    """A `reward_trend` in words."""
    how = "rose" if rose else "did not rise clearly" if last > first else "did not rise"
    return f"the reward {how}: {first:.3g} in the first {firsts} steps, {last:.3g} in the last {lasts}"


def chooses_rows(config: Mapping[str, Any]) -> bool:
    """Whether the run of this configuration chooses rows by their success so far: rewards of its steps are then no curve,
    since a model that learns is given harder rows."""
    sampler = (config.get("data") or {}).get("sampler") or {}
    return bool(sampler.get("class_name") == "curriculum")


def role_rewards(record: Mapping[str, Any]) -> dict[str, float]:
    """The mean reward of each role in a step, where they differ: `reward/…` is then that of the last speaker's alone."""
    ends = "/score/mean"
    found = {
        name[5 : -len(ends)]: each for name, each in record.items() if name.startswith("role/") and name.endswith(ends)
    }
    return found if len(set(found.values())) > 1 else {}


def always_paid(records: Iterable[Mapping[str, Any]]) -> tuple[int, float] | None:
    """The first training step of `records`, and what every answer of all of them earned, if that is one number above 0."""
    steps = [each for each in records if each.get("step", 0) > 0]
    earned = {each.get(f"critic/score/{end}") for each in steps for end in ("min", "max")}
    paid = earned.pop() if len(earned) == 1 else None
    return (steps[0]["step"], float(paid)) if isinstance(paid, int | float) and 0 < paid < math.inf else None


def unit_costs(
    records: Sequence[Mapping[str, Any]], record: Mapping[str, Any] | None = None
) -> dict[str, dict[str, float]]:
    """Divides what a run used, in seconds, joules, tokens and money, by `step`, and by `point of success`: a hundredth
    of success that it gained from its first validation of all answers to its last, or, with less than two, from its first
    training step to its last; absent if it gained none. With the run's `record`: since the measure last changed."""
    units = {}
    if steps := sum(each.get("step") != 0 for each in records):
        units["step"] = (records, float(steps))
    for name, (after, change) in _SUCCESS.items():
        same = since_change(records, record or {}, change)
        lost = "val/rollout/dropped" if after else ""  # what is left of such a validation are other questions
        measured = [i for i, each in enumerate(same) if isinstance(each.get(name), (int, float)) and not each.get(lost)]
        if len(measured) > 1:
            first, last = measured[0], measured[-1]
            if (points := 100 * (same[last][name] - same[first][name])) > 0:
                units["point of success"] = (same[first + after : last + after], points)
            break
    return {
        unit: {name: value / number for name, value in _sum_costs(spent).items()}
        for unit, (spent, number) in units.items()
    }


def _sum_costs(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, (int, float)) and (cost := cost_of(name)) is not None:
                sums[cost] = sums.get(cost, 0.0) + value
    return sums


def cost_of(name: str) -> str | None:
    """What a metric counts towards."""
    if name.startswith("tool/") and name.endswith("/calls") and "/metrics/" not in name:
        return "tool_calls"
    what = name.rpartition("reward/judge/")[2]
    return f"judge_{what}" if what in _JUDGE_COSTS and "reward/judge/" in name else _COSTS.get(name)


def utc_now() -> str:
    """The current time in UTC, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> str:
    """Versions of Python and of the packages that results depend on: `python 3.11.7, torch 2.13.0, …`."""
    parts = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(parts)


def hardware() -> str:
    """Processor, cores, and GPUs that torch sees."""
    import torch

    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).is_file():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join([f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads", *gpus])


def read_run_record(run_dir: Path) -> dict[str, Any]:
    """Reads `run.json`: `versions`, `hardware`, `ended` and the facts of `etude.trainer.run_facts`, with secrets redacted;
    empty if the file is missing, unreadable or larger than 4 MiB."""
    try:
        with (run_dir / RUN_FILE).open("rb") as file:
            record = json.loads(file.read(_MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    kept: dict[str, Any] = redact(record)
    if isinstance(command := record.get("command"), list):
        kept["command"] = redact_arguments([str(each) for each in command])
    return kept


def read_config(folder: Path | str) -> dict[str, Any]:
    """Reads the resolved configuration of a run, with secrets redacted.

    Raises:
        DataError: it is missing, malformed or larger than 1 MiB.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise DataError(f"{path} is larger than {_MAX_CONFIG_BYTES // 2**20} MiB")
        values = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"cannot read {path}: {one_line(error, 120)}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected a mapping, found {type(values).__name__}")
    kept: dict[str, Any] = redact(values)
    return kept


REDACTED = "<redacted>"
"""What stands for a secret. Too much is redacted rather than too little; declared keys and names of environment variables
are kept."""
_SECRET = re.compile(
    r"(?:(?:[_-]|api|access|secret|private|signing)key|token|secret|password|passwd|passphrase|pwd|credentials?|authorization|cookie|bearer)$",
    re.IGNORECASE,
)
_COLUMNS = ("prompt_key", "image_key")  # declared keys: their values name columns
_URL_USER = re.compile(r"(?<=://)[^/\s?#]+(?=@)")
_QUERY = re.compile(
    r"([?&][^=&#\s]*(?:key|token|secret|pass|pwd|sig|auth|cred|session|code)[^=&#\s]*=)[^&#\s]+", re.IGNORECASE
)
_BEARER = re.compile(r"(\bBearer\s+)\S{8,}")
_OPTION = re.compile(r"((?:^|\s)--?[\w-]*(?:key|token|secret|password|passwd|pwd)[= ])\S+", re.IGNORECASE)
_BRACES = re.compile(r"key|token|secret|passw|env_vars", re.IGNORECASE)


def redact(value: Any, name: str = "") -> Any:
    """Replaces secrets in `value`: strings whose key ends in `_key`, `-key`, `apiKey` or the like, `token`, `secret` or
    `password`; everything under `env_vars`; the user part of URLs; query parameters with such names (also plain `key`); and
    values of such `--option`s. A key that is just `key`, or another word with that ending (`monkey`), is not redacted."""
    if isinstance(value, Mapping):
        inside = name if name == "env_vars" else ""
        return {key: redact(item, inside or str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        after = ["", *(each if _is_option(each) else "" for each in value)]
        return [redact(item, option or name) for option, item in zip(after, value)]
    if not isinstance(value, str) or not value:
        return value
    if name == "env_vars" or (_SECRET.search(name) and name not in _COLUMNS):
        return REDACTED
    for pattern, kept in ((_URL_USER, ""), (_QUERY, r"\1"), (_BEARER, r"\1"), (_OPTION, r"\1")):
        value = pattern.sub(f"{kept}{REDACTED}", value)
    return value


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Redacts the arguments of a command, including `key=value` ones; a nested value (in braces) with a secret key is
    replaced as a whole."""
    redacted, option = [], ""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and "://" not in key:
            nested = re.search(r"\{|env_vars", argument) and _BRACES.search(argument)
            kept = REDACTED if nested else redact(value, key.rpartition(".")[2])
            redacted.append(f"{key}={kept}")
        else:
            redacted.append(redact(argument, option))
        option = argument if _is_option(argument) else ""
    return redacted


def _is_option(argument: object) -> bool:
    """Whether `argument` is an option whose value is the next argument."""
    return isinstance(argument, str) and argument.startswith("-") and "=" not in argument
