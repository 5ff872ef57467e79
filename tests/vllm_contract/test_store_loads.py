"""The store's scheduler: which loads it orders, for requests with and without a transfer."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from connectors.planning.layout import EngineLayout, Group, GroupKind, MemoryKind
from connectors.store.planning.prefix import ObjectRef
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.staging import StagingLocation
from connectors.vllm_hma.kv_store.orders import StoreOrders, StoreReport
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from connectors.vllm_hma.orders import Chunk, Expect, Orders
from connectors.vllm_hma.worker_side.receiving import order_of
from tests.campaigns.schedules.scheduling import Engine
from tests.campaigns.store import scheduling
from tests.planning.builders import Shape, make_engine
from tests.vllm_contract.scheduler_sides import PRODUCER
from tests.vllm_contract.stored_prompt import (
    CACHE,
    CHUNK,
    END,
    FULL,
    PROMPT,
    Host,
    left,
    matched,
    new_request,
    store_worker,
    tables,
)
from tests.vllm_contract.workers import DIGEST, Worker, receive, results, until

# ---- load or compute -----------------------------------------------------------------------------


def begun(host: Host, end_token: int, local: int = 0, queued: bool = False) -> tuple[StoreScheduler, Request]:
    """Return a decode engine whose request may load its stored prefix beside a transfer."""
    host.fill(end_token)
    decode = host.start()
    request = new_request(decode)
    until(lambda: decode.prefix_ready(request, local, END, queued))
    return decode, request


def test_no_load_is_ordered_before_all_ranks_have_mapped_staging(host: Host) -> None:
    """vLLM ends an engine with several KV cache groups if a load within a step fails."""
    host.fill(64)
    engine = StoreScheduler(host.settings, 4096)
    host.schedulers.append(engine)
    engine.publish([CACHE])
    request = new_request(engine)
    until(lambda: engine.matched_tokens(request, 0) is None and not engine.store.running)
    assert engine.matched_tokens(request, 0) is None, "the fetch is over"
    engine.take(StoreReport(attached=1))
    assert engine.matched_tokens(request, 0) == 64


def test_the_wait_is_counted_from_the_reads(host: Host) -> None:
    """A step, which takes longer than the computation of the prompt, lies between two polls."""
    host.fill(64)
    engine = host.start()
    engine.take(StoreReport(timed_tokens=1000, timed_s=15.0))
    request = new_request(engine)
    assert engine.matched_tokens(request, 0) is None
    threading.Event().wait(1.2)
    assert matched(engine, request) == 64


def test_a_load_ends_when_the_computation_would_have_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has become slow costs one request the time of its computation, others nothing."""
    host.fill(64)
    release = threading.Event()
    real = FolderTier.read

    def hang(self: FolderTier, *arguments: object) -> object:
        release.wait(10.0)
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FolderTier, "read", hang)
    engine = host.start(lookup_s=600.0, load_s=600.0)
    engine.take(StoreReport(timed_tokens=1000, timed_s=0.1))
    request = new_request(engine)
    assert matched(engine, request) == 0
    problems = engine.stats().data["counts"]["store_problems"]
    assert problems == {"late_load": 1}
    assert matched(engine, new_request(engine, "next")) == 0
    assert engine.stats().data["counts"]["store_requests"] == {"declined": 1}
    release.set()
    assert left(engine) == 0


@pytest.mark.parametrize("load_first", [False, True])
def test_the_slowest_rank_measures_a_step(host: Host, load_first: bool) -> None:
    """Small steps are not measured: they take longer per token.

    vLLM calls the load after the forward pass, except in steps with loads that are not
    asynchronous.
    """
    engine = host.start()
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs.req_ids = ["decoding", "prompt"]
    output.scheduled_cached_reqs.num_computed_tokens = [600, 256]
    output.num_scheduled_tokens = {"decoding": 1, "prompt": 63}
    assert engine.orders(output).timed_tokens == 0
    output.num_scheduled_tokens = {"decoding": 1, "prompt": 127}
    orders = engine.orders(output)
    assert orders.timed_tokens == 128
    assert orders.timed_context_tokens == pytest.approx((600.5 + 127 * 319.5) / 128)
    worker = store_worker(SpoiledSteps(1))
    worker.begin_step()
    if load_first:
        worker.load(orders)
    threading.Event().wait(0.01)
    if not load_first:
        worker.load(orders)
    worker.store(orders)
    report = worker.report()
    assert report is not None
    assert report.timed_tokens == 128
    assert report.timed_s >= 0.01
    worker.begin_step()
    worker.load(StoreOrders(orders.staging))
    worker.store(StoreOrders(orders.staging))
    assert worker.report() is None
    slower = StoreReport(timed_tokens=128, timed_context_tokens=320, timed_s=2 * report.timed_s)
    engine.take(report.aggregate(slower))
    assert engine.store.costs.compute_s(0, 64) == pytest.approx(slower.timed_s / 2)


# ---- prefix beside transfer ----------------------------------------------------------------------


