"""Resuming: which checkpoint to resume from, and which configuration keys may have changed since.

Invariant: every key whose value differs from the checkpoint's is honoured and logged, refused, or logged as having no
effect; `RULES` says which, and a key without a rule is honoured. This is checked before a model is loaded. The run's
`config.yaml` holds the values in use.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from etude.algorithms import ADVANTAGE_ESTIMATORS
from etude.data import ResumableLoader
from etude.errors import CheckpointError, ConfigError, one_line
from etude.jsonl import write_atomically
from etude.options import Options
from etude.options.validate import flatten, plain
from etude.run_folder import CONFIG_FILE, METRICS_FILE, read_metrics, redact
from etude.trainer.checkpoints import Checkpoints

logger = logging.getLogger(__name__)

Leaves = dict[str, Any]  # dotted key → value


class Effect(str, Enum):
    """Effect of a key that changed between a checkpoint and the run resumed from it."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NONE = "no effect"
    UNCOMPARED = "not compared"  # affects where a run is stored or how it resumes, not what it computes


@dataclass(frozen=True)
class Rule:
    """The effect of changing a key that matches `pattern`, and why. The rule applies if `when(leaves old, leaves new)`."""

    pattern: str
    effect: Effect
    why: str = ""
    when: Callable[[Leaves, Leaves], bool] = lambda old, new: True


def _stays_adaptive(old: Leaves, new: Leaves) -> bool:
    return old.get("algorithm.kl_ctrl.type") == new.get("algorithm.kl_ctrl.type") == "adaptive"


def _rank_differs(key: str) -> Callable[[Leaves, Leaves], bool]:
    return lambda old, new: (old.get(key) or 0) != (new.get(key) or 0)  # older runs do not have the key


def _has_critic(old: Leaves, new: Leaves) -> bool:
    records = (ADVANTAGE_ESTIMATORS.find(str(each.get("algorithm.adv_estimator"))) for each in (old, new))
    return all(record is not None and "values" in record.needs for record in records)


def _other_environments(old: Leaves, new: Leaves) -> bool:
    named = ("id", "name", "args", "tasks", "weight")
    one, two = ([[each.get(key) for key in named] for each in leaves.get("env") or ()] for leaves in (old, new))
    return one != two


def _has_adapters(model: str) -> Callable[[Leaves, Leaves], bool]:
    return lambda old, new: bool(old.get(f"{model}.lora_rank") and new.get(f"{model}.lora_rank"))


_LORA_RANK, _CRITICS_RANK = "actor_rollout_ref.model.lora_rank", "critic.model.lora_rank"
_ADAPTERS = {
    "lora_alpha": "what the checkpoint's adapters add was learnt at the other scale",
    "target_modules": "other adapters were trained",
    "exclude_modules": "other adapters were trained",
}
_ORDER = "the order of the rows still to come depends on it"
RULES = (
    Rule("trainer.resume_*", Effect.UNCOMPARED),
    Rule("trainer.*_dir", Effect.UNCOMPARED),
    Rule("*trace.path", Effect.UNCOMPARED),  # in the run's folder, unless it is set
    Rule("trainer.project_name", Effect.UNCOMPARED),
    Rule("trainer.experiment_name", Effect.UNCOMPARED),
    Rule("critic.model.path", Effect.NONE, "the critic's weights come from the checkpoint"),
    Rule("*model.path", Effect.REFUSED, "the checkpoint's weights were trained from the other model"),
    Rule("critic.share_trunk", Effect.REFUSED, "other weights were trained", _has_critic),
    Rule("critic.*", Effect.HONOURED, when=lambda old, new: not _has_critic(old, new)),
    Rule(_LORA_RANK, Effect.REFUSED, "other weights were trained", _rank_differs(_LORA_RANK)),
    Rule(_CRITICS_RANK, Effect.REFUSED, "other weights were trained", _rank_differs(_CRITICS_RANK)),
    *(
        Rule(f"{model}.{name}", Effect.REFUSED, why, _has_adapters(model))
        for model in ("actor_rollout_ref.model", "critic.model", "model")
        for name, why in _ADAPTERS.items()
    ),
    Rule("env", Effect.REFUSED, "the rows still to come are theirs", _other_environments),
    Rule("data.train_batch_size", Effect.REFUSED, _ORDER),
    Rule("data.shuffle", Effect.REFUSED, _ORDER),
    Rule("data.seed", Effect.REFUSED, _ORDER),
    Rule("data.sampler.*", Effect.REFUSED, _ORDER),
    Rule("*optim.name", Effect.REFUSED, "the optimizer's state is the other one's"),
    Rule("algorithm.kl_ctrl.kl_coef", Effect.NONE, "the adaptive controller continues from its own", _stays_adaptive),
    Rule("trainer.val_before_train", Effect.NONE, "the run is past its first step"),
)
"""The first matching rule applies; a key that matches none is honoured."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs."""

    key: str
    old: Any
    new: Any
    rule: Rule

    def __str__(self) -> str:
        return f"{self.key}: {_format_value(self.old)} → {_format_value(self.new)}"


