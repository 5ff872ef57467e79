"""TandemMultiConnector beside vLLM's MultiConnector, over the same children, with the same
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
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
from vllm.v1.request import Request, RequestStatus

from connectors.codec import encode_agent_metadata
from connectors.errors import ConfigurationError
from connectors.protocol.agent_metadata import AgentMetadata
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.kv_store.worker import SpoiledSteps
from connectors.vllm_hma.metrics import TandemStats
from connectors.vllm_hma.multi_connector import MultiHandshakeMetadata, TandemMultiConnector
from connectors.vllm_hma.orders import EncodedAgentMetadata, Orders
from connectors.vllm_hma.store_connector import TandemStoreConnector
from testing.connector_state import snapshot
from tests.campaigns.schedules.scheduling import Engine
from tests.vllm_contract.caches import BLOCK_TOKENS, cache_config, child, connector_config, full, vllm_config
from tests.vllm_contract.scheduler_sides import CONSUME, PRODUCE
from tests.vllm_contract.stored_prompt import CACHE
from tests.vllm_contract.test_metrics import carried, value
from tests.vllm_contract.workers import (
    IDENTITY,
    Worker,
    layout_of,
    sends_nothing_of_a_spoiled_step,
    until,
)

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
        policy: Any = "recompute",
        **extra: Any,
    ) -> MultiConnector:
        transfer = connector_config(kind.__name__, kv_role, connectors=list(children), **extra)
        transfer.kv_load_failure_policy = policy
        config = vllm_config.__wrapped__(kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=not hma)
        with set_current_vllm_config(config):
            made.append(kind(config, role or KVConnectorRole.SCHEDULER, cache_config((["f"], full()))))
        assert transfer.kv_load_failure_policy == "recompute"
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
    legs = {name: {"kv_transfer_params": CONSUME | {"transfer_id": name[:2]}} for name in ("t1", "t2", "t2 b")}
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


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_failed_loads_are_recomputed(make: Make, policy: str) -> None:
    """Also with vLLM's default policy, `fail`. A child cannot set it, so vLLM's MultiConnector must
    have it; Tandem's connectors set it themselves.
    """
    make(TandemMultiConnector, TANDEM, policy=policy)
    refusal = pytest.raises(ConfigurationError, match="kv_load_failure_policy='recompute'")
    with refusal if policy == "fail" else nullcontext():
        make(MultiConnector, TANDEM, policy=policy)
    with closing(Engine(0, 60, True, False)) as engine:
        assert engine.scheduler.recompute_kv_load_failures


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
    asked = request(**PRODUCE)
    connector.on_new_request(asked)
    asked.num_computed_tokens = asked.num_prompt_tokens
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    held, answer = connector.request_finished_all_groups(asked, ([1, 2],))
    assert held, "the blocks are freed while decode may still fetch them"
    assert (answer or {})["transfer_id"] == "t"
