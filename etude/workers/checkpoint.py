"""Reading what a checkpoint holds beside its models.

Invariant: nothing but tensors and plain values is read, so that a checkpoint from elsewhere cannot run code; whatever is
wrong with a file is one `CheckpointError` that names it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from etude.errors import CheckpointError, one_line


def read_tensors(path: Path, device: torch.device) -> dict[str, Any]:
    """What `torch.save` wrote to `path`, tensors on `device`.

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
