"""Read the status of one engine from the metrics of vLLM and the connector in its actor."""

from collections import defaultdict
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.samples import Sample

SUMS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "quarantined": "vllm:tandem_kv_quarantined",
    "sent_bytes": "vllm:tandem_kv_sent_bytes_total",
    "store_problems": "vllm:tandem_store_problems_total",
}
"""Metrics that are summed over ranks and labels, by the name in the status."""

USAGE = "vllm:kv_cache_usage_perc"
STAGES = "vllm:tandem_kv_transfers"
REQUESTS = "vllm:tandem_kv_requests_total"
PAIR_BYTES, PAIR_SECONDS = "vllm:tandem_kv_pair_bytes_total", "vllm:tandem_kv_pair_seconds_total"
STORE_TOKENS = "vllm:tandem_store_tokens_total"
DRAINED = Gauge("tandem_drained", "1 while an operator drains this engine: it takes no new requests.")

NAMES = (*SUMS.values(), USAGE, STAGES, REQUESTS, PAIR_BYTES, PAIR_SECONDS, STORE_TOKENS)
"""Metrics that `read_status` collects; collecting all would cost more."""


def read_status(registry: CollectorRegistry) -> dict[str, Any]:
    """Return the numbers of the engine with the metrics in `registry`; absent metrics count as 0.

    They are sums over its data-parallel ranks, except where noted, and change at steps only.

    ``waiting``         requests that wait for the batch, for blocks or for KV
    ``cache_usage``     fraction of the KV cache in use, the mean over data-parallel ranks
    ``transfers``       transfers in progress, by stage
    ``quarantined``     transfers with blocks in quarantine
    ``sent_bytes``      bytes of all writes to decode engines since the start, failed ones included
    ``recomputed``      requests computed here because KV did not arrive
    ``pairs``           (bytes, seconds in flight) of finished writes, by decode engine id
    ``store_tokens``    prompt tokens looked up in the KV store: `hit` (read and verified), `miss`
    ``store_problems``  lookups, loads and stores that failed or ended early
    """
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for family in registry.restricted_registry(NAMES).collect():
        for sample in family.samples:
            samples[sample.name].append(sample)

    def by(label: str, name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in samples[name]:
            found[sample.labels[label]] = found.get(sample.labels[label], 0.0) + sample.value
        return found

    usage = [sample.value for sample in samples[USAGE]]
    sizes, seconds = by("peer", PAIR_BYTES), by("peer", PAIR_SECONDS)
    return {
        **{field: int(sum(sample.value for sample in samples[name])) for field, name in SUMS.items()},
        "cache_usage": round(sum(usage) / max(len(usage), 1), 4),
        "transfers": {stage: int(number) for stage, number in by("stage", STAGES).items() if number},
        "recomputed": int(by("outcome", REQUESTS).get("recomputed", 0)),
        "pairs": {peer: (int(sizes.get(peer, 0)), round(seconds.get(peer, 0), 6)) for peer in sizes | seconds},
        "store_tokens": {outcome: int(number) for outcome, number in by("outcome", STORE_TOKENS).items()},
    }
