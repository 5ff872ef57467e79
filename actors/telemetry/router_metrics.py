"""Prometheus metrics of a router's requests, and its recent requests."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from actors.telemetry.latency_breakdown import LatencyBreakdown

FALLBACKS = frozenset({"no_prefill", "other_identity", "prefill_failed"})
"""Reasons of local requests for which prefill failed, rejected the prompt, had no free slot or does
not match decode.
"""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class _OfModel(Collector):
    """Adds the label `model_name` to a registry's metrics, as in vLLM's."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            for sample in family.samples:
                sample.labels["model_name"] = self._model
            yield family


class RouterMetrics:
    """Metrics of the requests to `model`, or without the setting `models` of all requests."""

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
        self.requests = counter(
            "tandem_requests",
            "Requests by route (remote: sent to a prefill engine; local: decode alone; refused: answered with an "
            "error; left: the client disconnected before its answer started), reason of a local request, and HTTP "
            "status (499 for left).",
            ["route", "reason", "status"],
        )
        self.decisions = counter(
            "tandem_decisions",
            "Routing decisions by route and reason; each attempt counts.",
            ["route", "reason"],
        )
        self.prefill_legs = counter(
            "tandem_prefill_legs",
            "Prefill legs by outcome: done (the prompt is computed), refused (the engine has no free slot or is "
            "stopping), rejected (answered with a 4xx status or without the first token), failed (the engine died, was "
            "silent, or had an error, such as a 5xx status), late (no answer within router.prefill_timeout_s), or "
            "cancelled (decode ended the leg first).",
            ["outcome"],
        )
        self.discards = counter(
            "tandem_discards",
            "Transfers that ended before decode had the KV, so that prefill discards them.",
        )
        self.disconnects = counter(
            "tandem_client_disconnects",
            "Requests whose client disconnected before it had received the whole answer.",
        )
        self.retries = counter(
            "tandem_retries",
            "Legs after whose failure another replica was tried. Reasons for prefill: failed, late, silent "
            "(decode sent nothing after the prompt was computed); for decode: unavailable (the engine failed or was "
            "silent).",
            ["leg", "reason"],
        )
        self.resumed_streams = counter(
            "tandem_resumed_streams",
            "Streams interrupted by a failed engine or handover: resumed (another attempt continued or restarted the "
            "stream), moved (the same, from a stopping engine), failed (no attempt succeeded, or the client "
            "disconnected first), refused (the stream cannot be continued exactly). Unless the client has "
            "disconnected, the last two end with an error.",
            ["outcome"],
        )
        self.resumed_tokens = counter(
            "tandem_resumed_tokens",
            "Tokens that resumed streams had sent before: prefilled (the engine computed them with the prompt), "
            "replayed (it repeated them, one per step) or moved (it received their KV from a stopping engine, or "
            "computed them if that failed).",
            ["way"],
        )
        self.first_tokens = counter(
            "tandem_first_tokens",
            "First tokens that prefill sampled (router.first_token): ended (the token ended the answer), repeated "
            "(decode sampled the same token), replayed (decode sampled another one or did not know its adapter yet, so "
            "the router tried to resume the stream with prefill's token), or refused (decode built another prompt, so "
            "the stream ended with an error). Tokens after which decode did not answer are not counted.",
            ["outcome"],
        )
        self.broken_streams = counter(
            "tandem_broken_streams",
            "Streams that ended with an error after their first event.",
        )
        self.user_config_rejected = gauge(
            "tandem_user_config_rejected",
            "1 while the router's last `user_config` is invalid, so that earlier settings stay in effect.",
        )
        self.ongoing = gauge(
            "tandem_ongoing_requests",
            "Admitted requests that have not ended; excludes requests that need neither a model nor its tokenizer, "
            "such as /v1/models and /health.",
        )
        self.first_byte = histogram(
            "tandem_first_byte_seconds",
            "Time in seconds from a request's arrival in the router to the first bytes of its stream from an engine.",
            ["route"],
        )
        self.breakdown = histogram(
            "tandem_latency_breakdown_seconds",
            "Parts of the time to the first byte of an answer in seconds, by route (docs/observing.md). The parts of "
            "a request sum to the time from its arrival to that byte; absent parts are not observed.",
            ["route", "part"],
        )

        for metric in vars(self).values():
            if getattr(metric, "_labelnames", ()):
                metric.labels = cache(metric.labels)  # a look-up of prometheus_client takes a lock

    def exposition(self) -> str:
        shown: Any = self.registry if self._model is None else _OfModel(self.registry, self._model)
        return generate_latest(shown).decode()

    def observe_breakdown(self, route: str, breakdown: LatencyBreakdown) -> None:
        for part, seconds in breakdown.parts.items():
            self.breakdown.labels(route, part).observe(seconds)

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def counts(self) -> dict[str, int]:
        """Return counts since this router started: requests by route, and other metrics by name.

        Local requests with a reason in FALLBACKS count as `fallback`.
        """
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


KEPT = 200
"""Number of requests of all models that a router replica keeps, of about 2 KB each."""

MAX_ID_CHARACTERS = 80
"""Number of characters to which the access log and the status page cut a client's request id."""


@dataclass(frozen=True)
class Pair:
    """Ids of the engines that served a request.

    `prefill` is None for a local request, `decode` is None for an answer of prefill alone.
    """

    prefill: str | None
    decode: str | None


class RecentRequest(NamedTuple):
    """A request whose answer has started, without an error status."""

    request_id: str
    began_at: float
    """Unix time of arrival in seconds, by this host's clock."""
    endpoint: str
    route: str
    reason: str | None
    status: int
    streams: bool
    pair: Pair
    breakdown: LatencyBreakdown

    def describe(self) -> dict[str, Any]:
        """Return the request as JSON values; names of values in milliseconds end with `_ms`."""
        spans = [[span.part, round(span.begin_s * 1e3, 3), round(span.end_s * 1e3, 3)] for span in self.breakdown.spans]
        own = {name: value for name, value in self._asdict().items() if name not in ("pair", "breakdown")}
        return {**own, **asdict(self.pair), "total_ms": round(self.breakdown.total_s * 1e3, 3), "spans_ms": spans}


def now_unix(monotonic_at: float) -> float:
    """Return the Unix time in seconds of a moment on this host's monotonic clock."""
    return time.time() - (time.monotonic() - monotonic_at)


def newest_of(lists: Iterable[Iterable[dict[str, Any]]], most: int) -> list[dict[str, Any]]:
    return sorted((one for some in lists for one in some), key=lambda one: -one["began_at"])[:most]
