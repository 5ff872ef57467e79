"""TandemMultiConnector beside vLLM's MultiConnector, and the metrics of Tandem's children."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorMetadata
from vllm.forward_context import ForwardContext
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.request import Request, RequestStatus

from actors.replay_log import KvArrivals, KvTimes
from connectors.codec import encode_agent_metadata
from connectors.errors import ConfigurationError
from connectors.protocol.agent_metadata import AgentMetadata
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.kv_store.worker import SpoiledSteps
from connectors.vllm_hma.metrics import ARRIVALS_KEPT, PEERS_KEPT, RankTally, TandemPromMetrics, TandemStats
from connectors.vllm_hma.multi_connector import MultiHandshakeMetadata, TandemMultiConnector
from connectors.vllm_hma.orders import EncodedAgentMetadata, Orders
from connectors.vllm_hma.store_connector import TandemStoreConnector
from testing.connector_state import snapshot
from tests.campaigns.schedules.scheduling import Engine
from tests.vllm_contract.caches import BLOCK_TOKENS, cache_config, child, connector_config, full, vllm_config
from tests.vllm_contract.stored_prompt import CACHE
from tests.vllm_contract.workers import (
    ARRIVED,
    BLOCK_BYTES,
    IDENTITY,
    SENT,
    Worker,
    both_ends,
    layout_of,
    let_go,
    results,
    sends_nothing_of_a_spoiled_step,
    until,
)

# ---- metrics -------------------------------------------------------------------------------------


def collectors() -> set[Any]:
    return set(REGISTRY._collector_to_names)  # noqa: SLF001 - prometheus_client lists samples only


def build(kind: Any, **extra: Any) -> Any:
    types: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = VllmConfig(kv_transfer_config=connector_config(kind.__name__, **extra))
    return kind.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})


@pytest.fixture
def registered() -> Iterator[Callable[..., Any]]:
    unregister_vllm_metrics()  # metrics of an engine that other tests started in this process
    known = collectors()
    yield build
    for collector in collectors() - known:
        REGISTRY.unregister(collector)


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
    first.fetched("r", 9.0, 9.5)
    found = carried(first.aggregate(second).to_dict())
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


def test_a_second_engine_of_a_process_registers_its_own(metrics: TandemPromMetrics) -> None:
    """vLLM unregisters the metrics of the previous engine."""
    unregister_vllm_metrics()
    second = build(TandemConnector)
    tally = RankTally(0)
    tally.write_ended("done")
    observe(second, tally.take({}))
    assert value("vllm:tandem_kv_writes_total", outcome="done") == 1


def test_the_log_line_of_an_interval_adds_its_steps() -> None:
    """vLLM itself adds the steps' stats up for its periodic line."""
    steps = TandemStats(), TandemStats()
    for stats in steps:
        stats.count("requests", "received", 2)
        stats.count("bytes", "0", 1_500_000)
    rebuilt = [TandemConnector.build_kv_connector_stats(stats.to_dict()) for stats in steps]
    assert rebuilt[0].aggregate(rebuilt[1]).reduce() == {"KV received": 4, "MB sent": 3.0}
    assert TandemConnector.build_kv_connector_stats(None).is_empty()


# ---- tandem multi connector ----------------------------------------------------------------------


