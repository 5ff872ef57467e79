"""Read the status of one engine from the metrics of vLLM and the connector in its actor."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

STAGES = "vllm:tandem_kv_transfers"
STORE_TOKENS = "vllm:tandem_store_tokens_total"
STORE_PROBLEMS = "vllm:tandem_store_problems_total"
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
    STORE_TOKENS,
    STORE_PROBLEMS,
)
"""Metrics that `read_status` collects; collecting all would cost more."""


@dataclass(frozen=True)
class EngineStatus:
    """Current numbers of one engine, summed over its data-parallel ranks unless stated otherwise.

    vLLM and the connector update them at steps only.

    ``running``      requests in the schedulers' batches
    ``waiting``      requests that wait for the batch, for blocks or for KV
    ``cache_usage``  fraction of the KV cache in use, the mean over data-parallel ranks
    ``transfers``    transfers in progress, by stage; stages without any are omitted
    ``quarantined``  transfers with blocks in quarantine
    ``sent_bytes``   KV bytes of the writes to decode engines started since the engine's start,
                     failed ones included
    ``recomputed``   requests since the start whose transfer failed or was not possible, so that
                     this engine computed the prompt
    ``pairs``        (bytes of finished writes, seconds in flight summed over these writes) since
                     the start, by decode engine id, for engines whose series the connector keeps
    ``store_tokens``    prompt tokens looked up in the KV store since the start: ``hit`` (read
                        and verified), ``miss``; empty without a store
    ``store_problems``  lookups, loads and stores that failed or ended early since the start
    """

    running: int
    waiting: int
    cache_usage: float
    transfers: dict[str, int]
    quarantined: int
    sent_bytes: int
    recomputed: int
    pairs: dict[str, tuple[int, float]]
    store_tokens: dict[str, int]
    store_problems: int


def read_status(registry: CollectorRegistry) -> EngineStatus:
    """Return the status of the engine with the metrics in `registry`; absent metrics count as 0."""
    numbers: dict[str, float] = {}
    transfers: dict[str, int] = {}
    sent: dict[str, list[float]] = {}
    store_tokens: dict[str, int] = {}
    ranks = 0
    recomputed = 0.0
    for family in registry.restricted_registry(NAMES).collect():
        for sample in family.samples:
            numbers[sample.name] = numbers.get(sample.name, 0.0) + sample.value
            ranks += sample.name == "vllm:kv_cache_usage_perc"
            if sample.name == STAGES and sample.value:
                stage = sample.labels["stage"]
                transfers[stage] = transfers.get(stage, 0) + int(sample.value)
            elif sample.name == "vllm:tandem_kv_requests_total" and sample.labels["outcome"] == "recomputed":
                recomputed += sample.value
            elif sample.name == STORE_TOKENS:
                outcome = sample.labels["outcome"]
                store_tokens[outcome] = store_tokens.get(outcome, 0) + int(sample.value)
            elif sample.name == "vllm:tandem_kv_pair_bytes_total":
                sent.setdefault(sample.labels["peer"], [0, 0])[0] += sample.value
            elif sample.name == "vllm:tandem_kv_pair_seconds_total":
                sent.setdefault(sample.labels["peer"], [0, 0])[1] += sample.value
    return EngineStatus(
        running=int(numbers.get("vllm:num_requests_running", 0)),
        waiting=int(numbers.get("vllm:num_requests_waiting", 0)),
        cache_usage=round(numbers.get("vllm:kv_cache_usage_perc", 0.0) / max(ranks, 1), 4),
        transfers=transfers,
        quarantined=int(numbers.get("vllm:tandem_kv_quarantined", 0)),
        sent_bytes=int(numbers.get("vllm:tandem_kv_sent_bytes_total", 0)),
        recomputed=int(recomputed),
        pairs={peer: (int(size), round(seconds, 6)) for peer, (size, seconds) in sent.items()},
        store_tokens=store_tokens,
        store_problems=int(numbers.get(STORE_PROBLEMS, 0)),
    )