def test_full_attention_comes_from_the_store_and_the_rest_by_transfer(host: Host) -> None:
    decode, request = begun(host, 48)
    assert decode.load_prefix(request, tables(), 8, END) == 48
    began_at, ended_at = decode.stats().data["fetches"]["r"]
    assert began_at <= ended_at <= time.monotonic()
    assert decode.stats().is_empty(), "reported once"
    orders = decode.orders(SchedulerOutput.make_empty())
    (load,) = orders.loads
    assert (load.start_token, load.end_token, set(load.offsets)) == (8, 48, set(FULL[:3]))
    worker = store_worker(SpoiledSteps(1))
    assert worker.load(orders) == set()
    decode.take(worker.report() or StoreReport())
    assert left(decode) == 0
    decode.finished(request)
    assert decode.remembered == 0


def test_a_stored_prefix_ends_with_the_blocks_of_a_first_token_transfer(host: Host) -> None:
    """The producer of a first token sends whole blocks: 64 of 70 tokens, not 69."""
    host.fill(64)
    engine = Engine(0, 60, False, asynchronous=False)
    try:
        connector = engine.connector
        connector._store_scheduler = host.start()  # noqa: SLF001 - the engine's own has another layout
        params = {"do_remote_prefill": True, "transfer_id": "t", "prompt_multiple": CHUNK}
        producer = {"remote_engine_id": "other", "remote_host": "127.0.0.1", "remote_port": 9, "tp_size": 1}
        sampling = SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": params | producer})
        request = Request("r", PROMPT, sampling, None)
        connector.on_new_request(request)
        until(lambda: connector.get_num_new_matched_tokens(request, 0)[0] is not None)
        assert connector.get_num_new_matched_tokens(request, 0) == (64, True)
        blocks = KVCacheBlocks(tuple([KVCacheBlock(one) for one in table] for table in tables(64)))
        connector.update_state_after_alloc(request, blocks, 64)
        orders = connector.build_connector_meta(SchedulerOutput.make_empty())
        assert isinstance(orders, Orders)
        assert orders.store is not None
        # A transfer keeps at least one object to move.
        assert [(load.start_token, load.end_token) for load in orders.store.loads] == [(0, 48)]
        assert [(one.start_token, one.end_token, one.loaded_token) for one in orders.receives] == [(0, 64, 48)]
    finally:
        engine.close()


