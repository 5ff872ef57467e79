"""Prometheus metrics of the connectors, collected from their worker sides and scheduler side.

With each step, vLLM merges the ``KVConnectorStats`` of all ranks and of the scheduler side. It
passes the result to the API server process, where ``build_prom_metrics`` has registered the
metrics. An idle engine takes no steps and reports changes with its next step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

# The names start with "vllm:": vLLM unregisters collectors with this prefix when another engine
# starts in the process (vllm/v1/metrics/prometheus.py, ``unregister_vllm_metrics``).
COUNTERS = {
    "requests": (
        "vllm:tandem_kv_requests",
        "outcome",
        "Requests with a transfer, by outcome. Prefill: sent (the blocks held for decode have been freed, even "
        "if the transfer failed). Decode: received (all KV arrived), recomputed (the transfer failed or was not "
        "possible, so this engine computes the prompt).",
    ),
    "bytes": (
        "vllm:tandem_kv_sent_bytes",
        "group",
        "Bytes of KV in the writes started to decode engines, by KV cache group, all ranks; failed ones included.",
    ),
    "pair_bytes": (
        "vllm:tandem_kv_pair_bytes",
        "peer",
        "Bytes of KV in finished writes, by decode engine id, all ranks.",
    ),
    "pair_seconds": (
        "vllm:tandem_kv_pair_seconds",
        "peer",
        "Time in flight of finished writes, in seconds, by decode engine id, summed over writes and ranks. "
        "pair_bytes divided by it is the bandwidth of one write.",
    ),
    "prompt_tokens": (
        "vllm:tandem_kv_prompt_tokens",
        "source",
        "Prompt tokens of decode requests whose transfer has started, by the source of their KV of full attention: "
        "own_cache, store, transfer. They count even if the transfer or the load fails later.",
    ),
    "writes": (
        "vllm:tandem_kv_writes",
        "outcome",
        "Writes to decode engines by outcome, all ranks: done, slow (done, with device memory at an end, 64 MiB or "
        "more, below 2 GB/s), or failed (also a write that could not be started).",
    ),
    "store_requests": (
        "vllm:tandem_store_requests",
        "outcome",
        "Fetches of prompts from the KV store: hit (KV beyond the engine's own cache was read and verified), declined "
        "(the store has such KV, but computing or transferring it was estimated to be faster) or miss.",
    ),
    "store_tokens": (
        "vllm:tandem_store_tokens",
        "outcome",
        "Prompt tokens looked up in the KV store beyond the engine's own cache: hit (KV read and verified) or miss "
        "(all others).",
    ),
    "store_loaded_bytes": ("vllm:tandem_store_loaded_bytes", "tier", "Bytes read from a tier and verified."),
    "store_loaded_seconds": (
        "vllm:tandem_store_loaded_seconds",
        "tier",
        "Time of reads from a tier, in seconds, summed over objects; store_loaded_bytes divided by it is a bandwidth.",
    ),
    "store_stored_bytes": ("vllm:tandem_store_stored_bytes", "tier", "Bytes written to a tier."),
    "store_stored_seconds": (
        "vllm:tandem_store_stored_seconds",
        "tier",
        "Time of writes to a tier, in seconds, summed over objects; store_stored_bytes divided by it is a bandwidth.",
    ),
    "store_evicted": ("vllm:tandem_store_evicted", "tier", "Objects that this engine evicted to make room."),
    "store_corrupt": ("vllm:tandem_store_corrupt", "tier", "Objects that this engine removed after a failed check."),
    "store_problems": (
        "vllm:tandem_store_problems",
        "kind",
        "Lookups, loads and stores that failed or ended early: late_lookup (a call to a tier), late_load (a request "
        "whose fetch was stopped), failed_load (a read of an object), no_staging_for_load (an object, or a request "
        "that loads a shorter prefix), dropped_store (an object, or its write to one tier, dropped before the write), "
        "failed_store (a write of an object to a tier).",
    ),
}
"""Metric name, label and description, by key in ``TandemStats.data["counts"]``."""

TRANSFERS = (
    "vllm:tandem_kv_transfers",
    "stage",
    "Transfers in progress, by stage; the largest number of all ranks. Producer: early (the prefill request has not "
    "arrived), live (the prompt is queued or computing), held (finished blocks under a lease). Consumer: queued "
    "(the prompt has not started; no blocks), connecting, offered, ending.",
)
GAUGES = {
    "quarantined": (
        "vllm:tandem_kv_quarantined",
        "Failed or cancelled transfers whose blocks on decode cannot be freed because a prefill rank has not confirmed "
        "that it stopped writing; the largest number of all ranks. Their requests no longer wait.",
    ),
    "hanging": (
        "vllm:tandem_kv_hanging",
        "Writes to decode ranks without progress for twice transfer.progress_s. Their transfers are aborted; the "
        "blocks that they read cannot be freed before they end. The largest number of all ranks.",
    ),
    "store_loads": (
        "vllm:tandem_store_pending_loads",
        "Requests with a fetch from the KV store in progress: lookups, or reads of objects.",
    ),
}
"""Metric name and description, by key in ``TandemStats.data["ranks"]``."""

_BY_PEER = ("pair_bytes", "pair_seconds")
_STAGES = ("early", "live", "held", "queued", "connecting", "offered", "ending")
_COUNTED = {*_STAGES, "quarantined", "hanging"}

PEERS_KEPT = 64
"""Maximum number of peers with series, per engine: each start of a decode engine is a new peer."""

ARRIVALS_KEPT = 1024
"""Maximum number of arrivals, of fetches and of adapters in one ``TandemStats``. vLLM merges
reports until it logs them, which may never happen.
"""


@dataclass
class TandemStats(KVConnectorStats):
    """Changes since the last report, in ``data``.

    ``counts``    ``{counter: {label: number}}``
    ``ranks``     ``{"<rank> <connector>": {name: number}}`` of each rank with a change: transfers
                  by stage, ``quarantined`` transfers and ``hanging`` writes. Under the rank
                  ``store``: fetches from the KV store in progress
    ``arrivals``  ``{request id: [asked_at, ended_at, failed]}``: start of the transfer on the first
                  rank and its end on the last, in ``time.monotonic()`` seconds of the engine's
                  host; whether it failed on any rank. A request that failed in the queue has no
                  start: both times are then its end
    ``fetches``   ``{request id: [began_at, ended_at]}``: start and end of the last fetch from the
                  KV store, on the same clock
    ``adapters``  ``{"<id> <path>": identity}`` of LoRA adapters whose identity is new or has
                  changed; empty if it is unknown or ranks differ
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        kept = ("counts", "ranks", "arrivals", "fetches", "adapters")
        self.data: dict[str, Any] = {name: {} for name in kept}

    def count(self, counter: str, label: str, number: float = 1) -> None:
        labels = self.data["counts"].setdefault(counter, {})
        labels[label] = labels.get(label, 0) + number

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def take(self) -> TandemStats | None:
        if self.is_empty():
            return None
        taken = TandemStats(self.data)
        self.reset()
        return taken

    def arrived(self, request_id: str, asked_at: float, ended_at: float, failed: bool) -> None:
        known = self.data["arrivals"].get(request_id, (asked_at, ended_at, failed))
        self._put("arrivals", request_id, [min(asked_at, known[0]), max(ended_at, known[1]), failed or known[2]])

    def fetched(self, request_id: str, began_at: float, ended_at: float) -> None:
        self._put("fetches", request_id, [began_at, ended_at])

    def adapter(self, adapter: str, identity: str) -> None:
        known = self.data["adapters"].get(adapter, identity)
        self._put("adapters", adapter, identity if identity == known else "")

    def _put(self, kind: str, key: str, value: object) -> None:
        kept = self.data[kind]
        kept.pop(key, None)
        if len(kept) >= ARRIVALS_KEPT:
            del kept[next(iter(kept))]
        kept[key] = value

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for counter, labels in other.data["counts"].items():
            for label, number in labels.items():
                self.count(counter, label, number)
        self.data["ranks"] |= other.data["ranks"]
        for request_id, arrival in other.data["arrivals"].items():
            self.arrived(request_id, *arrival)
        for request_id, times in other.data["fetches"].items():
            self.fetched(request_id, *times)
        for adapter, identity in other.data["adapters"].items():
            self.adapter(adapter, identity)
        return self

    def reduce(self) -> dict[str, int | float]:
        counts = self.data["counts"]
        found: dict[str, int | float] = {f"KV {end}": number for end, number in counts.get("requests", {}).items()}
        if "bytes" in counts:
            found["MB sent"] = round(sum(counts["bytes"].values()) / 1e6, 1)
        return found


