"""`Tracer`: selects the trajectories to trace, and opens the root span of each; `TRACE_BACKENDS`: where spans go.

A backend is registered as a function of (options, project, experiment); `plugins` may register more.

Invariant: the selection depends only on sample names and the step, not on randomness or time. A failing backend loses spans,
with one log line, but never a trajectory (`Guarded`); one that may block on the network is kept off the event loop
(`Background`). An optional backend is imported on use; if its package is missing, a one-line error says what to install.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from etude.errors import one_line
from etude.jsonl import JsonLines
from etude.options import TraceOptions
from etude.registry import Registry
from etude.seeds import chance
from etude.trace.span import Backend, TraceSpan, span, traced

_MOST_WAITING = 10_000
_CLOSING_SECONDS = 15.0

logger = logging.getLogger(__name__)

Factory = Callable[[TraceOptions, str, str], Backend]

TRACE_BACKENDS: Registry[Factory] = Registry("trace backend")


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


class Guarded:
    """Wraps a backend and disables it after its first failure, which is logged."""

    def __init__(self, backend: Backend) -> None:
        self._backend: Backend | None = backend

    def begin(self, span: TraceSpan) -> None:
        self._attempt(lambda backend: backend.begin(span))

    def end(self, span: TraceSpan) -> None:
        self._attempt(lambda backend: backend.end(span))

    def close(self) -> None:
        self._attempt(lambda backend: backend.close())

    def _attempt(self, call: Callable[[Backend], None]) -> None:
        if self._backend is None:
            return
        try:
            call(self._backend)
        except Exception as error:  # a third-party library may raise anything
            self._backend = None
            logger.warning("tracing stopped: %s: %s", type(error).__name__, one_line(error))


class Background:
    """Calls `backend` from a daemon thread, through a queue of at most about `limit` calls.

    Invariant: `begin` and `end` reach the backend in order, and callers never wait for it; when `limit` calls are queued,
    whole spans are dropped (never only the end of one) and counted.
    """

    def __init__(self, backend: Backend, limit: int = _MOST_WAITING) -> None:
        self._backend, self._limit = Guarded(backend), limit
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun: set[str] = set()  # ids of open spans that were not dropped
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="etude-trace", daemon=True)
        self._thread.start()

    def begin(self, span: TraceSpan) -> None:
        """Queues the span's beginning; drops the span if the queue is full or its parent was dropped."""
        orphan = span.parent is not None and span.parent.span_id not in self._begun
        if orphan or self._calls.qsize() >= self._limit:
            self.dropped += 1
            return
        self._begun.add(span.span_id)
        self._calls.put(lambda: self._backend.begin(span))

    def end(self, span: TraceSpan) -> None:
        """Queues the span's end, unless the span was dropped."""
        if span.span_id in self._begun:
            self._begun.discard(span.span_id)
            self._calls.put(lambda: self._backend.end(span))

    def close(self) -> None:
        """Waits up to `_CLOSING_SECONDS` until the queue is processed and the backend closed."""
        self._calls.put(self._backend.close)
        self._calls.put(None)
        self._thread.join(_CLOSING_SECONDS)
        if self.dropped:
            logger.warning("tracing fell behind: %d spans were dropped", self.dropped)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class JsonLinesBackend:
    """Appends each finished span to a file, which several processes may share; children come before their parents.

    {"trace": "…", "span": "…", "parent": "…" or null, "name": …, "kind": …, "start": seconds since 1970,
     "seconds": …, "error": … or null, "attributes": {…}}
    """

    def __init__(self, path: str) -> None:
        self._lines = JsonLines(path)

    def begin(self, span: TraceSpan) -> None:
        """Does nothing: the line is written when the span ends."""

    def end(self, span: TraceSpan) -> None:
        """Writes the span's line."""
        self._lines.append(
            {
                "trace": span.trace_id,
                "span": span.span_id,
                "parent": None if span.parent is None else span.parent.span_id,
                "name": span.name,
                "kind": span.kind,
                "start": span.start,
                "seconds": span.seconds,
                "error": span.error,
                "attributes": span.attributes,
            }
        )

    def close(self) -> None:
        """Closes the file; nothing is buffered."""
        self._lines.close()


@TRACE_BACKENDS.register("jsonl")
def _jsonl(options: TraceOptions, project: str, experiment: str) -> Backend:
    return JsonLinesBackend(options.path)


@TRACE_BACKENDS.register("otel", "opentelemetry")
def _otel(options: TraceOptions, project: str, experiment: str) -> Backend:
    from etude.trace.otel import OpenTelemetryBackend

    return OpenTelemetryBackend(f"{project}/{experiment}")


@TRACE_BACKENDS.register("mlflow")
def _mlflow(options: TraceOptions, project: str, experiment: str) -> Backend:
    from etude.trace.mlflow import MlflowBackend

    return Background(MlflowBackend(project, experiment))


@TRACE_BACKENDS.register("weave")
def _weave(options: TraceOptions, project: str, experiment: str) -> Backend:
    from etude.trace.weave import WeaveBackend

    return Background(WeaveBackend(project, experiment))
