"""A request without a transfer loads its stored prefix only if computing it would take longer."""

from __future__ import annotations

import threading

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from connectors.store.tiers.folder import FolderTier
from connectors.vllm_hma.kv_store.orders import StoreOrders, StoreReport
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from tests.vllm_contract.stored_prompt import CACHE, RANK, Host, host, left, new_request, tables
from tests.vllm_contract.workers import until

__all__ = ["host"]


def matched(scheduler: StoreScheduler, request: Request) -> int:
    """Return the tokens that the store reports to vLLM, after as many steps as it asks for."""
    found: list[int] = []

    def answered() -> bool:
        tokens = scheduler.matched_tokens(request, 0)
        found.extend([] if tokens is None else [tokens])
        return bool(found)

    until(answered)
    return found[0]


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


@pytest.mark.parametrize(("token_s", "tokens"), [(1.0, 64), (1e-6, 0)])
def test_a_load_that_takes_longer_than_the_computation_is_declined(host: Host, token_s: float, tokens: int) -> None:
    """The disk needs 1.3 ms for the prompt's objects."""
    host.fill(64)
    engine = host.start()
    engine.store.costs.read("disk", 10**6, 1.0)
    engine.take(StoreReport(timed_tokens=1000, timed_s=1000 * token_s))
    request = new_request(engine)
    assert matched(engine, request) == tokens
    engine.after_alloc(request, tables(), tokens)
    assert len(engine.orders(SchedulerOutput.make_empty()).loads) == bool(tokens)
    assert engine.stats().data["counts"]["store_requests"] == {"hit" if tokens else "declined": 1}


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
    worker = StoreWorker(host.settings, 4096, SpoiledSteps(1))
    worker.register(RANK.layout)
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
