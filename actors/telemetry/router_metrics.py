"""Prometheus metrics of the router, in a registry of their own."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from actors.telemetry.latency_breakdown import LatencyBreakdown

FALLBACKS = frozenset({"no_prefill", "prefill_failed"})
"""Reasons of local requests for which no prefill engine was available or succeeded."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class _OfModel(Collector):
    """Collector of a registry's metrics that adds the label `model_name`, as in vLLM's metrics."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            for sample in family.samples:
                sample.labels["model_name"] = self._model
            yield family


class RouterMetrics:
    """Metrics of all requests in the router, or of requests to `model`; `/metrics` exposes them."""

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tandem_requests",
            "Requests by route (remote: sent to a prefill engine, local: decode alone, refused: answered with an "
            "error, left: the client disconnected before its answer started), reason of a local one, and HTTP status "
            "(499 for left).",
            ["route", "reason", "status"],
            registry=self.registry,
        )
        self.decisions = Counter(
            "tandem_decisions",
            "Routing decisions by route and reason; each attempt counts.",
            ["route", "reason"],
            registry=self.registry,
        )
        self.prefill_legs = Counter(
            "tandem_prefill_legs",
            "Prefill legs by outcome: done, refused (the engine has no free slot or is stopping), rejected (answered "
            "with a 4xx status or without the first token), failed, late, or cancelled.",
            ["outcome"],
            registry=self.registry,
        )
        self.discards = Counter(
            "tandem_discards",
            "Transfers discarded because decode did not fetch them.",
            registry=self.registry,
        )
        self.disconnects = Counter(
            "tandem_client_disconnects",
            "Requests whose client disconnected before the end of its answer.",
            registry=self.registry,
        )
        self.retries = Counter(
            "tandem_retries",
            "Legs retried on another replica: prefill legs that failed, were late or left decode silent; decode "
            "legs whose engine became unavailable.",
            ["leg", "reason"],
            registry=self.registry,
        )
        self.resumed_streams = Counter(
            "tandem_resumed_streams",
            "Streams whose engine failed: resumed (another attempt continued the stream), failed (no engine in time), "
            "or refused (no exact continuation); the latter two ended with an error.",
            ["outcome"],
            registry=self.registry,
        )
        self.first_tokens = Counter(
            "tandem_first_tokens",
            "First tokens that prefill sampled (router.first_token): ended (the answer had no other token), repeated "
            "(decode sampled the same token), or replayed (decode sampled another one: the stream was resumed).",
            ["outcome"],
            registry=self.registry,
        )
        self.broken_streams = Counter(
            "tandem_broken_streams",
            "Responses that ended with an error after their first byte.",
            registry=self.registry,
        )
        self.user_config_rejected = Gauge(
            "tandem_user_config_rejected",
            "1 while the router's last `user_config` is refused and earlier settings are in effect.",
            registry=self.registry,
        )
        self.ongoing = Gauge("tandem_ongoing_requests", "Requests in the router.", registry=self.registry)
        self.first_byte = Histogram(
            "tandem_first_byte_seconds",
            "Time from a request's arrival in the router to the first byte of the body of a streamed answer.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.breakdown = Histogram(
            "tandem_latency_breakdown_seconds",
            "Parts of the time to the first byte of an answer, by route (docs/observing.md). The parts of a request "
            "sum to the time from its arrival to that byte; absent parts are not observed.",
            ["route", "part"],
            buckets=SECONDS,
            registry=self.registry,
        )

    def exposition(self) -> str:
        """Return the metrics as text, with the label `model_name` if they belong to one model."""
        shown: Any = self.registry if self._model is None else _OfModel(self.registry, self._model)
        return generate_latest(shown).decode()

    def observe_breakdown(self, route: str, breakdown: LatencyBreakdown) -> None:
        """Observe the breakdown of one request."""
        for part, seconds in breakdown.parts.items():
            self.breakdown.labels(route, part).observe(seconds)

    def value(self, name: str, **labels: str) -> float:
        """Return the value of one series; 0 if it does not exist yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def counts(self) -> dict[str, int]:
        """Return counts since this router started: requests by route, fallbacks, and failures."""
        counts: dict[str, int] = {"remote": 0, "local": 0, "fallback": 0, "refused": 0, "left": 0}
        for sample in next(iter(self.requests.collect())).samples:
            if sample.name.endswith("_total"):
                route = sample.labels["route"]
                kind = "fallback" if sample.labels["reason"] in FALLBACKS else route
                counts[kind] = counts.get(kind, 0) + int(sample.value)
        for family in (self.retries, self.disconnects, self.broken_streams, self.resumed_streams, self.discards):
            name = next(iter(family.collect())).name.removeprefix("tandem_")
            counts[name] = sum(int(s.value) for m in family.collect() for s in m.samples if s.name.endswith("_total"))
        return counts