def test_a_queued_request_fetches_nothing_while_half_of_staging_is_used(host: Host) -> None:
    """It may wait for prefill for long; it fetches at the latest when its transfer is due."""
    host.fill(64)
    decode = host.start()
    staging, request = decode.store.staging, new_request(decode)
    held = staging.take(staging.size_bytes * 6 // 10)
    assert held is not None
    assert not decode.prefix_ready(request, 0, END, True)
    assert not decode.store.running
    until(lambda: decode.prefix_ready(request, 0, END, False))
    assert decode.load_prefix(request, tables(), 0, END) == 64
    staging.give_back(held)


def test_a_transfer_that_fails_before_it_begins_loads_as_any_request(host: Host) -> None:
    """The first fetch had no windows, so another one is started."""
    decode, request = begun(host, 64, queued=True)
    assert matched(decode, request) == 64
    decode.after_alloc(request, tables(), 64)
    (load,) = decode.orders(SchedulerOutput.make_empty()).loads
    assert {ref.group for ref in load.offsets} == {0, 1}
    decode.take(StoreReport(copied=Counter({load.copy_id: 1})))
    decode.finished(request)
    assert left(decode) == 0


def test_an_evicted_block_of_the_own_cache_gives_up_the_prefix(host: Host) -> None:
    """The fetch began at token 32, and the cache holds fewer tokens now."""
    decode, request = begun(host, 64, local=32)
    assert decode.load_prefix(request, tables(), 16, END) == 16
    assert left(decode) == 0


def test_a_copy_that_fails_breaks_no_request(host: Host) -> None:
    """The rank reports no wrong blocks: its transfer fills them all."""
    decode, request = begun(host, 64)
    assert decode.load_prefix(request, tables(), 0, END) == 64
    worker = store_worker(SpoiledSteps(1))
    orders = decode.orders(SchedulerOutput.make_empty())
    orders.staging = StagingLocation("/dev/shm/tandem-staging-that-is-not-there", ("", 0, 0))
    assert worker.load(orders) == {"r"}
    assert worker.not_loaded() == set()
    report = worker.report()
    assert report is not None
    assert not report.broken
    decode.take(report)
    assert left(decode) == 0


def test_only_the_rest_is_written(worker: Callable[..., Worker]) -> None:
    """Tokens 0 to 3 are in the first block: the producer writes the second one only."""
    producer, consumer = worker("p"), worker("c")
    producer.cache[:] = 0xEE
    consumer.cache[3] = 0x11
    producer.step(expects=[Expect("q", "t", 6, DIGEST)], starts=["q"])
    consumer.step(receives=[replace(receive(producer.address), loaded_token=4)])
    until(lambda: producer.runtime.counts()["live"] == 1)
    producer.step(chunks=[Chunk("q", ((1, 2),), 6, last=True)])
    assert results(consumer) == (set(), {"r"}, set())
    assert (consumer.cache[3] == 0x11).all()
    assert np.count_nonzero(consumer.cache[5]) > 0


@pytest.mark.parametrize(
    ("kind", "window", "positions"),
    [(GroupKind.FULL, None, [2, 3]), (GroupKind.SLIDING, 12, [1, 2, 3]), (GroupKind.STATE, None, [0])],
)
def test_the_store_supplies_full_attention_only(kind: GroupKind, window: int | None, positions: list[int]) -> None:
    """Blocks of 4 tokens, 8 of them loaded: a transfer to token 16 fills the others."""
    order = replace(receive(PRODUCER), tables=((1, 2, 3, 4),), end_token=16, loaded_token=8)
    (found,) = order_of(order, [Group(0, kind, 4, window, ())]).groups
    assert found.positions.tolist() == positions


@pytest.mark.parametrize(
    ("end_token", "failed", "stored"), [(58, False, True), (63, False, False), (63, True, True)], ids=str
)
def test_a_window_of_which_the_transfer_sent_a_part_is_not_stored(
    host: Host, end_token: int, failed: bool, stored: bool
) -> None:
    """The object keeps tokens 48 to 63. After 63 tokens, a window of 12 reads from token 52 on."""
    groups = ((GroupKind.FULL, None, 1), (GroupKind.SLIDING, 12, 1))
    layout = make_engine(Shape(2, "head_major", 8, 8, 40, 0, True, groups, 8), 1)[0].layout
    decode = StoreScheduler(host.settings, 4096)
    decode.publish([replace(CACHE, layout=layout)])
    host.schedulers.append(decode)
    request = new_request(decode)
    decode.load_prefix(request, tables(), 0, end_token)
    known = decode._requests["r"]  # noqa: SLF001
    refs = decode._to_store(known, 0 if failed else end_token, len(PROMPT))  # noqa: SLF001
    assert (ObjectRef(64, 1) in refs) is stored
    assert ObjectRef(64, 0) in refs


# ---- store scheduling ----------------------------------------------------------------------------


TWO_ENGINES = [(40, 16, True, True, 1, False), (60, 32, False, False, 4, False)]
WITH_STATES = [(40, 16, False, True, 1, True), (90, 16, False, False, 2, True)]


class LateEvent(torch.cpu.Event):
    """An event of a device that passes some steps after the host has recorded it."""

    queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries > 3


@pytest.mark.parametrize("kinds", [TWO_ENGINES, WITH_STATES], ids=["windows", "states"])
def test_the_cache_is_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[scheduling.Kind]
) -> None:
    """Copies end after their step, also of an engine that has become idle."""
    register = StoreWorker.register

    def on_device(worker: StoreWorker, layout: EngineLayout, tensors: Sequence[torch.Tensor] = ()) -> None:
        memory = [(ctypes.c_uint8 * each.length_bytes).from_address(each.address) for each in layout.regions]
        regions = tuple(replace(each, memory_kind=MemoryKind("VRAM", 0)) for each in layout.regions)
        tensors = [torch.frombuffer(each, dtype=torch.uint8) for each in memory]
        register(worker, replace(layout, regions=regions), tensors)

    monkeypatch.setattr(StoreWorker, "_touched", ())
    monkeypatch.setattr(StoreWorker, "register", on_device)
    monkeypatch.setattr(
        torch, "get_device_module", lambda *_: SimpleNamespace(**vars(torch.cpu) | {"Event": LateEvent})
    )
    counts = scheduling.run(tmp_path / "store", 3, 60, kinds)
    assert counts["loads"] > 0


def compute(engine: scheduling.Engine, name: str) -> int:
    """Run one request of three chunks; return the number of objects that its steps store."""
    engine.tokens[name] = [20] * (3 * scheduling.CHUNK + 1)
    sampling = SamplingParams(max_tokens=1)
    engine.scheduler.add_request(Request(name, engine.tokens[name][:], sampling, None, block_hasher=engine.hasher))
    stored = 0
    while engine.scheduler.has_requests() or engine.batches:
        output = engine.scheduler.schedule()
        tables = {each: engine.scheduler.kv_cache_manager.get_block_ids(each) for each in output.num_scheduled_tokens}
        stored += sum(len(store.offsets) for store in scheduling.orders_of(output).stores)
        engine.scheduler.update_from_output(output, engine.execute(output, tables))
    until(engine.store.idle)
    return stored


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_cannot_map_the_staging_memory(tmp_path: Path, asynchronous: bool) -> None:
    with closing(scheduling.Engine(1, tmp_path / "store", 40, 16, False, False, 1, False)) as engine:
        compute(engine, "stored")
    with closing(scheduling.Engine(1, tmp_path / "store", 40, 16, False, asynchronous, 2, False)) as engine:
        engine.store.staging.close()  # the memory stays mapped, but has no file
        for name in ("computed", "computed too"):
            compute(engine, name)
        assert engine.counts["loads"] == engine.store.staging.used_bytes == 0
