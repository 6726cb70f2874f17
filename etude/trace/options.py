"""`TraceOptions`: what is traced and where to; field names are the configuration keys below `rollout.trace`."""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import ConfigError


@dataclass(frozen=True)
class TraceOptions:
    """Which trajectories leave spans, and where.

    Attributes:
        backend: name of a registered backend; None traces nothing.
        path: of the JSON lines of `jsonl`.
        token2text: whether a generation's span holds its prompt and response as text, besides their lengths.
        sample_rate: share of trajectories that are traced.
        max_samples_per_step_per_worker: at most so many prompts a step, with all their answers; None: no limit.
    """

    backend: str | None = None
    path: str = "traces.jsonl"
    token2text: bool = False
    sample_rate: float = 1.0
    max_samples_per_step_per_worker: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sample_rate <= 1:
            raise ConfigError(f"rollout.trace.sample_rate must lie between 0 and 1, not {self.sample_rate}")
        most = self.max_samples_per_step_per_worker
        if most is not None and most < 1:
            raise ConfigError(f"rollout.trace.max_samples_per_step_per_worker must be at least 1, not {most}")
