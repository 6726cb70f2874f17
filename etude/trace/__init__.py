"""Tracing: a trajectory's generations, tool calls and functions decorated by `rollout_trace_op` as nested spans."""

from etude.options import TraceOptions
from etude.trace.span import Backend, TraceSpan, is_traced, rollout_trace_op, span, traced
from etude.trace.tracer import TRACE_BACKENDS, Tracer

__all__ = [
    "TRACE_BACKENDS",
    "Backend",
    "TraceOptions",
    "TraceSpan",
    "Tracer",
    "is_traced",
    "rollout_trace_op",
    "span",
    "traced",
]
