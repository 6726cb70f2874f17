"""Checks that a reward is a finite number.

Invariant: only finite floats are returned; anything else from a tool or scorer is an infrastructure failure, never a
reward to train on.
"""

from __future__ import annotations

import math
from typing import SupportsFloat

from etude.errors import InfrastructureError

MAX_REWARD = 1e30  # larger rewards overflow when squared for a standard deviation


def as_reward(value: object, source: str) -> float:
    """Returns `value` (any real number, NumPy and torch scalars included; None is 0.0) as a float.

    Raises:
        InfrastructureError: not a number, or not finite; the message begins with `source`.
    """
    if value is None:
        return 0.0
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise InfrastructureError(f"{source} returned a {type(value).__name__} where a number was expected as reward")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InfrastructureError(f"{source} returned a reward that is not a single number: {error}") from error
    if not math.isfinite(number):
        raise InfrastructureError(f"{source} returned the reward {number}, which is not finite")
    return number
