"""`Limit`: a concurrency and rate limit, as data that processes can compare; `TokenBucket`: enforces the rate.

Invariants: a `Limit` is always valid. Over any span of t seconds at most `size + rate * t` tokens are taken from a bucket; a
clock that steps back neither refills nor drains it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from etude.errors import ConfigError

_NEARLY_ONE = 1 - 1e-9  # the rounding errors of many small refills must not cost a token


@dataclass(frozen=True)
class Limit:
    """At most `max_concurrent` permits in use at once, and at most `per_second` granted per second; at least one is set.

    `burst` (default: `per_second` rounded up) is how many may be granted at once after a pause.

    Raises:
        ConfigError: a number is not positive, or nothing is limited.
    """

    max_concurrent: int | None = None
    per_second: float | None = None
    burst: int | None = None

    def __post_init__(self) -> None:
        if self.max_concurrent is None and self.per_second is None:
            raise ConfigError("a limit needs max_concurrent, per_second or both")
        _check_positive("max_concurrent", self.max_concurrent)
        _check_positive("burst", self.burst)
        if self.per_second is None and self.burst is not None:
            raise ConfigError("burst says how many at one moment of per_second, which is not set")
        if self.per_second is not None:
            good = isinstance(self.per_second, int | float) and not isinstance(self.per_second, bool)
            if not good or not 0 < self.per_second < math.inf:
                raise ConfigError(f"per_second must be a number above 0, not {self.per_second!r}")

    @property
    def bucket_size(self) -> int:
        """The number of permits in a full bucket; 0 without a rate limit."""
        if self.per_second is None:
            return 0
        return self.burst or max(1, math.ceil(self.per_second))

    def __str__(self) -> str:
        parts = [] if self.max_concurrent is None else [f"{self.max_concurrent} at once"]
        if self.per_second is not None:
            parts.append(f"{self.per_second:g} a second (bursts of {self.bucket_size})")
        return ", ".join(parts)


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name} must be a whole number from 1, not {value!r}")


class TokenBucket:
    """A token bucket of `size` tokens, refilled at `rate` tokens per second; starts full. The caller passes the time."""

    def __init__(self, rate: float, size: int, now: float) -> None:
        self._rate = rate
        self._size = float(size)
        self._tokens = float(size)
        self._at = now

    def take(self, now: float) -> bool:
        """Takes one token; returns False if there is none."""
        self._refill(now)
        if self._tokens < _NEARLY_ONE:
            return False
        self._tokens -= 1.0
        return True

    def ready_at(self) -> float:
        """Returns the time at which `take` next succeeds; in the past if it would succeed now."""
        return self._at + max(0.0, 1.0 - self._tokens) / self._rate

    def put_back(self) -> None:
        """Puts back a token that was taken and not used."""
        self._tokens = min(self._size, self._tokens + 1.0)

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self._size, self._tokens + (now - self._at) * self._rate)
            self._at = now
