"""A model's name: a local folder, or the name of a model on a hub.

Invariant: a name that looks like a path is never looked up on a hub: only `org/name` is, and only if no local folder `org`
exists and `org` is not a common folder name. Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, one_line

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OWN_FOLDERS = frozenset(
    {"models", "model", "checkpoints", "checkpoint", "ckpt", "ckpts", "runs", "output", "outputs", "data"}
)


def local_folder(path: str | Path) -> Path | None:
    """Returns the folder, or None if `path` is the name of a model on a hub.

    Raises:
        ConfigError: `path` is neither.
    """
    text = str(path)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{folder}: a model is a folder, this is a file")
    is_hub_name = not isinstance(path, Path) and _HUB_NAME.fullmatch(text) is not None
    if not is_hub_name or Path(text).parent.is_dir() or text.partition("/")[0] in _OWN_FOLDERS:
        seen_from = "" if folder.is_absolute() else f" from {Path.cwd()}"
        raise ConfigError(f"{text}: model folder not found{seen_from} (a model on a hub is named 'org/name')")
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a local folder.

    Raises:
        ConfigError: it is missing or cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: config.json is missing: this is not a model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json: cannot be read: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder}/config.json: must hold a JSON object")
    return config


def longest_context(config: dict[str, Any]) -> int | None:
    """The maximum context length according to config.json; None if it does not say."""
    nested = config.get("text_config")
    places = (config, nested) if isinstance(nested, dict) else (config,)
    lengths = [place["max_position_embeddings"] for place in places if "max_position_embeddings" in place]
    return lengths[-1] if lengths and isinstance(lengths[-1], int) else None
