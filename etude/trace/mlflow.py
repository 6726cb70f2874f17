"""The MLflow backend: each trajectory is a trace of the run's experiment.

The destination is set by `MLFLOW_TRACKING_URI` and MLflow's other variables. Written against MLflow 3's
`start_span_no_context`, which does not use MLflow's context: parents come from our spans.
"""

from __future__ import annotations

import os
from typing import Any

from etude.errors import MissingExtraError
from etude.trace.span import TraceSpan

try:
    import mlflow
    from mlflow.entities import SpanStatusCode
except ImportError as error:
    raise MissingExtraError("rollout.trace.backend=mlflow", "mlflow") from error

_KINDS = {"trajectory": "AGENT", "generation": "LLM", "tool": "TOOL"}
_INPUTS = ("inputs", "arguments", "prompt")
_OUTPUTS = ("output", "response")


class MlflowBackend:
    """Writes traces to the experiment `project`, tagged with the run's name. Use it from one thread (see `Background`)."""

    def __init__(self, project: str, experiment: str) -> None:
        os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "true")
        self._experiment_id = mlflow.set_experiment(project).experiment_id
        self._tags = {"etude.experiment": experiment}

    def begin(self, span: TraceSpan) -> None:
        """Starts an MLflow span under the parent's."""
        root = span.parent is None
        span.handle = mlflow.start_span_no_context(
            span.name,
            span_type=_KINDS.get(span.kind, "CHAIN"),
            parent_span=None if span.parent is None else span.parent.handle,
            tags=self._tags if root else None,
            experiment_id=self._experiment_id if root else None,
            start_time_ns=int(span.start * 1e9),
        )

    def end(self, span: TraceSpan) -> None:
        """Ends the MLflow span, with inputs, outputs and attributes."""
        handle, attributes = span.handle, dict(span.attributes)
        if handle is None:
            return
        handle.set_inputs(_pop(attributes, _INPUTS))
        outputs = _pop(attributes, _OUTPUTS)
        status = SpanStatusCode.OK if span.error is None else SpanStatusCode.ERROR
        named = {f"etude.{name}": value for name, value in attributes.items()} | {"etude.trace": span.trace_id}
        if span.error is not None:
            named["etude.error"] = span.error
        handle.end(
            outputs=outputs, attributes=named, status=status.value, end_time_ns=int((span.start + span.seconds) * 1e9)
        )

    def close(self) -> None:
        """Flushes pending spans."""
        mlflow.flush_trace_async_logging()


def _pop(attributes: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Removes the attributes with these names, if present, and returns them."""
    return {name: attributes.pop(name) for name in names if name in attributes}
