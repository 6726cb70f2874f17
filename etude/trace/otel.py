"""The OpenTelemetry backend: each trajectory is a separate trace.

The exporter is configured by `OTEL_EXPORTER_OTLP_ENDPOINT` and the SDK's other variables; if the process has already set a
tracer provider (in a plug-in, say), that one is used.

Invariant: spans are exported in the SDK's thread, from a bounded queue; the event loop never waits for it.
"""

from __future__ import annotations

import json

from etude.errors import MissingExtraError
from etude.trace.span import TraceSpan

try:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError as error:
    raise MissingExtraError("rollout.trace.backend=otel", "otel") from error

_KINDS = {"generation": SpanKind.CLIENT, "tool": SpanKind.CLIENT}
_FLUSH_MILLISECONDS = 10_000


class OpenTelemetryBackend:
    """Sends spans to `provider`, by default the process's tracer provider, or else a new one that exports by OTLP/HTTP."""

    def __init__(self, service: str, provider: TracerProvider | None = None) -> None:
        present = otel.get_tracer_provider()
        self._provider = provider or (present if isinstance(present, TracerProvider) else _create_provider(service))
        self._tracer = self._provider.get_tracer("etude")

    def begin(self, span: TraceSpan) -> None:
        """Starts an OpenTelemetry span under the parent's."""
        parent = None if span.parent is None else span.parent.handle
        context = Context() if parent is None else otel.set_span_in_context(parent, Context())
        span.handle = self._tracer.start_span(
            span.name, context, _KINDS.get(span.kind, SpanKind.INTERNAL), start_time=_nanoseconds(span.start)
        )

    def end(self, span: TraceSpan) -> None:
        """Ends the OpenTelemetry span, with its attributes."""
        handle = span.handle
        if handle is None:
            return
        handle.set_attribute("etude.kind", span.kind)
        handle.set_attribute("etude.trace", span.trace_id)
        for name, value in span.attributes.items():
            if value is not None:
                plain = isinstance(value, bool | int | float | str)  # OpenTelemetry takes no other values
                handle.set_attribute(f"etude.{name}", value if plain else json.dumps(value, ensure_ascii=False))
        if span.error is not None:
            handle.set_status(Status(StatusCode.ERROR, span.error))
        handle.end(end_time=_nanoseconds(span.start + span.seconds))

    def close(self) -> None:
        """Flushes pending spans."""
        self._provider.force_flush(_FLUSH_MILLISECONDS)


def _create_provider(service: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtraError("rollout.trace.backend=otel", "otel") from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