BOUND = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_host": "h", "remote_port": 1}
TANDEM, STORE = child(), child("TandemStoreConnector")
PROMPT = list(range(10, 10 + 4 * BLOCK_TOKENS))
ENCODED = EncodedAgentMetadata(encode_agent_metadata(AgentMetadata("me", IDENTITY, layout_of(1 << 20), "memory", b"")))


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """A child that returns ``answers`` in turn, the last one repeatedly, and records its calls."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.answers: list[int | None] = list(self._kv_transfer_config.kv_connector_extra_config["answers"])
        self.allocated: list[int] = []
        self.preempted: list[KVConnectorMetadata] = []
        self.not_loaded: set[int] = set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        found, self.not_loaded = self.not_loaded, set()
        return found

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.allocated.append(num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.preempted.append(kv_connector_metadata)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


def scripted(*answers: int | None) -> dict[str, Any]:
    return child("ScriptedConnector", answers=list(answers)) | {"kv_connector_module_path": __name__}


def example(folder: Path) -> dict[str, Any]:
    return child("ExampleConnector", shared_storage_path=str(folder)) | {"kv_connector_module_path": None}


Make = Callable[..., MultiConnector]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[MultiConnector] = []

    def make_one(
        kind: type[MultiConnector],
        *children: dict[str, Any],
        hma: bool = True,
        role: Any = None,
        kv_role: Any = "kv_both",
        **extra: Any,
    ) -> MultiConnector:
        transfer = connector_config(kind.__name__, kv_role, connectors=list(children), **extra)
        config = vllm_config.__wrapped__(kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=not hma)
        made.append(kind(config, role or KVConnectorRole.SCHEDULER, cache_config((["f"], full()))))
        return made[-1]

    yield make_one
    for connector in made:
        connector.shutdown()


def request(**params: Any) -> Request:
    extra = {"kv_transfer_params": params} if params else None
    return Request("r", PROMPT, SamplingParams(max_tokens=1, extra_args=extra), None)


def tandem_of(connector: MultiConnector, index: int = 1) -> TandemConnector:
    tandem = connector.sub_connectors[index]
    assert isinstance(tandem, TandemConnector)
    return tandem


def scripted_of(connector: MultiConnector) -> list[ScriptedConnector]:
    return [each for each in connector.sub_connectors if isinstance(each, ScriptedConnector)]


def ask(connector: MultiConnector, asked: Request) -> tuple[int | None, int | None]:
    """(matched tokens, number of the child that will load them)."""
    tokens, _ = connector.get_num_new_matched_tokens(asked, 0)
    return tokens, connector._requests_to_connector.get("r")  # noqa: SLF001 - vLLM's, and a subclass's contract


@pytest.mark.parametrize(
    ("answers", "weights", "ours", "theirs"),
    [
        # Both choose the only child with tokens.
        ((0, 64), [1, 1], (64, 1), (64, 1)),
        # The larger hit, not the first.
        ((16, 64), [1, 1], (64, 1), (16, 0)),
        # 16 tokens at weight 5 are more than 64 at weight 1.
        ((16, 64), [5, 1], (16, 0), (16, 0)),
        # Equal scores: the first.
        ((64, 32), [1, 2], (64, 0), (64, 0)),
        # A child that has not answered does not delay the others, with a hit or without.
        ((None, 32), [9, 1], (32, 1), (None, None)),
        ((None, 0), [9, 1], (0, None), (None, None)),
        # None has answered.
        ((None, None), [1, 1], (None, None), (None, None)),
    ],
)
def test_the_choice_beside_vllms(
    make: Make,
    answers: tuple[int | None, ...],
    weights: list[float],
    ours: tuple[int | None, int | None],
    theirs: tuple[int | None, int | None],
) -> None:
    children = [scripted(answer) for answer in answers]
    assert ask(make(TandemMultiConnector, *children, load_weights=weights), request()) == ours
    assert ask(make(MultiConnector, *children), request()) == theirs


@pytest.mark.parametrize("kind", [TandemMultiConnector, MultiConnector])
def test_tandems_children_share_their_metrics(registered: Callable[..., Any], kind: type[MultiConnector]) -> None:
    """prometheus_client refuses two metrics of one name, and the server did not start."""
    metrics = registered(kind, connectors=[TANDEM, STORE])
    log = KVConnectorLogging(connector_config(kind.__name__, connectors=[TANDEM, STORE]))
    for name in ("TandemConnector", "TandemStoreConnector"):
        stats = TandemStats()
        stats.count("store_tokens", "hit", 5)
        metrics.observe(carried({name: stats.to_dict()}))
        log.observe(carried({name: stats.to_dict()}))
    assert value("vllm:tandem_store_tokens_total", outcome="hit") == 10
    assert not log.transfer_stats_accumulator.is_empty()


@pytest.mark.parametrize("kind", [TandemMultiConnector, MultiConnector])
@pytest.mark.parametrize("first", ["TandemConnector", "TandemStoreConnector"])
def test_children_do_not_replace_each_others_numbers(
    make: Make, registered: Callable[..., Any], tmp_path: Path, kind: type[MultiConnector], first: str
) -> None:
    names = (first, "TandemStoreConnector")
    children = [child(name, store={"path": str(tmp_path / f"{i}"), "chunk_tokens": 16}) for i, name in enumerate(names)]
    connector, metrics = make(kind, *children), registered(kind, connectors=children)
    running = []
    for index in range(2):
        store = tandem_of(connector, index).store
        store.publish([CACHE])
        running.append(store.store.running)
    for numbers in ((0, 1), (3, 0), (3, 2), (0, 2), (0, 0)):
        for fetches, number in zip(running, numbers, strict=True):
            fetches.clear()
            fetches.update(range(number))
        stats = connector.get_kv_connector_stats()
        assert stats is not None
        metrics.observe(carried(stats.to_dict()))
        assert value("vllm:tandem_store_pending_loads") == max(numbers)


def test_a_child_that_answers_late_is_chosen_then(make: Make) -> None:
    """The request was not scheduled in the first step, and the choice of that step is discarded."""
    connector = make(TandemMultiConnector, scripted(None, None, 96), scripted(None, 32, 0))
    asked = request()
    assert [ask(connector, asked) for _ in range(3)] == [(None, None), (32, 1), (96, 0)]
    connector.update_state_after_alloc(asked, KVCacheBlocks(([],)), 96)
    assert [each.allocated for each in scripted_of(connector)] == [[96], [0]]


def test_tandem_beside_a_store(make: Make) -> None:
    """A bound transfer offers all tokens but the last; more weight lets fewer tokens win."""
    for weight, chosen in ((1, 0), (3, 1)):
        connector = make(TandemMultiConnector, TANDEM, scripted(2 * BLOCK_TOKENS), load_weights=[1, weight])
        asked = request(**BOUND, transfer_id="t")
        connector.on_new_request(asked)
        assert ask(connector, asked) == ((len(PROMPT) - 1, 0) if chosen == 0 else (2 * BLOCK_TOKENS, 1))
        connector.update_state_after_alloc(asked, KVCacheBlocks(([],)), 0 if chosen else len(PROMPT) - 1)
        # The transfer that was not chosen is released at once: prefill holds no blocks for it.
        found = snapshot(tandem_of(connector, 0).scheduler)
        assert found.consumptions == frozenset()
        assert found.receptions == (frozenset() if chosen else {"r"})


def test_a_store_is_waited_for_while_no_other_child_has_tokens(make: Make, tmp_path: Path) -> None:
    """A store's lookups answer in a later step, while a child without tokens answers at once."""
    settings = {"path": str(tmp_path / "store"), "chunk_tokens": 16, "lookup_s": 5.0}
    connector = make(TandemMultiConnector, scripted(0, 0, 32), child("TandemStoreConnector", store=settings))
    tandem_of(connector).store.publish([CACHE])
    asked = request()
    connector.on_new_request(asked)
    assert ask(connector, asked) == (None, None)
    until(lambda: ask(connector, asked)[0] is not None)


