"""`RequestMetrics`: a server's request metrics in Prometheus' format.

Invariant: `<server>_requests_total` counts each finished request exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response


class RequestMetrics:
    """The metrics of the server `name`; `outcomes` describes the outcomes of a request, and `buckets` are those of the
    histogram of seconds."""

    def __init__(self, name: str, outcomes: str, buckets: Sequence[float]) -> None:
        self._name, self.registry = name, CollectorRegistry()
        about = f"Requests by endpoint and outcome ({outcomes})."
        self._requests = Counter(f"{name}_requests", about, ["endpoint", "outcome"], registry=self.registry)
        self._seconds = Histogram(
            f"{name}_request_seconds",
            "Seconds from admission to the answer, by endpoint.",
            ["endpoint"],
            buckets=buckets,
            registry=self.registry,
        )

    def count(self, endpoint: str, outcome: str, seconds: float) -> None:
        """Counts a request that has ended."""
        self._requests.labels(endpoint, outcome).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def gauge(self, name: str, told: str, read: Callable[[], float]) -> None:
        """Adds a gauge described by `told`; `read` is called at each scrape."""
        Gauge(f"{self._name}_{name}", told, registry=self.registry).set_function(read)

    def page(self) -> Response:
        """Returns the response to a scrape."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)
