"""Read values of Prometheus metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge


def value_of(metric: Counter | Gauge) -> float:
    """Return the value of a metric without labels, or of a metric's child for one set of labels."""
    (found,) = metric.collect()
    return found.samples[0].value
