"""`TRACE_BACKENDS`: the registry of trace backends; and the default backend, JSON lines.

A backend is registered as a function of (options, project, experiment); `plugins` may register more. Invariant: an optional
backend is imported on use; if its package is missing, a one-line error says what to install.

Each line of `jsonl` is a finished span, so children come before their parents.

    {"trace": "…", "span": "…", "parent": "…" or null, "name": …, "kind": …, "start": seconds since 1970,
     "seconds": …, "error": … or null, "attributes": {…}}
"""

from __future__ import annotations

from collections.abc import Callable

from etude.jsonl import JsonLines
from etude.options import TraceOptions
from etude.registry import Registry
from etude.trace.span import Backend, TraceSpan

Factory = Callable[[TraceOptions, str, str], Backend]

TRACE_BACKENDS: Registry[Factory] = Registry("trace backend")


class JsonLinesBackend:
    """Appends each finished span to a file, which several processes may share."""

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
    from etude.trace.background import Background
    from etude.trace.mlflow import MlflowBackend

    return Background(MlflowBackend(project, experiment))


@TRACE_BACKENDS.register("weave")
def _weave(options: TraceOptions, project: str, experiment: str) -> Backend:
    from etude.trace.background import Background
    from etude.trace.weave import WeaveBackend

    return Background(WeaveBackend(project, experiment))
