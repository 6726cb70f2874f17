"""`Tracer`: which trajectories are traced, and the root span of each.

Invariant: the choice depends on names and the step, not on chance or the clock; a failing backend loses its spans, with one
log line, never a trajectory.
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
    """One per process. `token2text` is read where generation spans are made."""

    def __init__(self, options: TraceOptions, backend: Backend) -> None:
        self._options = options
        self._backend = Guarded(backend)
        self.token2text = options.token2text
        self._step: object = None
        self._of_step: set[str] = set()

    @classmethod
    def of(cls, options: TraceOptions, project: str, experiment: str) -> Tracer | None:
        """The configured tracer, closed when the process ends; None where nothing is traced.

        Raises:
            ConfigError: no backend has that name, or it cannot be set up.
            MissingExtraError: it is not installed.
        """
        if options.backend is None:
            return None
        tracer = cls(options, TRACE_BACKENDS.get(options.backend)(options, project, experiment))
        atexit.register(tracer.close)
        return tracer

    def chosen(self, samples: Sequence[str], step: object = None) -> set[int]:
        """Indexes of the trajectories to trace; `samples` names the prompt of each, step included. The limit holds for all
        calls of one `step` together: rollouts that stream come in parts."""
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
        """Everything awaited inside the block is traced, as one trajectory."""
        with traced(self._backend, trace_id), span("trajectory", "trajectory") as whole:
            if whole is not None:
                whole.set(**attributes)
            yield whole

    def close(self) -> None:
        """Flushes what is pending; spans that end later may be lost."""
        self._backend.close()
