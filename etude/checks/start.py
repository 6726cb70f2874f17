"""Checks what a configuration needs on this machine: files, folders, packages, a model with enough context.

Invariant: everything that is missing is reported together, before torch is imported; nothing is created, loaded or
downloaded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from etude.checks.findings import check, faults_of
from etude.checks.settings import Faults, fault, inert_reason, unknown_names
from etude.errors import ConfigError, MissingExtraError
from etude.options import Options, TrainOptions, declarations
from etude.options.distillation import SELF, is_address
from etude.options.model_path import local_folder, longest_context, read_config
from etude.options.rollout import BUILTIN
from etude.options.serving import TEXT_ONLY, serving_faults
from etude.options.validate import value_of
from etude.registry import missing_file
from etude.run_folder import read_run_record

_ROLLOUT = "actor_rollout_ref.rollout"
Command = Literal["train", "eval", "sft"]
_ROWS = "give one or more parquet or JSON-lines files"
_MODEL = "give the folder of a Hugging Face model, or smollm2 after `etude models get smollm2`"
_NEEDED: dict[Command, dict[str, tuple[str, str]]] = {
    "train": {"data.train_files": ("is empty", _ROWS), "actor_rollout_ref.model.path": ("is not set", _MODEL)},
    "eval": {"data.val_files": ("is empty", _ROWS), "actor_rollout_ref.model.path": ("is not set", _MODEL)},
    "sft": {"data.train_files": ("is empty", _ROWS), "model.path": ("is not set", _MODEL)},
}
_EXTRAS = {
    ("trainer.logger", "wandb"): ("wandb", "wandb"),
    ("trainer.logger", "mlflow"): ("mlflow", "mlflow"),
    **{
        (f"{section}optim.name", name): (package, package)
        for section in ("actor_rollout_ref.actor.", "critic.", "")
        for name, package in {"adamw_8bit": "bitsandbytes", "adamw_schedule_free": "schedulefree"}.items()
    },
    **{
        (f"{section}model.quantization", "nf4"): ("bitsandbytes", "bitsandbytes")
        for section in ("actor_rollout_ref.", "critic.", "")
    },
    (f"{_ROLLOUT}.name", "vllm"): ("vllm", "vllm"),
    (f"{_ROLLOUT}.trace.backend", "otel"): ("opentelemetry", "otel"),
    (f"{_ROLLOUT}.trace.backend", "opentelemetry"): ("opentelemetry", "otel"),
    (f"{_ROLLOUT}.trace.backend", "mlflow"): ("mlflow", "mlflow"),
    (f"{_ROLLOUT}.trace.backend", "weave"): ("weave", "weave"),
}
"""Maps (key, name) to (package, extra)."""


def start_problems(options: Options, command: Command) -> Faults:
    """Yields what `options` name but this machine lacks, and settings that are invalid for `command` only."""
    yield from faults_of("start", options, command)


@check("start")
def _needed_keys(options: Options, command: Command) -> Faults:
    for key, (why, fix) in _NEEDED[command].items():
        made = key.startswith("data.") and isinstance(options, TrainOptions) and options.env  # its rows
        if not value_of(options, key) and not made:
            yield fault(key, why, fix)
    yield from unknown_names(options, late=True)


@check("start")
def missing_paths(options: Options, command: Command = "train") -> Faults:
    """Yields the keys that name files, code, models or folders that are missing or invalid on this machine."""
    named = set[str]()
    for key, declared in declarations(type(options)).items():
        kind, value = declared.about.path, value_of(options, key)
        if not kind or not value or declared.about.alias_of or inert_reason(options, key):
            continue
        for name in value if isinstance(value, tuple) else (value,):
            name = name.get("path", "") if isinstance(name, Mapping) else name  # an item of a list of sections
            if name and (found := _wrong_path(kind, name, key)) and str(found) not in named:
                named.add(str(found))
                yield found


@check("start")
def _extras(options: Options, command: Command) -> Faults:
    declared = declarations(type(options))
    for (key, name), (package, extra) in _EXTRAS.items():
        value = value_of(options, key) if key in declared else ()
        if name not in ((value,) if isinstance(value, str) else value or ()) or importlib.util.find_spec(package):
            continue
        if name != "vllm" or not value_of(options, f"{_ROLLOUT}.has_servers"):  # servers need nothing here
            own = f", or leave {key} out: Étude's own engine needs nothing" if name == "vllm" else ""
            yield _missing_extra(key, f"'{name}'", extra, own)
    for section in ("actor_rollout_ref.model", "critic.model", "model"):
        key = f"{section}.lora_rank"
        if key in declared and value_of(options, key) and not importlib.util.find_spec("peft"):
            yield _missing_extra(key, "LoRA", "lora")


@check("start")
def _engine(run: Options, command: Command) -> Faults:
    """Settings that do not fit a built-in engine (engines of plugins are checked after import) or the model."""
    if not isinstance(run, TrainOptions):
        return
    rollout, longest = run.actor_rollout_ref.rollout, _positions(run)
    if rollout.name in BUILTIN:
        engines = {*BUILTIN, *rollout.engine_kwargs} if run.plugins else {*BUILTIN}
        yield from serving_faults(rollout, BUILTIN[rollout.name], engines)
    if longest is not None and (rollout.max_model_len or 0) > longest:
        yield fault(f"{_ROLLOUT}.max_model_len", f"the model has {longest} positions")


@check("start")
def _dumps(run: Options, command: Command) -> Faults:
    """Dumps that would go among those of another run, which its viewer would then show as its own."""
    if not isinstance(run, TrainOptions) or command != "train":
        return
    own = Path(run.trainer.default_local_dir).expanduser().resolve()
    for kind, named in (("rollout", run.trainer.rollout_data_dir), ("validation", run.trainer.validation_data_dir)):
        around = Path(named).expanduser().resolve().parent if named else own
        if around != own and read_run_record(around):
            why = f"is in the folder of another run ({around}), and would replace what it dumped"
            yield fault(f"trainer.{kind}_data_dir", why, f"name a folder in {run.trainer.default_local_dir}")


@check("start")
def _training(run: Options, command: Command) -> Faults:
    """Settings that are valid for evaluation but not for training."""
    if not isinstance(run, TrainOptions) or command != "train":
        return
    rollout, reward = run.actor_rollout_ref.rollout, run.reward_model
    greedy = "training needs sampled answers: greedy ones do not differ, so nothing is learned"
    if not rollout.do_sample:
        yield fault(f"{_ROLLOUT}.do_sample", greedy)
    if rollout.top_k == 1:
        yield fault(f"{_ROLLOUT}.top_k", greedy)
    if (kind := BUILTIN.get(rollout.name)) and kind.text_only:
        yield fault(f"{_ROLLOUT}.name", *TEXT_ONLY)
    for teacher in run.distillation.teachers.values():
        if teacher != SELF and not is_address(teacher) and (found := _wrong_path("model", teacher, "")):
            yield fault("distillation.teachers", found.message, found.fix)
    if not ((reward.enable and reward.score_weight) or _has_other_rewards(run) or run.distillation.alone):
        yield fault(
            f"reward_model.{'enable' if not reward.enable else 'score_weight'}",
            "leaves no source of rewards: no tools, interaction, environment or code of your own is configured with a "
            "weight above 0, so every answer would earn the same",
            "set reward_model.enable=true, or configure a source of rewards",
        )


def start_remarks(options: Options) -> Iterator[str]:
    """Yields remarks before a run starts: trajectories that may exceed the model's context."""
    if not isinstance(options, TrainOptions) or (longest := _positions(options)) is None:
        return
    rollout = options.actor_rollout_ref.rollout
    needed = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is None and needed > longest:
        yield (
            f"data.max_prompt_length={rollout.prompt_length} and data.max_response_length={rollout.response_length} need "
            f"{needed} positions, and the model has {longest}: trajectories end there; lower data.max_prompt_length or "
            f"data.max_response_length, or set {_ROLLOUT}.max_model_len={longest}"
        )


