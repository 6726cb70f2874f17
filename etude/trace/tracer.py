"""`Tracer`: selects the trajectories to trace, and opens the root span of each.

Invariant: the selection depends only on sample names and the step, not on randomness or time; a failing backend loses spans,
with one log line, but never a trajectory.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from etude.options import TraceOptions
from etude.seeds import chance
from etude.trace.backends import TRACE_BACKENDS
from etude.trace.background import Guarded
from etude.trace.span import Backend, TraceSpan, span, traced


class Tracer:
    """The tracer of a process. `token2text`: whether generation spans include decoded text; read where they are created."""

    def __init__(self, options: TraceOptions, backend: Backend) -> None:
        self._options = options
        self._backend = Guarded(backend)
        self.token2text = options.token2text
        self._step: object = None
        self._of_step: set[str] = set()

    @classmethod
    def of(cls, options: TraceOptions, project: str, experiment: str) -> Tracer | None:
        """Returns the configured tracer, which is closed when the process exits; None if no backend is configured.

        Raises:
            ConfigError: there is no backend of that name, or it cannot be set up.
            MissingExtraError: the backend's package is not installed.
        """
        if options.backend is None:
            return None
        tracer = cls(options, TRACE_BACKENDS.get(options.backend)(options, project, experiment))
        atexit.register(tracer.close)
        return tracer

    def chosen(self, samples: Sequence[str], step: object = None) -> set[int]:
        """Returns the indexes of the trajectories to trace; `samples` are their prompts' names, which include the step.
        `max_samples_per_step_per_worker` applies to all calls of one `step` together, since streamed rollouts call this
        several times per step."""
        known = self._of_step if step is not None and step == self._step else set()
        new, limit = sorted(set(samples) - known, key=chance), self._options.max_samples_per_step_per_worker
        allowed = known | set(new if limit is None else new[: max(limit - len(known), 0)])
        if step is not None:
            self._step, self._of_step = step, allowed
        return {
            i
            for i, sample in enumerate(samples)
            if sample in allowed and chance(f"{sample}/{i}") < self._options.sample_rate
        }

    @contextmanager
    def trajectory(self, trace_id: str, attributes: Mapping[str, Any]) -> Iterator[TraceSpan | None]:
        """Traces everything awaited inside the block as one trajectory; yields its root span."""
        with traced(self._backend, trace_id), span("trajectory", "trajectory") as whole:
            if whole is not None:
                whole.set(**attributes)
            yield whole

    def close(self) -> None:
        """Flushes pending spans; those that end later may be lost."""
        self._backend.close()
