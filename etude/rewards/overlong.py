"""DAPO's "soft overlong punishment" as a separate scorer, for `custom_reward_function.rewards` and the manager `dapo`.

Source: DAPO (arXiv:2503.14476), equation 13. With L tokens in a response of at most `max_tokens`, and a buffer before
that limit: 0 up to max_tokens - buffer, then linear down to -1 at max_tokens; times `factor`.
"""

from __future__ import annotations

from typing import Any

from etude.errors import ConfigError


def overlong_penalty(tokens: int, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """min(0, (max_tokens - buffer - tokens) / buffer) · factor."""
    return min(0.0, (max_tokens - buffer - tokens) / buffer) * factor


def compute_score(trajectory: Any, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """Returns the penalty, at most 0, for all tokens after the prompt, tool responses included.

    Raises:
        ConfigError: `buffer` is not between 1 and `max_tokens`, or `factor` would pay for length.
    """
    if not 0 < buffer <= max_tokens or factor < 0:
        raise ConfigError(
            "the overlong penalty's buffer must be from 1 to max_tokens, and its factor at least 0: "
            f"{buffer}, {max_tokens}, {factor}"
        )
    return overlong_penalty(trajectory.response_tokens, max_tokens, buffer, factor)
