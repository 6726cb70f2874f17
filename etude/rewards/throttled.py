"""The reward manager `rate_limited`: for scorers that call a service with a limit on requests or tokens per minute.

Invariant: the limits hold across the whole run: on one machine in its one process, on Ray across the cluster. A request
that times out or fails is an infrastructure failure: it is retried and never yields a score. Waiting for a permit does
not count against its timeout.
"""

from __future__ import annotations

from typing import Any

from etude.limits import Limit, open_limiter
from etude.options.declare import key, options
from etude.options.types import Count, Positive, Text
from etude.rewards.default import Score, Scorer
from etude.rewards.manager import BoundedScorer, NaiveRewardManager, register


@options
class RateOptions:
    """`reward_model.reward_kwargs` of `rate_limited`."""

    max_concurrent: Count = key("Scores at once.", default=1)
    max_rpm: Positive | None = key(
        "Scores a minute; a judge sends a request for each vote and criterion. Null: no limit.", default=None
    )
    max_tpm: Positive | None = key("Tokens a minute. Null: no limit.", default=None)
    estimated_tokens_per_request: Count = key("What a score counts as against `max_tpm`.", default=2000, unit="tokens")
    limiter: Text = key("Name of the limit: managers with one name share it.", default="etude-reward")

    @property
    def limit(self) -> Limit:
        """The limit that these options set: the stricter of both rates, and the concurrency."""
        rates = [self.max_rpm, self.max_tpm and self.max_tpm / self.estimated_tokens_per_request]
        a_minute = min((rate for rate in rates if rate is not None), default=None)
        return Limit(max_concurrent=self.max_concurrent, per_second=a_minute and a_minute / 60.0)


class RateLimitedScorer(BoundedScorer):
    """Runs a scorer once the limiter grants a permit."""

    def __init__(self, scorer: Scorer, timeout: float, given: RateOptions) -> None:
        super().__init__(scorer, timeout)
        self.limiter = open_limiter(given.limiter, given.limit)

    async def _run(self, arguments: dict[str, Any]) -> Score:
        async with self.limiter.permit():
            return await super()._run(arguments)


@register("rate_limited")
class RateLimitedRewardManager(NaiveRewardManager):
    """Allows `max_concurrent` scores at once (default 1), `max_rpm` and `max_tpm`; each times out after 300 seconds."""

    runs = (RateLimitedScorer, RateOptions)

    def __init__(self, *parts: Any, timeout: float = 300.0, **named: Any) -> None:
        super().__init__(*parts, timeout=timeout, **named)
