"""What the router counts, in a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """The router's counters; `registry` is what /metrics exposes of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tandem_requests",
            "Requests by the way they were served (remote: prefill apart, local: decode alone), the reason "
            "for a local one, and the HTTP status.",
            ["route", "reason", "status"],
            registry=self.registry,
        )
        self.decisions = Counter(
            "tandem_decisions",
            "Decisions by route and reason; a request that is tried again is decided on again.",
            ["route", "reason"],
            registry=self.registry,
        )
        self.prefill_legs = Counter(
            "tandem_prefill_legs",
            "Prefill legs by their end: done, rejected (an HTTP error), failed, late, or cancelled.",
            ["outcome"],
            registry=self.registry,
        )
        self.discards = Counter(
            "tandem_discards",
            "Transfers that were given up because decode did not take them over.",
            registry=self.registry,
        )
        self.disconnects = Counter(
            "tandem_client_disconnects",
            "Requests whose client went away before the end of its answer.",
            registry=self.registry,
        )
        self.retries = Counter(
            "tandem_retries",
            "Legs that were sent to another replica: prefill legs that failed, were late or left decode silent; decode "
            "legs whose engine became unavailable.",
            ["leg", "reason"],
            registry=self.registry,
        )
        self.resumed_streams = Counter(
            "tandem_resumed_streams",
            "Streams whose decode engine died: resumed on another, failed (no engine in time), or refused (they "
            "could not go on exactly); the latter two ended with an error event.",
            ["outcome"],
            registry=self.registry,
        )
        self.broken_streams = Counter(
            "tandem_broken_streams",
            "Responses that ended with an error after their first byte.",
            registry=self.registry,
        )
        self.ongoing = Gauge("tandem_ongoing_requests", "Requests in the router.", registry=self.registry)
        self.first_byte = Histogram(
            "tandem_first_byte_seconds",
            "From a request's arrival in the router to the first byte of its answer's body.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