@dataclass(frozen=True)
class Resumption:
    """A checkpoint to resume from, its trainer state, and the keys that changed since."""

    folder: Path
    state: dict[str, Any]
    changes: tuple[Change, ...] = ()

    def having(self, effect: Effect) -> list[Change]:
        """Returns the changes with this effect."""
        return [change for change in self.changes if change.rule.effect is effect]

    @contextmanager
    def restoring(self, loader: ResumableLoader | None = None) -> Iterator[dict[str, Any]]:
        """Restores the data loader's position and yields the trainer state; the block restores the rest.

        Raises:
            CheckpointError: the state or the stored tensors do not fit this configuration.
        """
        try:
            if loader is not None:
                loader.load_state_dict(self.state["loader"])
            yield self.state
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            advice = "set trainer.resume_mode=disable or another trainer.default_local_dir"
            raise CheckpointError(
                f"{self.folder} does not fit this configuration: {one_line(error)}; {advice}"
            ) from error

    def announce(self, run_dir: Path, total_steps: int, unvalidated: bool = False) -> str:
        """Says after which step the run in `run_dir` goes on, which of its steps it makes again, and whether the one before
        is `unvalidated`; logs the changes, one line per key."""
        step, metrics = self.state["step"], run_dir / METRICS_FILE
        if step >= total_steps and not unvalidated:
            return (
                f"{self.folder} is already at the last step, so there is nothing to do: raise "
                "trainer.total_training_steps, or set trainer.default_local_dir to start another run"
            )
        for change in self.having(Effect.HONOURED):
            logger.warning("changed since %s: %s", self.folder.name, change)
        for change in self.having(Effect.NONE):
            logger.warning("no effect on a resumed run: %s (%s)", change, change.rule.why)
        made = max((record["step"] for record in read_metrics(metrics)), default=step) if metrics.is_file() else step
        again = f"; the validation of step {step} is made now" if unvalidated else ""
        if made > step:
            again += f"; step {made} is" if made == step + 1 else f"; steps {step + 1}\N{EN DASH}{made} are"
            again += " done again"
        return f"going on after step {step} of {total_steps} ({self.folder}){again}"


def find_resumption(options: Options, checkpoints: Checkpoints, resume_from: Path | None = None) -> Resumption | None:
    """Finds the checkpoint to resume from (`resume_from`, else as `trainer.resume_mode` says) and compares it with
    `options`; None for a fresh start.

    Raises:
        CheckpointError: the folder is not a checkpoint.
        ConfigError: keys changed that a resumed run cannot honour; names all of them.
    """
    run = options.trainer
    if resume_from is None and run.resume_mode == "disable":
        return None
    given = resume_from or (run.resume_from_path if run.resume_mode == "resume_path" else None)
    folder = Path(given) if given else checkpoints.latest()
    if folder is None:
        return None
    state = Checkpoints.read_state(folder)
    found = Resumption(folder, state, tuple(compare(redact(state.get("config") or {}), plain_values(options))))
    if refused := found.having(Effect.REFUSED):
        listed = "; ".join(f"{change} ({change.rule.why})" for change in refused)
        raise ConfigError(
            f"{folder} was made with another configuration: {listed}. Undo the change, set trainer.default_local_dir for a "
            "run of its own, or trainer.resume_mode=disable to start over in this folder"
        )
    return found


def compare(stored: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Change]:
    """Yields the compared keys that differ, in the order of `current`; nothing if the checkpoint stored no configuration."""
    before, after = dict(flatten(stored)), dict(flatten(current))
    for key in dict.fromkeys([*after, *before]) if before else ():
        old, new = before.get(key), after.get(key)
        if old == new or (key.endswith(".path") and _same_file(old, new)):
            continue
        rule = next(
            (r for r in RULES if fnmatchcase(key, r.pattern) and r.when(before, after)), Rule(key, Effect.HONOURED)
        )
        if rule.effect is not Effect.UNCOMPARED:
            yield Change(key, old, new, rule)


def used_values(options: Options, resumed: Resumption | None) -> dict[str, Any]:
    """Returns the resolved configuration as checkpoints store it, with the values that a resumed run actually uses."""
    used = plain_values(options)
    for change in resumed.having(Effect.NONE) if resumed else ():
        *sections, name = change.key.split(".")
        functools.reduce(dict.__getitem__, sections, used)[name] = change.old
    return used


def write_config(run_dir: Path, used: Mapping[str, Any]) -> None:
    """Writes `config.yaml`: the values that the run in the folder actually uses."""
    with write_atomically(run_dir / CONFIG_FILE) as file:
        file.write(yaml.safe_dump(dict(used), sort_keys=False, allow_unicode=True).encode())


def plain_values(options: Options) -> dict[str, Any]:
    """Returns the configuration as JSON values, without secrets."""
    values = json.loads(json.dumps(plain(options), default=str))
    assert isinstance(values, dict)
    redacted: dict[str, Any] = redact(values)
    return redacted


def _same_file(old: object, new: object) -> bool:
    return isinstance(old, str) and isinstance(new, str) and os.path.realpath(old) == os.path.realpath(new)


def _format_value(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"
