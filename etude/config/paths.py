"""Paths in a user's YAML are relative to that file.

Invariant: a relative path that names something beside the file that holds it becomes that thing's full path; any other is
left as it is, and so starts in the working directory. Paths that a run writes to are never touched.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from etude.config.layers import Layer, flatten, plain

_FILES = ("*.path", "*_path", "*_files", "*tool_config", "plugins", "*.openai_agent.function")
_FOLDERS = ("model.path", "*.model.path", "trainer.resume_from_path")


def anchor_paths(layer: Layer) -> None:
    """Gives the relative paths of a YAML file's `layer` their full form, in place."""
    folder = Path(layer.source).parent
    for key, value in flatten(plain(layer)):
        if any(fnmatchcase(key, pattern) for pattern in _FILES):
            found = _anchored(value, folder, any(fnmatchcase(key, pattern) for pattern in _FOLDERS))
            if found != value:
                OmegaConf.update(layer.values, key, found)


def _anchored(value: Any, folder: Path, or_folder: bool) -> Any:
    if isinstance(value, list):
        return [_anchored(each, folder, or_folder) for each in value]
    if not isinstance(value, str) or not value or "${" in value:
        return value
    name, colon, attribute = value.rpartition(":") if ".py:" in value else (value, "", "")
    near = folder / name
    return f"{near}{colon}{attribute}" if near.is_file() or (or_folder and near.is_dir()) else value