def _has_other_rewards(run: TrainOptions) -> bool:
    """Whether anything besides the reward manager may give rewards: a tool, an interaction, an environment, or the user's
    own code."""
    rollout, reward = run.actor_rollout_ref.rollout, run.reward_model
    talks, agent = rollout.multi_turn, rollout.agent
    tools = talks.tool_config_path or talks.function_tool_path or talks.interaction_config_path
    code = run.plugins or agent.agent_loop_config_path or agent.openai_agent.function or agent.openai_agent.command
    own = code or (talks.enable and (run.actor_rollout_ref.env.chosen or run.env))
    by_tools, by_score = reward.tool_reward_weight != 0, reward.score_weight != 0
    return bool((talks.enable and tools and by_tools) or (own and (by_tools or by_score)))


def _wrong_path(kind: str, name: str, key: str) -> ConfigError | None:
    """Why `name` is invalid for `key`, which names things of this kind; None if it is valid."""
    path, why = Path(name), ""
    try:
        if kind == "model":
            if found := local_folder(name):
                read_config(found)
        elif kind == "environment":
            why = "" if os.environ.get(name) else f"the environment variable {name} is not set"
        elif kind == "output":
            folder = path.expanduser().absolute()
            existing = next(place for place in (folder, *folder.parents) if place.exists())
            if not existing.is_dir():
                why = f"{existing} is a file, not a folder"
            elif not os.access(existing, os.W_OK | os.X_OK):
                why = f"{existing} cannot be written to"
        elif kind == "code":
            why = _missing_code(name)
        elif kind == "checkpoint" and not path.expanduser().is_dir():
            why = f"{name} is no checkpoint: there is no such folder"
        elif kind == "file" and not path.expanduser().is_file():
            why = missing_file(path.expanduser())
    except ConfigError as error:
        return fault(key, error.message, error.fix)
    except (OSError, RuntimeError) as error:  # the name is too long, or has the home of an unknown user
        why = str(error)
    return fault(key, why) if why else None


def _missing_code(name: str) -> str:
    """Why `name` is not code: `path/to/file.py`, optionally with `:name`, or a dotted module; empty if it is."""
    file = name.partition(":")[0]
    if file.endswith(".py") or "/" in file:
        return "" if Path(file).expanduser().is_file() else missing_file(Path(file).expanduser())
    found = all(file.split(".")) and importlib.util.find_spec(file.partition(".")[0])
    return "" if found else f"neither a file nor an installed module: {file}"


def _missing_extra(key: str, feature: str, extra: str, otherwise: str = "") -> ConfigError:
    missing = MissingExtraError(feature, extra)
    return fault(key, missing.message, f"{missing.fix}{otherwise}")


def _positions(run: TrainOptions) -> int | None:
    """The model's maximum context length; None if it cannot be read here."""
    path = run.actor_rollout_ref.model.path
    try:
        folder = local_folder(path) if path else None
        return longest_context(read_config(folder)) if folder else None
    except (ConfigError, OSError, RuntimeError):
        return None  # `missing_paths` reports it
