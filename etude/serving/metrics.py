"""`RequestMetrics`: what a server counts of its requests, in Prometheus' format.

Invariant: each request ends in exactly one `<server>_requests_total`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response


class RequestMetrics:
    """The counters of the server `name`; `outcomes` of a request, and the `buckets` of its seconds."""

    def __init__(self, name: str, outcomes: str, buckets: Sequence[float]) -> None:
        self._name, self.registry = name, CollectorRegistry()
        told = f"Requests by endpoint and outcome ({outcomes})."
        self._requests = Counter(f"{name}_requests", told, ["endpoint", "outcome"], registry=self.registry)
        self._seconds = Histogram(
            f"{name}_request_seconds",
            "Seconds from admission to the answer, by endpoint.",
            ["endpoint"],
            buckets=buckets,
            registry=self.registry,
        )

    def count(self, endpoint: str, outcome: str, seconds: float) -> None:
        """One request has ended."""
        self._requests.labels(endpoint, outcome).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def gauge(self, name: str, told: str, read: Callable[[], float]) -> None:
        """Adds a figure that is read at each scrape."""
        Gauge(f"{self._name}_{name}", told, registry=self.registry).set_function(read)

    def page(self) -> Response:
        """For a scrape."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)
