"""What a configuration needs of this machine: files, folders, packages, a model that is long enough.

Invariant: everything that is missing is found at once, before torch is imported; nothing is created, loaded or fetched.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from etude.config.checks import Options, Problem, inert_reason, shown_value
from etude.config.names import unknown_names
from etude.errors import ConfigError, MissingExtraError, raise_faults
from etude.model_folder import local_folder, longest_context, read_config
from etude.options import TrainOptions, declarations
from etude.options.validate import value_of

logger = logging.getLogger(__name__)

Command = Literal["train", "eval", "sft"]
_NEEDED: dict[Command, tuple[tuple[str, str], ...]] = {
    "train": (
        ("data.train_files", "is empty: give one or more parquet or JSON-lines files"),
        ("actor_rollout_ref.model.path", "is not set: give the folder of a Hugging Face model"),
    ),
    "eval": (
        ("data.val_files", "is empty: give the rows to evaluate on"),
        ("actor_rollout_ref.model.path", "is not set: give the folder of a Hugging Face model"),
    ),
    "sft": (
        ("data.train_files", "is empty: give one or more parquet or JSON-lines files"),
        ("model.path", "is not set: give the folder of a Hugging Face model"),
    ),
}
_EXTRAS = {
    ("trainer.logger", "wandb"): ("wandb", "wandb"),
    ("trainer.logger", "mlflow"): ("mlflow", "mlflow"),
    ("actor_rollout_ref.rollout.trace.backend", "otel"): ("opentelemetry", "otel"),
    ("actor_rollout_ref.rollout.trace.backend", "opentelemetry"): ("opentelemetry", "otel"),
    ("actor_rollout_ref.rollout.trace.backend", "mlflow"): ("mlflow", "mlflow"),
    ("actor_rollout_ref.rollout.trace.backend", "weave"): ("weave", "weave"),
}
"""(Key, name) → (package, extra)."""


def check_start(options: Options, sources: Mapping[str, str], command: Command) -> None:
    """Refuses to start `command` where something that `options` name is missing.

    Raises:
        ConfigError: names every such key, its value, where it was set and what is missing.
    """
    found = [*_missing(options), *_extras(options)]
    if not options.plugins:
        found += unknown_names(options, starting=True)
    if isinstance(options, TrainOptions):
        found += _context(options)
    places = {key: f" ({source})" for key, source in sources.items()}
    unset = [f"{key} {advice}" for key, advice in _NEEDED[command] if not value_of(options, key)]
    raise_faults(unset + [f"{key}={shown_value(options, key)}{places.get(key, '')}: {text}" for key, text in found])


def _missing(options: Options) -> Iterator[Problem]:
    told = set()
    for key, declared in declarations(type(options)).items():
        kind, value = declared.about.path, value_of(options, key)
        if not kind or not value or declared.about.alias_of or inert_reason(options, key):
            continue
        for name in value if isinstance(value, tuple) else (value,):
            if (reason := _reason(kind, name)) and reason not in told:
                told.add(reason)
                yield key, reason


def _reason(kind: str, name: str) -> str:
    """Why `name` cannot be what a key of this kind names; nothing where it can."""
    try:
        if kind == "model":
            folder = local_folder(name)
            if folder is not None:
                read_config(folder)
        elif kind == "output":
            return _unwritable(Path(name).expanduser().absolute())
        elif kind == "code":
            return _no_code(name)
        elif kind == "checkpoint" and not Path(name).expanduser().is_dir():
            return f"{name} is no checkpoint: there is no such folder"
        elif kind == "file" and not Path(name).expanduser().is_file():
            return f"file not found: {name}"
    except ConfigError as error:
        return str(error)
    except (OSError, RuntimeError) as error:  # a name too long, or of an unknown user's home
        return str(error)
    return ""


def _no_code(name: str) -> str:
    """`path/to/file.py`, with `:name` or without, or a dotted module."""
    file = name.partition(":")[0]
    if file.endswith(".py") or "/" in file:
        return "" if Path(file).expanduser().is_file() else f"file not found: {file}"
    found = all(file.split(".")) and importlib.util.find_spec(file.partition(".")[0])
    return "" if found else f"neither a file nor an installed module: {file}"


def _unwritable(folder: Path) -> str:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        return f"{there} is a file, not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def _extras(options: Options) -> Iterator[Problem]:
    for (key, name), (package, extra) in _EXTRAS.items():
        value = value_of(options, key) if key in declarations(type(options)) else ()
        if name in ((value,) if isinstance(value, str) else value or ()) and importlib.util.find_spec(package) is None:
            yield key, str(MissingExtraError(f"'{name}'", extra))


def _context(run: TrainOptions) -> Iterator[Problem]:
    """The model against the lengths asked for: an engine refuses what it cannot hold, and shortens what need not be."""
    rollout, path = run.actor_rollout_ref.rollout, run.actor_rollout_ref.model.path
    try:
        folder = local_folder(path) if path else None
        longest = longest_context(read_config(folder)) if folder else None
    except (ConfigError, OSError, RuntimeError):
        return  # told of already
    needed = rollout.prompt_length + rollout.response_length
    if longest is None:
        return
    if rollout.max_model_len is not None and rollout.max_model_len > longest:
        yield "actor_rollout_ref.rollout.max_model_len", f"the model has {longest} positions"
    elif rollout.max_model_len is None and rollout.prompt_length >= longest:
        yield "data.max_prompt_length", f"the model has {longest} positions, which leaves no room for an answer"
    elif rollout.max_model_len is None and needed > longest:
        logger.warning(
            "data.max_prompt_length=%s and data.max_response_length=%s need %s positions, and the model has %s: "
            "trajectories end there",
            rollout.prompt_length,
            rollout.response_length,
            needed,
            longest,
        )
