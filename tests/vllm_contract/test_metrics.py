"""The workers' counts reach Prometheus as vLLM carries them: in a dict, over ranks and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from actors.replay_log import KvArrivals, KvTimes
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.metrics import ARRIVALS_KEPT, PEERS_KEPT, RankTally, TandemPromMetrics, TandemStats
from tests.vllm_contract.workers import (
    ARRIVED,
    BLOCK_BYTES,
    SENT,
    Worker,
    both_ends,
    let_go,
    results,
    until,
)


@pytest.fixture
def metrics(registered: Callable[..., Any]) -> TandemPromMetrics:
    made: TandemPromMetrics = registered(TandemConnector)
    return made


def carried(stats: dict[str, Any]) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats))


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})


def observe(metrics: TandemPromMetrics, *steps: TandemStats | None) -> None:
    """Carry the stats of one step's ranks to the metrics as vLLM does."""
    ranks = [stats for stats in steps if stats is not None]
    if ranks:
        whole = ranks[0]
        for other in ranks[1:]:
            whole = whole.aggregate(other)
        metrics.observe(carried(whole.to_dict()))


def test_a_transfer_is_counted_from_its_offer_to_its_end(
    metrics: TandemPromMetrics, worker: Callable[..., Worker]
) -> None:
    """Bytes count when they are sent, the write when it ends, and no transfer remains in
    progress.
    """
    producer, consumer = both_ends(worker)
    observe(metrics, producer.runtime.stats())
    assert value("vllm:tandem_kv_sent_bytes_total", group="0") == 2 * BLOCK_BYTES
    assert value("vllm:tandem_kv_writes_total", outcome="done") is None
    assert value("vllm:tandem_kv_transfers", stage="live") == 1
    let_go(producer)
    assert results(consumer) == ARRIVED
    producer.step(finished=[SENT])
    observe(metrics, producer.runtime.stats())
    assert value("vllm:tandem_kv_writes_total", outcome="done") == 1
    peer = consumer.runtime.agent_metadata.incarnation
    assert value("vllm:tandem_kv_pair_bytes_total", peer=peer) == 2 * BLOCK_BYTES
    assert (value("vllm:tandem_kv_pair_seconds_total", peer=peer) or 0) > 0
    assert value("vllm:tandem_kv_transfers", stage="live") == value("vllm:tandem_kv_transfers", stage="held") == 0
    assert producer.runtime.stats() is None


def test_what_is_held_up_shows_until_it_ends(metrics: TandemPromMetrics, impatient: Callable[..., Worker]) -> None:
    """A write hangs after hang_s. Its producer does not answer the consumer's Cancel meanwhile, so
    the consumer's blocks are in quarantine.
    """
    producer, consumer = both_ends(impatient)

    def held_up() -> list[tuple[int, float | None]]:
        found = []
        for worker, kind in ((consumer, "quarantined"), (producer, "hanging")):
            observe(metrics, worker.runtime.stats())
            found.append((worker.runtime.counts()[kind], value(f"vllm:tandem_kv_{kind}")))
        return found

    assert held_up() == [(0, 0), (0, 0)]
    consumer.step(aborts=["r"])
    until(lambda: held_up() == [(1, 1), (1, 1)])
    let_go(producer)
    until(lambda: held_up() == [(0, 0), (0, 0)])


def test_ranks_add_up_what_they_count_and_share_what_they_hold(metrics: TandemPromMetrics) -> None:
    """Two ranks have the same transfers, each with its own bytes."""
    ranks = RankTally(0), RankTally(1)
    for rank, size in zip(ranks, (10, 20), strict=True):
        rank.sent_bytes(1, size)
    observe(metrics, *(rank.take({"held": 3, "remembered": 9}) for rank in ranks))
    assert value("vllm:tandem_kv_sent_bytes_total", group="1") == 30
    assert value("vllm:tandem_kv_transfers", stage="held") == 3
    for held, shown in (((2, 3), 3), ((2, 0), 2)):  # a silent rank has not changed
        observe(metrics, *(rank.take({"held": count}) for rank, count in zip(ranks, held, strict=True)))
        assert value("vllm:tandem_kv_transfers", stage="held") == shown


def test_peers_are_few(metrics: TandemPromMetrics) -> None:
    """Each start of a decode engine is another peer: the least recently used series are removed."""
    tally = RankTally(0)
    for number in range(PEERS_KEPT + 10):
        tally.written("busy", 1, 0.1, slow=False)
        tally.written(f"e{number}", 1, 0.1, slow=False)
        observe(metrics, tally.take({}))
    peers = {
        sample.labels["peer"] for family in REGISTRY.collect() for sample in family.samples if "peer" in sample.labels
    }
    assert len(peers) == PEERS_KEPT
    assert {"busy", f"e{PEERS_KEPT + 9}"} <= peers
    assert value("vllm:tandem_kv_pair_bytes_total", peer="busy") == PEERS_KEPT + 10


def test_kv_has_arrived_when_the_last_rank_has_it() -> None:
    """A transfer starts with the first rank's request, and fails if it fails on one rank."""
    ranks = RankTally(0), RankTally(1)
    for rank, asked_at, ended_at in zip(ranks, (10.0, 11.0), (15.0, 14.0), strict=True):
        rank.asked("r", asked_at)
        rank.asked("s", asked_at)
        rank.ended("r", ended_at, failed=False)
    ranks[1].ended("s", 20.0, failed=True)
    ranks[0].ended("s", 21.0, failed=False)
    first, second = (rank.take({}) or TandemStats() for rank in ranks)
    second.fetched("r", 9.0, 9.5)
    first.adapter("1 /a", "x")
    for adapter, identity in (("1 /a", "y"), ("2 /b", "z")):
        second.adapter(adapter, identity)
    found = carried(first.aggregate(second).to_dict())
    assert found["adapters"] == {"1 /a": "", "2 /b": "z"}, "ranks that differ know nothing"
    arrivals = KvArrivals()
    for request_id in ("r", "s", "never"):
        arrivals.expect(request_id)
    arrivals.observe(found)
    arrivals.observe(None)
    assert arrivals.take("r") == KvTimes((10.0, 15.0, False), (9.0, 9.5))
    assert arrivals.take("s") == KvTimes((10.0, 21.0, True))
    assert arrivals.take("never") == KvTimes()
    arrivals.observe(found)
    assert arrivals.take("r") == KvTimes(), "an unexpected transfer is not recorded"


def test_arrivals_that_nobody_asks_for_do_not_pile_up() -> None:
    """vLLM adds reports up until its log reads them, which it may never do."""
    whole = TandemStats()
    for number in range(3000):
        step = TandemStats()
        step.arrived(f"r{number}", 1.0, 2.0, False)
        whole.aggregate(step)
    assert len(whole.data["arrivals"]) == ARRIVALS_KEPT
    assert "r2999" in whole.data["arrivals"]


def test_the_log_line_of_an_interval_adds_its_steps() -> None:
    """vLLM itself adds the steps' stats up for its periodic line."""
    steps = TandemStats(), TandemStats()
    for stats in steps:
        stats.count("requests", "received", 2)
        stats.count("bytes", "0", 1_500_000)
    rebuilt = [TandemConnector.build_kv_connector_stats(stats.to_dict()) for stats in steps]
    assert rebuilt[0].aggregate(rebuilt[1]).reduce() == {"KV received": 4, "MB sent": 3.0}
    assert TandemConnector.build_kv_connector_stats(None).is_empty()
