"""The store's worker: caches on devices, and loads that fail within a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connectors.errors import StoreError, UnsupportedCacheError
from connectors.planning.layout import MemoryKind
from connectors.store.planning.prefix import ObjectRef
from connectors.store.settings import StoreSettings
from connectors.store.tiers.staging import Staging
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.kv_store import worker as worker_module
from connectors.vllm_hma.kv_store.orders import Load, Store, StoreOrders, StoreReport
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from connectors.vllm_hma.orders import Orders
from connectors.vllm_hma.reports import WorkerReport
from connectors.vllm_hma.store_connector import TandemStoreConnector
from testing.connector_state import snapshot
from tests.planning.builders import Rank, make_engine, make_rank
from tests.vllm_contract.caches import BLOCK_TOKENS, cache_config, connector_config, full, vllm_config
from tests.vllm_contract.scheduler_sides import CONSUME, PRODUCE, PRODUCER
from tests.vllm_contract.stored_prompt import CACHE, END, PROMPT, SHAPE, Host, reserve, store_worker, tables
from tests.vllm_contract.workers import Worker, receive, sends_nothing_of_a_spoiled_step, until

# ---- store on device -----------------------------------------------------------------------------


TABLES = tuple(tuple(table) for table in tables(END))
STORED = {ObjectRef(16, 0): 0, ObjectRef(32, 0): 4096}
MOVED = tuple(tuple(block and block + 1 for block in table) for table in TABLES)


class HeldEvent(torch.cpu.Event):
    """An event of a device that passes when a test says so."""

    passed = False

    def query(self) -> bool:
        return HeldEvent.passed


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[HeldEvent]:
    monkeypatch.setattr(HeldEvent, "passed", False)
    monkeypatch.setattr(StoreWorker, "_touched", ())
    module = SimpleNamespace(**vars(torch.cpu) | {"Event": HeldEvent})
    monkeypatch.setattr(torch, "get_device_module", lambda *_: module)
    return HeldEvent


@pytest.fixture
def rank() -> Rank:
    return make_rank(SHAPE, 0, 1)


@pytest.fixture
def device_worker(rank: Rank, held: type[HeldEvent]) -> StoreWorker:
    regions = tuple(replace(each, memory_kind=MemoryKind("VRAM", 0)) for each in rank.layout.regions)
    made = StoreWorker(StoreSettings(path="/unused", chunk_tokens=16, staging_mib=1), 4096, SpoiledSteps(2))
    made.register(replace(rank.layout, regions=regions), [torch.from_numpy(buffer) for buffer in rank.buffers])
    return made


def test_a_step_is_reported_once_its_copies_have_ended(
    staging: Staging, rank: Rank, device_worker: StoreWorker
) -> None:
    """Until then slots are in use, and a peer must not write to blocks."""
    view = rank.views[0][0]
    view[...] = np.random.default_rng(3).integers(0, 256, view.shape, np.uint8)
    content = view[list(TABLES[0][:4])].copy()
    orders = StoreOrders(staging.location, stores=[Store(2, "a", TABLES, STORED)])
    device_worker.begin_step()
    device_worker.load(orders)
    assert device_worker.touching() is None
    device_worker.store(orders)
    assert device_worker.report() == StoreReport(attached=1)
    assert device_worker.touching() is not None
    device_worker.load(StoreOrders(staging.location, [Load(3, "b", MOVED, 0, 32, STORED, beside_transfer=True)]))
    assert device_worker.report() is None
    HeldEvent.passed = True
    assert device_worker.touching() is None
    assert device_worker.report() == StoreReport(copied=Counter({2: 1, 3: 1}))
    assert np.array_equal(view[list(MOVED[0][:4])], content)
    assert device_worker.report() is None


def test_a_device_that_hangs_ends_the_engine(
    staging: Staging, device_worker: StoreWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write to the slots of its copies, so no other object may get them."""
    orders = StoreOrders(staging.location, stores=[Store(2, "a", TABLES, STORED)])
    device_worker.load(orders)
    device_worker.store(orders)
    assert device_worker.report() == StoreReport(attached=1)
    monkeypatch.setattr(worker_module, "_HANGS_S", -1.0)
    with pytest.raises(StoreError, match="has not ended copies"):
        device_worker.report()