def test_a_deferred_transfer_is_waited_for(make: Make) -> None:
    """Only a child with tokens ends the wait of a deferred transfer.

    A transfer is deferred while it waits for its turn, or while another choice receives its prompt.
    """
    connector = make(TandemMultiConnector, TANDEM, scripted(0, 0, 0, 16))
    legs = {name: {"kv_transfer_params": BOUND | {"transfer_id": name[:2]}} for name in ("t1", "t2", "t2 b")}
    first, queued, choice = (Request(name, PROMPT, SamplingParams(extra_args=leg), None) for name, leg in legs.items())
    for each in (first, queued, choice):
        connector.on_new_request(each)
    found = [connector.get_num_new_matched_tokens(each, 0) for each in (first, queued, choice, queued)]
    assert found == [(len(PROMPT) - 1, True), (None, False), (None, False), (16, False)]


def test_a_child_without_hma_is_named(make: Make, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="ExampleConnector"):
        make(TandemMultiConnector, TANDEM, example(tmp_path))
    with pytest.raises(AssertionError):
        make(MultiConnector, TANDEM, example(tmp_path))
    # Without the hybrid manager both accept it.
    for kind in (TandemMultiConnector, MultiConnector):
        assert len(make(kind, TANDEM, example(tmp_path), hma=False).sub_connectors) == 2


def test_a_producer_has_no_receiving_child(make: Make) -> None:
    """vLLM reads the role of the MultiConnector, not of its children (``defer_block_free``)."""
    with pytest.raises(ConfigurationError, match=r"kv_producer.*TandemConnector has kv_both"):
        make(TandemMultiConnector, scripted(0), TANDEM, kv_role="kv_producer")
    make(TandemMultiConnector, scripted(0), child(role="kv_producer"), kv_role="kv_producer")
    make(TandemMultiConnector, scripted(0), child(role="kv_consumer"))
    store = child("TandemStoreConnector", store={"path": "/unused"})
    make(TandemMultiConnector, scripted(0), store, kv_role="kv_producer")


def test_preemptions_reach_every_child(make: Make) -> None:
    connector = make(TandemMultiConnector, scripted(0), scripted(0))
    connector.handle_preemptions(connector.build_connector_meta(SchedulerOutput.make_empty()))
    assert [len(each.preempted) for each in scripted_of(connector)] == [1, 1]


