"""A penalty for answers longer than asked for, or of another length.

Source: L1 (arXiv:2503.04697), whose reward is less α · |n_target - n| ("exact"), or less α for each token over n_target
("max"). Here the penalty is in [-1, 0], and counts what the model wrote, not what tools answered.
"""

from __future__ import annotations

from typing import Any

from etude.errors import ConfigError


def compute_score(trajectory: Any, target_tokens: int, alpha: float = 0.0003, mode: str = "max") -> float:
    """-min(1, α · excess); `mode`: the excess is over `target_tokens` ("max"), or the distance from it ("exact").

    Raises:
        ConfigError: there is no such mode.
    """
    if mode not in ("max", "exact"):
        raise ConfigError(f"the length penalty's mode must be 'max' or 'exact', not {mode!r}")
    excess = trajectory.sampled_tokens - target_tokens
    return -min(1.0, alpha * (abs(excess) if mode == "exact" else max(0, excess)))
