"""The router's records of recent requests, and an engine's status."""

from __future__ import annotations

import json

from prometheus_client import CollectorRegistry, Counter, Gauge

from actors.telemetry.engine_status import read_status
from actors.telemetry.latency_breakdown import LatencyBreakdown, Span
from actors.telemetry.router_metrics import Pair, RecentRequest, newest_of


def record(number: int, prefill: str | None = "p1") -> RecentRequest:
    breakdown = LatencyBreakdown((Span("router", 0, 0.001), Span("prefill", 0.001, 0.0405)))
    reason = None if prefill else "n"
    route = "remote" if prefill else "local"
    return RecentRequest(
        f"r{number}", 1000.0 + number, "/v1/completions", route, reason, 200, True, Pair(prefill, "d1"), breakdown
    )


def test_a_record_is_json_in_milliseconds() -> None:
    """The record has no prompt."""
    described = record(7).describe()
    assert json.loads(json.dumps(described)) == {
        "request_id": "r7",
        "began_at": 1007.0,
        "endpoint": "/v1/completions",
        "route": "remote",
        "reason": None,
        "status": 200,
        "streams": True,
        "prefill": "p1",
        "decode": "d1",
        "total_ms": 40.5,
        "spans_ms": [["router", 0, 1.0], ["prefill", 1.0, 40.5]],
    }


def test_several_routers_requests_are_one_list() -> None:
    """The list has the newest requests first, from any router."""
    lists = [[record(number).describe() for number in numbers] for numbers in ((5, 2), (4, 3, 1))]
    assert [one["request_id"] for one in newest_of(lists, 4)] == ["r5", "r4", "r3", "r2"]


def test_an_engines_load_is_read_out_of_its_metrics() -> None:
    """The sum over data-parallel ranks, the mean of cache usage; a missing metric counts zero."""
    registry = CollectorRegistry()
    for name, value in (("num_requests_running", 3), ("num_requests_waiting", 2), ("kv_cache_usage_perc", 0.25)):
        gauge = Gauge(f"vllm:{name}", name, ["engine"], registry=registry)
        gauge.labels("0").set(value)
        gauge.labels("1").set(3 * value)
    stages = Gauge("vllm:tandem_kv_transfers", "t", ["engine", "stage"], registry=registry)
    stages.labels("0", "offered").set(2)
    stages.labels("1", "offered").set(1)
    stages.labels("0", "ending").set(0)
    ends = Counter("vllm:tandem_kv_requests", "r", ["outcome"], registry=registry)
    ends.labels("received").inc(9)
    ends.labels("recomputed").inc(1)
    for name, number in (("pair_bytes", 5000), ("pair_seconds", 0.5)):
        Counter(f"vllm:tandem_kv_{name}", name, ["peer"], registry=registry).labels("e1").inc(number)
    looked_up = Counter("vllm:tandem_store_tokens", "s", ["engine", "outcome"], registry=registry)
    for core, outcome, tokens in (("0", "hit", 512), ("1", "hit", 256), ("0", "miss", 40)):
        looked_up.labels(core, outcome).inc(tokens)
    problems = Counter("vllm:tandem_store_problems", "p", ["kind"], registry=registry)
    for kind in ("late_load", "dropped_store"):
        problems.labels(kind).inc()
    assert read_status(registry) == {
        "running": 12,
        "waiting": 8,
        "cache_usage": 0.5,
        "transfers": {"offered": 3},
        "quarantined": 0,
        "sent_bytes": 0,
        "recomputed": 1,
        "pairs": {"e1": (5000, 0.5)},
        "store_tokens": {"hit": 768, "miss": 40},
        "store_problems": 2,
    }
    nothing = read_status(CollectorRegistry())
    assert (nothing["store_tokens"], nothing["running"]) == ({}, 0)
