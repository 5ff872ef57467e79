"""State of one engine, from the metrics of vLLM and the connector in its actor's process."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

STAGES = "vllm:tandem_kv_transfers"
NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    STAGES,
    "vllm:tandem_kv_quarantined",
    "vllm:tandem_kv_requests_total",
    "vllm:tandem_kv_sent_bytes_total",
    "vllm:tandem_kv_pair_bytes_total",
    "vllm:tandem_kv_pair_seconds_total",
)
"""Metrics that are read; asking for these is cheaper than asking for all."""


@dataclass(frozen=True)
class EngineStatus:
    """Current numbers of one engine; vLLM's are as old as its last step."""

    running: int
    """Requests in the scheduler's batch."""
    waiting: int
    """Requests that wait for a slot in the batch or for KV."""
    cache_usage: float
    """Fraction of the KV cache in use."""
    transfers: dict[str, int]
    """Transfers under way, by stage; stages without any are left out."""
    quarantined: int
    """Requests whose blocks cannot be freed yet."""
    sent_bytes: int
    """KV sent since the engine started."""
    recomputed: int
    """Requests whose transfer failed, since the engine started."""
    pairs: dict[str, tuple[int, float]]
    """Bytes sent to each engine, and seconds in which writes were under way, since the start."""


def read_status(registry: CollectorRegistry) -> EngineStatus:
    """Return the status of the engine whose metrics are in `registry`."""
    numbers: dict[str, float] = {}
    transfers: dict[str, int] = {}
    sent: dict[str, list[float]] = {}
    recomputed = 0.0
    for family in registry.restricted_registry(NAMES).collect():
        for sample in family.samples:
            numbers[sample.name] = numbers.get(sample.name, 0.0) + sample.value
            if sample.name == STAGES and sample.value:
                transfers[sample.labels["stage"]] = int(sample.value)
            elif sample.name == "vllm:tandem_kv_requests_total" and sample.labels["outcome"] == "recomputed":
                recomputed += sample.value
            elif sample.name == "vllm:tandem_kv_pair_bytes_total":
                sent.setdefault(sample.labels["peer"], [0, 0])[0] += sample.value
            elif sample.name == "vllm:tandem_kv_pair_seconds_total":
                sent.setdefault(sample.labels["peer"], [0, 0])[1] += sample.value
    return EngineStatus(
        running=int(numbers.get("vllm:num_requests_running", 0)),
        waiting=int(numbers.get("vllm:num_requests_waiting", 0)),
        cache_usage=round(numbers.get("vllm:kv_cache_usage_perc", 0.0), 4),
        transfers=transfers,
        quarantined=int(numbers.get("vllm:tandem_kv_quarantined", 0)),
        sent_bytes=int(numbers.get("vllm:tandem_kv_sent_bytes_total", 0)),
        recomputed=int(recomputed),
        pairs={peer: (int(size), round(seconds, 6)) for peer, (size, seconds) in sent.items()},
    )
