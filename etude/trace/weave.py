"""The Weave backend: each trajectory is a call of the project, and its spans are child calls.

Uses Weave's client (`create_call` and `finish_call`) without its call stack: parents come from our spans. Authentication is
Weave's, by `WANDB_API_KEY` or its settings.
"""

from __future__ import annotations

import datetime
from typing import Any

from etude.errors import MissingExtraError
from etude.trace.span import TraceSpan

try:
    import weave
except ImportError as error:
    raise MissingExtraError("rollout.trace.backend=weave", "weave") from error


class SpanError(Exception):
    """The error reported to Weave for a failed span: the name of the exception's class."""


class WeaveBackend:
    """Writes calls to the project `project`. Use it from one thread (see `Background`)."""

    def __init__(self, project: str, experiment: str) -> None:
        self._client: Any = weave.init(project)
        self._experiment = experiment

    def begin(self, span: TraceSpan) -> None:
        """Creates a Weave call under the parent's."""
        span.handle = self._client.create_call(
            span.name,
            inputs={},
            parent=None if span.parent is None else span.parent.handle,
            attributes={"kind": span.kind, "trace": span.trace_id, "experiment": self._experiment},
            use_stack=False,
            started_at=_moment(span.start),
        )

    def end(self, span: TraceSpan) -> None:
        """Finishes the Weave call, with the span's attributes as its output."""
        if span.handle is not None:
            failure = None if span.error is None else SpanError(span.error)
            ended = _moment(span.start + span.seconds)
            self._client.finish_call(span.handle, output=dict(span.attributes), exception=failure, ended_at=ended)

    def close(self) -> None:
        """Flushes pending calls."""
        self._client.flush()


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
