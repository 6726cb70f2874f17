"""The native engine's counters since the last report, under their names in the training step's metrics.

Times are wall-clock seconds of the engine's threads and of its scheduling. The time of a step that both prefills and
decodes is split between the two by number of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from etude.metrics import Max, Mean, Metrics


@dataclass
class EngineMetrics:
    """Counters; `rows` is the sum of the rows of all steps, `context_tokens` of the context lengths of admitted requests."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    context_tokens: int = 0
    steps: int = 0
    rows: int = 0
    preemptions: int = 0
    kv_bytes: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", "decode", "sampling", "scheduling"), 0.0)
    )

    @contextmanager
    def timed(self, what: str, prefill_share: float = 0.0) -> Iterator[None]:
        """Adds the wall time of a block to `seconds[what]`, except the fraction `prefill_share`, added to "prefill"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds["prefill"] += spent * prefill_share
            self.seconds[what] += spent * (1.0 - prefill_share)

    def report(self, max_num_seqs: int) -> Metrics:
        """Returns the metrics; `docs/engines.md` describes them."""
        computed = min(self.prefilled_tokens, self.context_tokens)
        return {
            "sampled_tokens": float(self.sampled_tokens),
            "prefilled_tokens": float(self.prefilled_tokens),
            "steps": float(self.steps),
            "rows_per_step": Mean(self.rows, self.steps),
            "batch_occupancy": Mean(self.rows, self.steps * max_num_seqs),
            "tokens_per_second": Mean(self.sampled_tokens, sum(self.seconds.values())),
            "cache_hit_rate": Mean(self.context_tokens - computed, self.context_tokens),
            "preemptions": float(self.preemptions),
            "kv_cache_mb": Max(self.kv_bytes / 2**20),
            **{f"seconds_{what}": spent for what, spent in self.seconds.items()},
        }
