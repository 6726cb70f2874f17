"""A training step's metrics as sums and counts, which are divided once, after all parts have been added.

Invariant: how the work is split (into micro-batches, mini-batches, refills, ranks) changes metrics only by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean: `sum` divided by `count`, the number of items or their total weight."""

    sum: float
    count: float


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum."""

    value: float


@dataclass(frozen=True, slots=True)
class Pooled:
    """`finish`, a module-level function, of `sums` that are added elementwise: a histogram's percentile, a ratio of
    moments."""

    sums: tuple[float, ...]
    finish: Callable[[tuple[float, ...]], float]


Metric: TypeAlias = Mean | Max | Pooled | float
"""A bare number is a count, which is summed."""

Metrics: TypeAlias = dict[str, Metric]


def add_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Adds up the metrics of all parts.

    Raises:
        TypeError: parts use the same name for different kinds of metric.
    """
    total: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = _add(name, total[name], metric) if name in total else metric
    return total


def _add(name: str, one: Metric, other: Metric) -> Metric:
    if isinstance(one, Mean) and isinstance(other, Mean):
        return Mean(one.sum + other.sum, one.count + other.count)
    if isinstance(one, Max) and isinstance(other, Max):
        return Max(max(one.value, other.value))
    if isinstance(one, Pooled) and isinstance(other, Pooled) and one.finish is other.finish:
        return Pooled(tuple(a + b for a, b in zip(one.sums, other.sums, strict=True)), one.finish)
    if isinstance(one, Mean | Max | Pooled) or isinstance(other, Mean | Max | Pooled):
        raise TypeError(f"metric '{name}' is a {type(one).__name__} here and a {type(other).__name__} there")
    return one + other


def finish_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Converts metrics to numbers; a mean over nothing is left out."""
    return {name: _value(metric) for name, metric in metrics.items() if not isinstance(metric, Mean) or metric.count}


def _value(metric: Metric) -> float:
    if isinstance(metric, Mean):
        return metric.sum / metric.count
    if isinstance(metric, Pooled):
        return metric.finish(metric.sums)
    return float(metric.value if isinstance(metric, Max) else metric)
