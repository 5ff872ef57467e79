"""One Prometheus exposition out of many processes', labelled by role and replica."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Source = tuple[str, str, str]
"""Role, replica id and the exposition of one process."""


def merge(sources: Iterable[Source]) -> str:
    """All samples of `sources` under their families, each with the labels `role` and `replica`."""
    registry = CollectorRegistry()
    registry.register(_Merged(list(sources)))
    return generate_latest(registry).decode()


class _Merged(Collector):
    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for role, replica, text in self._sources:
            for family in text_string_to_metric_families(text):
                if family.name.endswith("_created"):  # when a series began: one more line for each
                    continue
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "role": role, "replica": replica}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()
