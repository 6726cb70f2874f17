"""The metrics of a sandbox server, in Prometheus format.

Invariant: every request ends in exactly one `etude_sandbox_requests_total`, labelled with its endpoint and outcome.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from etude.sandbox.admission import Admission

CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The counters of one server."""

    def __init__(self, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "etude_sandbox_requests",
            "Requests by endpoint and outcome (success, failed, sandbox_error, busy, refused, abandoned).",
            ["endpoint", "outcome"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "etude_sandbox_request_seconds",
            "Seconds from admission to the answer, by endpoint.",
            ["endpoint"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        for name, text, value in (
            ("running", "Programs that run.", lambda: admission.running),
            ("waiting", "Requests that wait for a worker.", lambda: admission.waiting),
        ):
            Gauge(f"etude_sandbox_{name}", text, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """The page for a scrape."""
        return generate_latest(self._registry)
