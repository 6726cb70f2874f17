"""`TokenBucket`: n a second, with bursts; a pure state machine that is told the time.

Invariant: over any span of t seconds no more than `size + rate * t` tokens are taken. A clock that steps back refills
nothing and takes nothing away.
"""

from __future__ import annotations

_NEARLY_ONE = 1 - 1e-9  # refilling in many small steps must not end an epsilon below a whole token


class TokenBucket:
    """Begins full: `size` tokens, refilled at `rate` tokens a second."""

    def __init__(self, rate: float, size: int, now: float) -> None:
        self._rate = rate
        self._size = float(size)
        self._tokens = float(size)
        self._at = now

    def take(self, now: float) -> bool:
        """Takes one token if there is one."""
        self._refill(now)
        if self._tokens < _NEARLY_ONE:
            return False
        self._tokens -= 1.0
        return True

    def ready_at(self) -> float:
        """When `take` succeeds next (in the past or now, if it would already)."""
        return self._at + max(0.0, 1.0 - self._tokens) / self._rate

    def put_back(self) -> None:
        """Returns a token that was taken and not used."""
        self._tokens = min(self._size, self._tokens + 1.0)

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self._size, self._tokens + (now - self._at) * self._rate)
            self._at = now
