"""A penalty for responses longer than a target length, or of any other length.

Source: L1 (arXiv:2503.04697), whose reward subtracts α · |n_target - n| ("exact"), or α per token over n_target ("max").
Here the penalty is in [-1, 0] and counts sampled tokens only, not tool responses, of the last sequence: since the last
compaction.
"""

from __future__ import annotations

from typing import Any

from etude.errors import ConfigError


def compute_score(trajectory: Any, target_tokens: int, alpha: float = 0.0003, mode: str = "max") -> float:
    """Returns -min(1, α · excess); `mode`: the excess is over `target_tokens` ("max"), or the distance from it ("exact").

    Raises:
        ConfigError: there is no such mode, or `alpha` would pay for length.
    """
    if mode not in ("max", "exact"):
        raise ConfigError(f"the length penalty's mode must be 'max' or 'exact', not {mode!r}")
    if alpha < 0:
        raise ConfigError(f"the length penalty's alpha must be at least 0, not {alpha}: it is what a token costs")
    excess = trajectory.sampled_tokens - target_tokens
    return -min(1.0, alpha * (abs(excess) if mode == "exact" else max(0, excess)))
