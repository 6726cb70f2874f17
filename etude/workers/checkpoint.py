"""Reading and writing a checkpoint's tensor files, models aside.

Invariant: only tensors and plain values are read, so that a foreign checkpoint cannot run code; any fault of a file is one
`CheckpointError` that names it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from etude.errors import CheckpointError, one_line


def write_tensors(state: dict[str, Any], path: Path) -> None:
    """Writes a file for `read_tensors`.

    Raises:
        CheckpointError: the file cannot be written; torch reports a full disk as an internal error of its own.
    """
    try:
        torch.save(state, path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be written: {one_line(error)}") from error


def read_tensors(path: Path, device: torch.device) -> dict[str, Any]:
    """The state that `write_tensors` wrote to `path`, tensors on `device`.

    Raises:
        CheckpointError: the file is missing or damaged, or holds something else.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a state")
    return state
