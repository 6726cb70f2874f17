"""Tracing: a trajectory's generations, tool calls and functions decorated by `rollout_trace_op` as nested spans."""

from etude.options import TraceOptions
from etude.trace.backends import TRACE_BACKENDS
from etude.trace.span import (
    Backend,
    OpenSpans,
    SpanList,
    TraceSpan,
    collect_spans,
    is_traced,
    rollout_trace_op,
    span,
    traced,
    watch_spans,
)
from etude.trace.tracer import Tracer

__all__ = [
    "TRACE_BACKENDS",
    "Backend",
    "OpenSpans",
    "SpanList",
    "TraceOptions",
    "TraceSpan",
    "Tracer",
    "collect_spans",
    "is_traced",
    "rollout_trace_op",
    "span",
    "traced",
    "watch_spans",
]