def test_a_report_that_waits_for_an_idle_engines_next_step_is_no_hang(
    staging: Staging, device_worker: StoreWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call reports one measured step; an engine without requests makes no call."""
    for tokens in (512, 256):
        device_worker.begin_step()
        device_worker.load(StoreOrders(staging.location))
        device_worker.store(StoreOrders(staging.location, timed_tokens=tokens))
        assert device_worker.report() in (StoreReport(attached=1), None)
    monkeypatch.setattr(worker_module, "_HANGS_S", -1.0)
    HeldEvent.passed = True
    assert device_worker.report() == StoreReport(timed_tokens=512)
    assert device_worker.report() == StoreReport(timed_tokens=256)


# ---- failed store loads --------------------------------------------------------------------------


GONE: tuple[tuple[int, ...], ...] = ((0,) * 9, (0,) * 9)
"""Block tables without blocks."""


def failing(staging: Staging) -> StoreOrders:
    load = Load(0, "a", GONE, 0, 16, {ObjectRef(16, 0): 0, ObjectRef(16, 1): 4096})
    return StoreOrders(staging.location, [load], [Store(1, "b", TABLES, {ObjectRef(32, 0): 8192})])


def storing(staging: Staging) -> StoreOrders:
    return StoreOrders(staging.location, stores=[Store(2, "b", TABLES, {ObjectRef(48, 0): 8192})])


def test_other_requests_of_the_step_are_not_stored(staging: Staging) -> None:
    """With asynchronous scheduling, the next step is scheduled before vLLM knows."""
    worker = store_worker(spoiled := SpoiledSteps(batches=2))
    reports = []
    for orders in (failing(staging), storing(staging), storing(staging)):
        worker.load(orders)
        worker.store(orders)
        spoiled.end_step()
        reports.append(worker.report())
    assert reports == [
        StoreReport(attached=1, copied=Counter({0: 1, 1: 1}), failed={1}, broken=True),
        StoreReport(copied=Counter({2: 1}), failed={2}),
        StoreReport(copied=Counter({2: 1})),
    ]
    assert not spoiled


def after_another_childs_failed_load(
    child: type[TandemConnector], scheduler: StoreScheduler, report: StoreReport
) -> None:
    transfer = connector_config(child.__name__, store={"path": "/unused"})
    transfer.kv_load_failure_policy = "recompute"
    config = vllm_config.__wrapped__(kv_transfer_config=transfer)
    connector = child(config, KVConnectorRole.SCHEDULER, cache_config((["f"], full())))
    output = KVConnectorOutput(invalid_block_ids={1}, kv_connector_worker_meta=WorkerReport(store=report))
    connector._store_scheduler = scheduler  # noqa: SLF001
    connector.update_connector_output(output)


@pytest.mark.parametrize("child", [TandemConnector, TandemStoreConnector, None])
def test_no_request_is_stored_later(host: Host, child: type[TandemConnector] | None) -> None:
    """A request's first chunks may have been computed from the blocks of the failed load.

    With ``child``, the load is that of another child of a MultiConnector.
    """
    scheduler = host.start()
    requests = [Request(name, PROMPT, SamplingParams(max_tokens=1), None) for name in "ab"]
    for request in requests:
        scheduler.new_request(request)
    copy_id = reserve(scheduler, "b", ObjectRef(16, 0))
    report = StoreReport(copied=Counter({copy_id: 1}), broken=child is None)
    if child is None:
        scheduler.take(report)
    else:
        after_another_childs_failed_load(child, scheduler, report)
    assert scheduler.store.counts["store_problems", "dropped_store"] == 1
    assert scheduler.store.staging.used_bytes == 0
    for request in requests:
        scheduler.finished(request)
    assert scheduler.remembered == 0


@pytest.mark.parametrize("failed", [False, True])
def test_a_store_ends_with_its_last_rank(host: Host, failed: bool) -> None:
    """It is written if no rank has failed."""
    scheduler = StoreScheduler(host.settings, 4096)
    host.schedulers.append(scheduler)
    scheduler.publish([replace(CACHE, layout=each.layout) for each in make_engine(SHAPE, 2)])
    scheduler.new_request(Request("r", PROMPT, SamplingParams(max_tokens=1), None))
    copy_id = reserve(scheduler, "r", ObjectRef(16, 0))
    scheduler.take(StoreReport(copied=Counter({copy_id: 1}), failed={copy_id} if failed else set()))
    assert scheduler.copying
    scheduler.take(StoreReport(copied=Counter({copy_id: 1})))
    assert not scheduler.copying
    until(scheduler.store.idle)
    assert scheduler.store.counts["store_problems", "dropped_store"] == failed


def with_store() -> TandemConnector:
    config = vllm_config.__wrapped__(kv_transfer_config=connector_config())
    connector = TandemConnector(config, KVConnectorRole.WORKER, cache_config((["f"], full())))
    connector._spoiled = SpoiledSteps(batches=2)  # noqa: SLF001
    connector._store_worker = store_worker(connector._spoiled)  # noqa: SLF001
    return connector


def test_a_transfer_fills_what_a_failed_load_did_not(staging: Staging) -> None:
    """Other requests keep what their loads have filled."""
    load = Load(0, "r", GONE, 0, 16, {ObjectRef(16, 0): 0, ObjectRef(16, 1): 4096}, beside_transfer=True)
    given = [replace(receive(PRODUCER, name), loaded_token=4) for name in "rs"]
    orders, connector = Orders(receives=given, store=StoreOrders(staging.location, [load])), with_store()
    connector.bind_connector_metadata(orders)
    connector.start_load_kv(ForwardContext.__new__(ForwardContext))
    assert [each.loaded_token for each in orders.receives] == [0, 4]


@pytest.mark.parametrize("streaming", ["chunk", "layer"])
@pytest.mark.parametrize("later", [False, True], ids=["this step", "the next step"])
def test_no_request_of_the_step_is_sent(
    worker: Callable[..., Worker], staging: Staging, streaming: str, later: bool
) -> None:
    producer, consumer = worker("p", streaming=streaming), worker("c")
    connector = with_store()
    connector.worker._runtime = producer.runtime  # noqa: SLF001

    def step(orders: Orders, fails: bool) -> None:
        orders.store = failing(staging) if fails else storing(staging)
        connector.handle_preemptions(orders)
        connector.bind_connector_metadata(orders)
        context = ForwardContext.__new__(ForwardContext)
        if fails:
            connector.start_load_kv(context)
        connector.worker.layer_computed("layer")
        if not fails:
            connector.start_load_kv(context)
        connector.wait_for_save()

    sends_nothing_of_a_spoiled_step(producer, consumer, step, later)


# ---- stored states -------------------------------------------------------------------------------


CONNECTORS = [TandemConnector, TandemStoreConnector]


def engine(folder: Path, connector: type, store: bool, prefixes: bool) -> tuple[VllmConfig, KVCacheConfig]:
    extra: dict[str, Any] = {"store": {"path": str(folder)}} if store else {}
    config = vllm_config.__wrapped__(
        enable_prefix_caching=prefixes,
        kv_transfer_config=connector_config(connector.__name__, **extra),
    )
    # vLLM's choice for a model with states (vllm/model_executor/models/config.py).
    mode, tokens = ("align", BLOCK_TOKENS) if prefixes else ("none", config.model_config.max_model_len)
    states = MambaSpec(block_size=tokens, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    cache = cache_config((["model.layers.0.self_attn.attn"], full()), (["model.layers.1.mixer"], states))
    return config, cache


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_states_in_a_prefix_cache_are_not_stored(tmp_path: Path, connector: type, role: KVConnectorRole) -> None:
    """vLLM moves the state to the step's block before the connector loads it."""
    config, cache = engine(tmp_path, connector, store=True, prefixes=True)
    with pytest.raises(UnsupportedCacheError, match=r"'model.layers.1.mixer'.*enable_prefix_caching to false"):
        connector(config, role, cache)


@pytest.mark.parametrize(("store", "prefixes"), [(True, False), (False, True)])
def test_states_without_a_store_or_without_a_prefix_cache(tmp_path: Path, store: bool, prefixes: bool) -> None:
    config, cache = engine(tmp_path, TandemConnector, store, prefixes)
    connector = TandemConnector(config, KVConnectorRole.WORKER, cache)
    assert connector.supports_divergent_local_hybrid_hits


def test_a_store_alone_is_no_part_of_a_transfer(tmp_path: Path) -> None:
    """It ignores transfers, and vLLM need not keep the outputs of preempted requests for it."""
    config, cache = engine(tmp_path, TandemStoreConnector, store=True, prefixes=False)
    connector = TandemStoreConnector(config, KVConnectorRole.SCHEDULER, cache)
    assert not connector.requires_kv_delivery
    assert not connector.supports_divergent_local_hybrid_hits
    for params in (CONSUME, PRODUCE | {"describe": True}):
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        request = Request("r", [1, 2, 3], sampling, None, prompt_embeds=torch.zeros(3, 4))
        connector.on_new_request(request)
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        assert connector.request_finished_all_groups(request, ([1],)) == (False, None)
    assert not snapshot(connector.scheduler).has_orders
