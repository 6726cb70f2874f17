"""Checks that a reward is a finite number of at most `MAX_REWARD` in size, and an ending a truth value.

Invariant: only such floats are returned; anything else from a tool or scorer is an infrastructure failure or, of a
scorer that returns no number at all, an error that ends the run; never a reward to train on.
"""

from __future__ import annotations

import math
from numbers import Complex, Real
from typing import SupportsFloat

from etude.errors import ConfigError, InfrastructureError

SCORE = "let it return a number, or a dict with a number as 'score'"
MAX_REWARD = 1e30  # larger rewards overflow when squared for a standard deviation


def as_float(value: object) -> float:
    """Returns `value` (any real number, NumPy and torch scalars included; None is 0.0) as a float; it may not be finite.

    Raises:
        TypeError: not a number.
    """
    imaginary = isinstance(value, Complex) and not isinstance(value, Real)  # NumPy's would lose a part
    if isinstance(value, str | bytes) or imaginary or not isinstance(value, SupportsFloat | None):
        raise TypeError(f"returned a {type(value).__name__} where a number was expected as reward")
    try:
        return float(0.0 if value is None else value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"returned a reward that is not a single number: {error}") from error


def as_flag(value: object) -> bool:
    """Returns `value`, a truth value (NumPy's and torch's, 0 and 1 included), as a bool.

    Raises:
        TypeError: it is something else, whose truth says nothing: "False" is true.
    """
    if isinstance(value, bool):
        return value
    try:
        number = None if value is None else as_float(value)
    except TypeError:
        number = None
    if number not in (0.0, 1.0):
        raise TypeError(f"returned {value!r:.60} where True or False was expected")
    return bool(number)


def as_score(value: object, source: str) -> float:
    """As `as_reward`, of a scorer: what is of another type is a mistake in its code, which each rollout would meet.

    Raises:
        ConfigError: not a number.
        InfrastructureError: not finite, or too large.
    """
    try:
        return as_reward(as_float(value), source)
    except TypeError as error:
        raise ConfigError(f"{source} {error}: {value!r:.60}", fix=SCORE) from error


def as_reward(value: object, source: str) -> float:
    """Returns `value` (any real number, NumPy and torch scalars included; None is 0.0) as a float.

    Raises:
        InfrastructureError: not a number, not finite, or beyond `MAX_REWARD`; the message begins with `source`.
    """
    if type(value) is float and abs(value) <= MAX_REWARD:
        return value
    try:
        number = as_float(value)
    except TypeError as error:
        raise InfrastructureError(f"{source} {error}") from error
    if not math.isfinite(number):
        raise InfrastructureError(f"{source} returned the reward {number}, which is not finite")
    if abs(number) > MAX_REWARD:
        raise InfrastructureError(
            f"{source} returned the reward {number:g}; at most {MAX_REWARD:g} in size can be trained on"
        )
    return number
