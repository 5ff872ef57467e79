"""A load within a step that fails: no KV computed from its blocks is stored or sent.

vLLM adds the blocks to its prefix cache when it orders the load, so other requests of the step, and
of steps that are scheduled already, may use them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connectors.store.planning.prefix import ObjectRef
from connectors.store.settings import StoreSettings
from connectors.store.tiers.staging import Staging
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.kv_store.orders import Load, Store, StoreOrders, StoreReport
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from connectors.vllm_hma.orders import Chunk, Expect, Finished, Orders
from connectors.vllm_hma.reports import WorkerReport
from connectors.vllm_hma.store_connector import TandemStoreConnector
from tests.vllm_contract.caches import cache_config, full, vllm_config
from tests.vllm_contract.stored_prompt import END, PROMPT, RANK, Host, host, reserve, tables
from tests.vllm_contract.workers import DIGEST, Worker, receive, results, until

__all__ = ["host"]

GONE: tuple[tuple[int, ...], ...] = ((0,) * 9, (0,) * 9)
"""Block tables without blocks."""
TABLES = tuple(tuple(table) for table in tables(END))


def store_worker(spoiled: SpoiledSteps) -> StoreWorker:
    made = StoreWorker(StoreSettings(path="/unused", disk_gib=0.1, chunk_tokens=16, staging_mib=1), 4096, spoiled)
    made.register(RANK.layout)
    return made


def failing(staging: Staging) -> StoreOrders:
    """Return the orders of a step that loads request a and stores an object of request b."""
    load = Load(0, "a", GONE, 0, 16, {ObjectRef(16, 0): 0, ObjectRef(16, 1): 4096})
    return StoreOrders(staging.location, [load], [Store("b", TABLES, {ObjectRef(32, 0): 8192})])


def storing(staging: Staging) -> StoreOrders:
    return StoreOrders(staging.location, stores=[Store("b", TABLES, {ObjectRef(48, 0): 8192})])


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
        StoreReport(attached=1, loaded={0: 1}, failed={8192: 1}, broken=True),
        StoreReport(failed={8192: 1}),
        StoreReport(filled={8192: 1}),
    ]
    assert not spoiled


def after_another_childs_failed_load(
    child: type[TandemConnector], scheduler: StoreScheduler, report: StoreReport
) -> None:
    """Pass the output of a step in which another child's load failed to a child's scheduler."""
    transfer = KVTransferConfig(
        kv_connector=child.__name__,
        kv_connector_module_path=child.__module__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": {"path": "/unused"}},
    )
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
    offset = reserve(scheduler, "b", ObjectRef(16, 0))
    report = StoreReport(filled={offset: 1}, broken=child is None)
    if child is None:
        scheduler.take(report)
    else:
        after_another_childs_failed_load(child, scheduler, report)
    assert scheduler.store.counts["dropped_stores"] == 1
    assert scheduler.store.staging.used_bytes == 0
    for request in requests:
        scheduler.finished(request)
    assert scheduler.remembered == 0


@pytest.mark.parametrize("streaming", ["chunk", "layer"])
@pytest.mark.parametrize("later", [False, True], ids=["this step", "the next step"])
def test_no_request_of_the_step_is_sent(
    worker: Callable[..., Worker], staging: Staging, streaming: str, later: bool
) -> None:
    """Request q does not load anything."""
    producer, consumer = worker("p", streaming=streaming), worker("c")
    producer.cache[:] = 0xEE
    transfer = KVTransferConfig(kv_connector="TandemConnector", kv_role="kv_both", kv_load_failure_policy="recompute")
    config = vllm_config.__wrapped__(kv_transfer_config=transfer)
    connector = TandemConnector(config, KVConnectorRole.WORKER, cache_config((["f"], full())))
    connector.worker._runtime = producer.runtime  # noqa: SLF001
    connector._spoiled = SpoiledSteps(batches=2)  # noqa: SLF001
    connector._store_worker = store_worker(connector._spoiled)  # noqa: SLF001

    def step(orders: Orders) -> None:
        connector.handle_preemptions(orders)
        connector.bind_connector_metadata(orders)
        context = ForwardContext.__new__(ForwardContext)
        before = orders.store is not None and bool(orders.store.loads)
        if before:
            connector.start_load_kv(context)
        connector.worker.layer_computed("layer")
        if not before:
            connector.start_load_kv(context)
        connector.wait_for_save()

    step(Orders(expects=[Expect("q", "t", 7, DIGEST)], starts=["q"]))
    consumer.step(receives=[receive(producer.address)])
    until(lambda: producer.runtime.counts()["live"] == 1)
    chunks = [Chunk("q", ((1, 2),), 7, last=True)]
    step(Orders(chunks=[] if later else chunks, store=failing(staging)))
    if later:
        step(Orders(chunks=chunks, store=storing(staging)))
    step(Orders(finished=[Finished("q", True, "")]))
    assert results(consumer) == (set(), {"r"}, {"r"})
    assert results(producer) == ({"q"}, set(), set())
    assert (consumer.cache == 0).all(), "nothing of the step was written"