@pytest.mark.parametrize("streaming", ["chunk", "layer"])
@pytest.mark.parametrize("fails_in", ["start_load_kv", "wait_for_layer_load"])
@pytest.mark.parametrize("later", [False, True], ids=["this step", "the next step"])
def test_kv_of_another_childs_failed_load_is_not_sent(
    make: Make, worker: Callable[..., Worker], streaming: str, fails_in: str, later: bool
) -> None:
    """With asynchronous scheduling, the next step is scheduled before vLLM reads the failure."""
    producer, consumer = worker("p", streaming=streaming), worker("c")
    connector = make(TandemMultiConnector, scripted(0), TANDEM, role=KVConnectorRole.WORKER)
    (other,), tandem = scripted_of(connector), tandem_of(connector)
    tandem.worker._runtime = producer.runtime  # noqa: SLF001
    tandem._spoiled = SpoiledSteps(batches=2)  # noqa: SLF001

    def step(orders: Orders, fails: bool) -> None:
        metadata = MultiKVConnectorMetadata((KVConnectorMetadata(), orders))
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if fails and fails_in == "start_load_kv":
            other.not_loaded = {1}
        connector.start_load_kv(ForwardContext.__new__(ForwardContext))
        if fails and fails_in == "wait_for_layer_load":
            other.not_loaded = {1}
        connector.save_kv_layer("layer", torch.empty(0), None)
        connector.wait_for_save()
        assert connector.get_block_ids_with_load_errors() == ({1} if fails else set()), "vLLM gets the failed blocks"
        connector.clear_connector_metadata()

    sends_nothing_of_a_spoiled_step(producer, consumer, step, later)


def test_another_childs_asynchronous_load_spoils_no_step(make: Make, worker: Callable[..., Worker]) -> None:
    """NixlConnector reports it after the step's KV has been handed over; no request of the step
    reads its blocks.
    """
    connector = make(TandemMultiConnector, scripted(0), TANDEM, role=KVConnectorRole.WORKER)
    (other,), tandem = scripted_of(connector), tandem_of(connector)
    tandem.worker._runtime = worker("p").runtime  # noqa: SLF001
    connector.bind_connector_metadata(MultiKVConnectorMetadata((KVConnectorMetadata(), Orders())))
    connector.wait_for_save()
    other.not_loaded = {1}
    assert connector.get_block_ids_with_load_errors() == {1}
    assert connector.get_block_ids_with_load_errors() == set()
    assert not tandem._spoiled  # noqa: SLF001


def test_every_child_gets_its_own_handshake(make: Make) -> None:
    """vLLM's own MultiConnector passes the first child's metadata to all children."""
    connector = make(TandemMultiConnector, scripted(0), TANDEM)
    metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {(0, 0): MultiHandshakeMetadata((None, ENCODED))}
    connector.set_xfer_handshake_metadata_pp_aware(metadata)
    assert snapshot(tandem_of(connector).scheduler).side_channel_port


@pytest.mark.parametrize(
    "weights", [[1], [1, 0], [1, -1], [1, True], [1, float("inf")], [1, float("nan")], 2, ["1", 1]]
)
def test_weights_are_checked(make: Make, weights: Any) -> None:
    with pytest.raises(ConfigurationError, match="load_weights must be 2 positive numbers"):
        make(TandemMultiConnector, scripted(0), scripted(0), load_weights=weights)


def test_the_plugin_registers_the_connectors_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls a plugin in every process, possibly more than once. Without entry points, the
    import of a connector's module registers all: MultiConnector looks them up by name.
    """
    kinds = TandemConnector, TandemMultiConnector, TandemStoreConnector
    assert [KVConnectorFactory.get_connector_class_by_name(kind.__name__) for kind in kinds] == [*kinds]
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    (entry,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "tandem")
    for _ in range(2):
        entry.load()()
    assert [KVConnectorFactory.get_connector_class_by_name(kind.__name__) for kind in kinds] == [*kinds]


def test_a_produced_request_keeps_its_blocks_without_hma(make: Make, tmp_path: Path) -> None:
    """ExampleConnector lacks HMA support, so MultiConnector calls ``request_finished`` instead
    of its HMA variant.
    """
    connector = make(MultiConnector, TANDEM, example(tmp_path), hma=False)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): ENCODED})
    asked = request(do_remote_decode=True, transfer_id="t")
    connector.on_new_request(asked)
    asked.num_computed_tokens = asked.num_prompt_tokens
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    held, answer = connector.request_finished_all_groups(asked, ([1, 2],))
    assert held, "the blocks are freed while decode may still fetch them"
    assert (answer or {})["transfer_id"] == "t"


# ---- failed loads policy -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MultiConnector, TandemMultiConnector])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_only_the_policy_of_the_engine_counts(kind: Any, policy: Any) -> None:
    """A child cannot set it, so vLLM's MultiConnector must have it; Tandem's sets it itself."""
    transfer = connector_config(kind.__name__, connectors=[child()])
    transfer.kv_load_failure_policy = policy
    config = vllm_config.__wrapped__(kv_transfer_config=transfer)
    refused = kind is MultiConnector and policy == "fail"
    refusal = pytest.raises(ConfigurationError, match="kv_load_failure_policy='recompute'")
    with set_current_vllm_config(config), refusal if refused else nullcontext():
        kind(config, KVConnectorRole.WORKER, cache_config((["layer"], full()))).shutdown()
        assert transfer.kv_load_failure_policy == "recompute"
    engine = Engine(0, 60, True, False)
    engine.close()
    assert engine.scheduler.recompute_kv_load_failures
