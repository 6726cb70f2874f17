"""`python -m etude.config.generate`: generates the group files of `tree/` from the declarations of the keys.

Invariant: the files in the repository are up to date; a test generates and compares them.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from etude import options
from etude.config.layers import TREE
from etude.options import SFTOptions, TrainOptions
from etude.options.declare import Key
from etude.options.types import allowed_shortly
from etude.options.validate import yaml_text

_WIDTH = 120
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
"""Maps each section to its file in the tree, without suffix."""


def tree_files() -> dict[Path, str]:
    """The group files and their contents."""
    return {TREE / f"{name}.yaml": _group_file(cls, name) for cls, name in GROUPS.items()}


def main() -> None:
    for path, text in tree_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _group_file(cls: type, name: str) -> str:
    folder = name.rpartition("/")[0]
    entries = [f"  - {entry}" for entry in _defaults(cls, folder)]
    lines = _comment(_title(cls))
    if entries:
        lines += ["defaults:", *entries, "  - _self_"]
    body = list(_body(cls, ""))
    return "\n".join([*lines, *([""] if body else []), *body]) + "\n"


def _defaults(cls: type, folder: str, place: str = "") -> Iterator[str]:
    """The defaults list: the group files that a section consists of."""
    base = cls.__mro__[1]
    if base in GROUPS:
        yield GROUPS[base].rpartition("/")[2]
    for name, hint, _ in _own_fields(cls):
        group = _group(hint)
        if group is not None:
            group_folder, _, file = GROUPS[group].rpartition("/")
            yield f"{'/' if folder else ''}{group_folder}@{place}{name}: {file}"
        elif dataclasses.is_dataclass(hint):
            yield from _defaults(hint, folder, f"{place}{name}.")  # type: ignore[arg-type]


def _body(cls: type, indent: str) -> Iterator[str]:
    for name, hint, field in _own_fields(cls):
        if not dataclasses.is_dataclass(hint):
            yield from _leaf(name, hint, field, indent)
            continue
        inner = list(_body(hint, indent + "  ")) if hint not in GROUPS else []  # type: ignore[arg-type]
        if inner:
            title = [] if _group(hint) else _comment(_title(hint), indent)  # type: ignore[arg-type]
            yield from (*title, f"{indent}{name}:", *inner)


def _leaf(name: str, hint: Any, field: Any, indent: str) -> Iterator[str]:
    about: Key = field.metadata["key"]
    note = _note(about, hint)
    yield from _comment(f"{about.meaning} [{note}]" if note else about.meaning, indent)
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    yield f"{indent}{name}: {about.written or yaml_text(default)}"


def _note(about: Key, hint: Any) -> str:
    """Unit and range; "null" alone is left out, because then any value is allowed."""
    bounds = allowed_shortly(hint)
    return ", ".join(filter(None, (about.unit, "" if bounds == "null" else bounds)))


def _own_fields(cls: type) -> Iterator[tuple[str, Any, Any]]:
    """(name, type, field) of the fields that `cls` itself declares."""
    hints = get_type_hints(cls, include_extras=True)
    own = inspect.get_annotations(cls)
    for field in dataclasses.fields(cls):
        is_section = dataclasses.is_dataclass(hints[field.name])
        if field.name in own:
            yield field.name, field.default_factory if is_section else hints[field.name], field


def _group(hint: Any) -> type | None:
    """The section with its own file that `hint` is or extends."""
    return next((cls for cls in getattr(hint, "__mro__", ()) if cls in GROUPS), None)


def _title(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split())


def _comment(text: str, indent: str = "") -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


if __name__ == "__main__":
    main()
