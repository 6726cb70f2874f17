"""The group defaults: the lowest layer of a configuration, with every key, made from the declarations in `etude.options`.

Invariant: Hydra finds them as it finds YAML files (group `optim`, option `optim`), and a file of the same name comes before
them; they are in its store only while `stored` lasts.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore

from etude import options
from etude.options import SFTOptions, TrainOptions
from etude.options.declare import Key

GROUPS: dict[type, str] = {
    options.OptimOptions: "optim/optim",
    options.TrainedModelOptions: "model/trained",
    options.ModelOptions: "model/model",
    options.MultiTurnOptions: "multi_turn/multi_turn",
    options.RolloutOptions: "rollout/rollout",
    options.ActorOptions: "actor/actor",
    options.RefOptions: "ref/ref",
    options.EnvOptions: "env/env",
    options.CriticOptions: "critic/critic",
    options.DataOptions: "data/data",
    options.SFTDataOptions: "data/sft",
    options.TargetSuccessOptions: "target_success/target_success",
    options.RewardOptions: "reward_model/reward_model",
    options.CustomRewardOptions: "custom_reward_function/custom_reward_function",
    options.AlgorithmOptions: "algorithm/algorithm",
    options.DistillationOptions: "distillation/distillation",
    options.RunOptions: "trainer/run",
    options.TrainerOptions: "trainer/trainer",
    options.RayOptions: "ray/ray",
    TrainOptions: "ppo_trainer",
    SFTOptions: "sft",
}
"""Maps each section that a defaults list can name to its group and option; the last two are roots."""
GROUP_NAMES = frozenset(name.partition("/")[0] for name in GROUPS.values() if "/" in name)
STORED_ROOTS = tuple(name for name in GROUPS.values() if "/" not in name)


@contextmanager
def stored() -> Iterator[None]:
    """Puts the group defaults into Hydra's store, which is global, and takes them out again."""
    store = ConfigStore.instance()
    held = {name: store.repo.pop(name, None) for name in (*GROUP_NAMES, *(f"{root}.yaml" for root in STORED_ROOTS))}
    try:
        for cls, name in GROUPS.items():
            group, _, option = name.rpartition("/")
            entries = [*_defaults(cls, group)]
            listed = {"defaults": [*entries, "_self_"]} if entries else {}
            store.store(option, {**listed, **group_values(name)}, group or None)
        yield
    finally:
        for name, before in held.items():
            del store.repo[name]
            if before is not None:
                store.repo[name] = before


def group_values(name: str) -> dict[str, Any]:
    """The keys that an option of `GROUPS` has itself, each with its default."""
    return dict(_values(next(cls for cls, each in GROUPS.items() if each == name)))


def _defaults(cls: type, folder: str, place: str = "") -> Iterator[str | dict[str, str]]:
    """The defaults list: the options that a section consists of."""
    base = cls.__mro__[1]
    if base in GROUPS:
        yield GROUPS[base].rpartition("/")[2]
    for name, hint, _ in _own_fields(cls):
        group = next((each for each in getattr(hint, "__mro__", ()) if each in GROUPS), None)  # it may extend one
        if group is not None:
            group_folder, _, option = GROUPS[group].rpartition("/")
            yield {f"{'/' if folder else ''}{group_folder}@{place}{name}": option}
        elif dataclasses.is_dataclass(hint):
            yield from _defaults(hint, folder, f"{place}{name}.")  # type: ignore[arg-type]


def _values(cls: type) -> Iterator[tuple[str, Any]]:
    for name, hint, field in _own_fields(cls):
        if dataclasses.is_dataclass(hint):
            inner = {} if hint in GROUPS else dict(_values(hint))  # type: ignore[arg-type]
            if inner:
                yield name, inner
            continue
        about: Key = field.metadata["key"]
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        yield name, about.written or (list(default) if isinstance(default, tuple) else default)


def _own_fields(cls: type) -> Iterator[tuple[str, Any, Any]]:
    """(name, type, field) of the fields that `cls` itself declares."""
    hints = get_type_hints(cls, include_extras=True)
    own = inspect.get_annotations(cls)
    for field in dataclasses.fields(cls):
        is_section = dataclasses.is_dataclass(hints[field.name])
        if field.name in own:
            yield field.name, field.default_factory if is_section else hints[field.name], field