class RankTally:
    def __init__(self, rank: int) -> None:
        self._rank = str(rank)
        self._stats = TandemStats()
        self._counts: Mapping[str, int] = {}
        self._asked_at: dict[str, float] = {}

    def sent_bytes(self, group: int, number: int) -> None:
        self._stats.count("bytes", str(group), number)

    def write_ended(self, outcome: str) -> None:
        self._stats.count("writes", outcome)

    def written(self, peer: str, size_bytes: int, seconds: float, slow: bool) -> None:
        self.write_ended("slow" if slow else "done")
        self._stats.count("pair_bytes", peer, size_bytes)
        self._stats.count("pair_seconds", peer, seconds)

    def asked(self, request_id: str, now: float) -> None:
        """``ended`` always follows."""
        self._asked_at[request_id] = now

    def ended(self, request_id: str, now: float, failed: bool) -> None:
        self._stats.arrived(request_id, self._asked_at.pop(request_id, now), now, failed)

    def take(self, counts: Mapping[str, int]) -> TandemStats | None:
        """Return the changes, with all ``counts`` if any has changed."""
        now = {key: number for key, number in counts.items() if key in _COUNTED}
        if now != self._counts:
            self._counts = self._stats.data["ranks"][self._rank] = now
        return self._stats.take()


class TandemPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[PromCounter], metric_types[PromGauge]
        self._counters: dict[str, Any] = {
            key: counter(name=name, documentation=text, labelnames=[*labelnames, label])
            for key, (name, label, text) in COUNTERS.items()
        }
        name, label, text = TRANSFERS
        self._transfers: Any = gauge(name=name, documentation=text, labelnames=[*labelnames, label])
        self._held_up: dict[str, Any] = {
            key: gauge(name=name, documentation=text, labelnames=labelnames) for key, (name, text) in GAUGES.items()
        }
        for values, held_up in itertools.product(per_engine_labelvalues.values(), self._held_up.values()):
            held_up.labels(*values).set(0)
        self._ranks: dict[int, dict[str, Mapping[str, int]]] = {}
        self._peers: dict[tuple[int, str], None] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for counter, labels in transfer_stats_data["counts"].items():
            for label, number in labels.items():
                if counter in _BY_PEER:
                    self._keep(engine_idx, label)
                self._counters[counter].labels(*values, label).inc(number)
        if not transfer_stats_data["ranks"]:
            return
        ranks = self._ranks.setdefault(engine_idx, {})
        ranks |= transfer_stats_data["ranks"]
        largest: Counter[str] = Counter()
        for counts in ranks.values():
            largest |= Counter(counts)
        for stage in _STAGES:
            self._transfers.labels(*values, stage).set(largest[stage])
        for key, held_up in self._held_up.items():
            held_up.labels(*values).set(largest[key])

    def _keep(self, engine_idx: int, peer: str) -> None:
        self._peers.pop((engine_idx, peer), None)
        self._peers[engine_idx, peer] = None
        own = [key for key in self._peers if key[0] == engine_idx]
        if len(own) > PEERS_KEPT:
            del self._peers[own[0]]
            for counter in _BY_PEER:
                # Ray's metrics cannot remove a series.
                if hasattr(self._counters[counter], "remove"):
                    self._counters[counter].remove(*self.per_engine_labelvalues[engine_idx], own[0][1])


class MetricHooks:
    """vLLM's hooks, in the API server process, that build a connector's statistics and metrics."""

    _built: ClassVar[TandemPromMetrics | None] = None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TandemStats:
        return TandemStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TandemPromMetrics:
        # A MultiConnector calls this for each class among its children, with the same dictionary.
        # They share their metrics: prometheus_client refuses a second metric of the same name.
        built = MetricHooks._built
        if built is None or built.per_engine_labelvalues is not per_engine_labelvalues:
            built = TandemPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            MetricHooks._built = built
        return built
