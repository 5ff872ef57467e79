"""Late binding in the scheduler side and between workers: queued requests, and the end of their
wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request

from connectors.protocol.actions import Due
from connectors.vllm_hma.orders import Orders, Queue, Release
from connectors.vllm_hma.reports import WorkerReport
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector
from testing.connector_state import snapshot
from tests.vllm_contract import scheduler_sides as sides
from tests.vllm_contract.scheduler_sides import CONSUME, PRODUCER, leave, orders, start
from tests.vllm_contract.workers import ARRIVED, EXPECT, SENT, WHOLE, Worker, receive, results, until


def request(name: str, **params: Any) -> Request:
    return sides.request(CONSUME | params, name, tokens=50)


def scheduler(busy: bool = True) -> SchedulerConnector:
    """Return a scheduler side with one request for the same producer, with blocks, unless it is
    not ``busy``.
    """
    half = sides.scheduler()
    if busy:
        start(half, request("first", transfer_id="first"))
    return half


# ---- the scheduler's half ----------------------------------------------------------------------


def test_a_request_that_none_waits_before_takes_its_blocks_at_once() -> None:
    """Prefill is idle as far as this engine knows: no round trip.

    The second request waits, another producer's does not.
    """
    half = scheduler(busy=False)
    one, two = request("d1"), request("d2", transfer_id="t2")
    other = request("d3", transfer_id="t3", remote_engine_id="p2")
    for each in (one, two, other):
        half.new_request(each)
    assert [half.consumptions.matched_tokens(each, 0) for each in (one, two, other)] == [49, None, 49]
    half.consumptions.after_alloc(one, ([1, 2],), 49)
    assert half.consumptions.matched_tokens(two, 0) is None
    leave(half, one)
    assert half.consumptions.matched_tokens(two, 0) is None, "prefill reports when"
    three = request("d4", transfer_id="t4")
    half.consumptions.due([Due("d2", "t2", None)])
    half.consumptions.after_alloc(two, ([3, 4],), 49)
    leave(half, two)
    half.new_request(three)
    assert half.consumptions.matched_tokens(three, 0) == 49


def test_a_queued_request_claims_nothing_until_it_is_due() -> None:
    half, one = scheduler(), request("d")
    half.new_request(one)
    assert orders(half) == Orders(queues=[Queue("d", "t", PRODUCER)])
    assert half.consumptions.matched_tokens(one, 0) is None
    half.consumptions.due([Due("d", "another transfer's", None)])
    assert half.consumptions.matched_tokens(one, 0) is None
    half.consumptions.due([Due("d", "t", None)])
    assert half.consumptions.matched_tokens(one, 0) == 49
    assert half.consumptions.matched_tokens(one, 32) == 17


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_request_whose_prompt_will_not_come_is_computed_here(cancelled: bool) -> None:
    """Only rank 0 waits in the queue. If it has cancelled the transfer at its partners, the other
    ranks do the same at theirs, which would hold the KV until the lease ends.
    """
    half, one = scheduler(), request("d")
    half.new_request(one)
    orders(half)
    half.consumptions.due([Due("d", "t", "no message arrived", cancelled)])
    assert half.consumptions.matched_tokens(one, 0) == 0
    half.consumptions.after_alloc(one, ([1, 2],), 0)
    assert orders(half) == Orders(releases=[Release("t", PRODUCER)] if cancelled else [])
    stats = half.stats()
    assert stats is not None
    # The 49 tokens are those of the request before it.
    assert stats.data["counts"] == {"prompt_tokens": {"transfer": 49}, "requests": {"recomputed": 1}}


def test_what_decode_holds_itself_needs_no_start() -> None:
    """With a prefix that leaves nothing to fetch, the request runs at once, and the producer
    receives a release.
    """
    half, one = scheduler(), request("d")
    half.new_request(one)
    assert half.consumptions.matched_tokens(one, 49) == 0
    half.consumptions.after_alloc(one, ([1, 2],), 0)
    assert orders(half).releases == [Release("t", PRODUCER)]
    assert not snapshot(half).queued


def test_legs_that_come_one_after_the_other_wait_for_no_start() -> None:
    """A public proxy passes prefill's answer on unchanged."""
    half, one = scheduler(), request("d", remote_num_tokens=49, remote_request_id="x")
    half.new_request(one)
    assert orders(half) == Orders()
    assert half.consumptions.matched_tokens(one, 0) == 49


def test_a_queued_request_that_is_aborted_is_released() -> None:
    half, one = scheduler(), request("d")
    half.new_request(one)
    orders(half)
    leave(half, one)
    assert orders(half) == Orders(releases=[Release("t", PRODUCER)])
    half.consumptions.due([Due("d", "t", None)])
    assert not snapshot(half).queued
    assert not snapshot(half).consumptions
    assert snapshot(half).receptions == {"first"}


def test_prompts_start_that_the_next_step_can_reach() -> None:
    """60 and 60 tokens fill the next step of 100; the third starts once the first is computed or
    gone.
    """
    half = scheduler()
    for name in "abc":
        half.new_request(sides.request({"do_remote_decode": True, "transfer_id": name}, name, tokens=61))
    found = orders(half)
    assert [expect.request_id for expect in found.expects] == ["a", "b", "c"]
    assert found.starts == ["a", "b"]
    assert orders(half).starts == []
    leave(half, sides.request({}, "a", tokens=61))
    assert orders(half).starts == ["c"]


# ---- choices of one request --------------------------------------------------------------------


def follower(half: SchedulerConnector) -> tuple[Request, Request]:
    """Return a request that receives a prompt, and another choice of the same client request."""
    one, two = request("0_d"), request("1_d")
    half.new_request(one)
    half.new_request(two)
    return one, two


def test_another_choice_waits_for_the_first_ones_prompt() -> None:
    half = scheduler(busy=False)
    one, two = follower(half)
    assert half.consumptions.awaits_prefix("1_d")
    assert half.consumptions.matched_tokens(two, 0) == 0
    half.consumptions.after_alloc(one, ([1, 2],), 49)
    assert half.consumptions.awaits_prefix("1_d")
    assert not half.consumptions.awaits_prefix("0_d")
    half.consumptions.received({"0_d"}, set())
    assert not half.consumptions.awaits_prefix("1_d")
    assert len(orders(half).receives) == 1
    late = request("2_d")
    half.new_request(late)
    assert (half.consumptions.awaits_prefix("2_d"), half.consumptions.matched_tokens(late, 0)) == (False, 0)
    for each in (one, two, late):
        leave(half, each)
    assert (snapshot(half).followers, orders(half)) == (frozenset(), Orders())


@pytest.mark.parametrize("allocated", [False, True])
def test_another_choice_goes_on_when_the_first_one_is_aborted(allocated: bool) -> None:
    half = scheduler(busy=False)
    one, _ = follower(half)
    if allocated:
        half.consumptions.after_alloc(one, ([1, 2],), 49)
    leave(half, one)
    assert not half.consumptions.awaits_prefix("1_d")
    found = orders(half)
    assert (found.releases, found.aborts) == (([], ["0_d"]) if allocated else ([Release("t", PRODUCER)], []))


# ---- workers -----------------------------------------------------------------------------------


def due(worker: Worker) -> list[Due]:
    """Step until a queued request is due."""
    found: list[Due] = []

    def reported() -> bool:
        report = worker.runtime.report() or WorkerReport()
        found.extend(report.due)
        return bool(found)

    until(reported)
    return found


def idle(*workers: Worker) -> bool:
    return not any(
        count for worker in workers for what, count in worker.runtime.counts().items() if what != "remembered"
    )


def test_workers_from_the_queue_to_the_kv(worker: Callable[..., Worker]) -> None:
    producer, consumer = worker("p"), worker("c")
    producer.cache[:] = 7
    consumer.step(queues=[Queue("r", "t", producer.address)])
    producer.step(expects=[EXPECT])
    until(lambda: producer.runtime.counts()["live"] == 1 and bool(snapshot(producer.runtime).producer.consumers))
    assert consumer.runtime.counts()["queued"] == 1
    assert consumer.runtime.report() is None
    producer.step(starts=["q"])
    assert due(consumer) == [Due("r", "t", None)]
    consumer.step(receives=[receive(producer.address)])
    producer.step(chunks=[WHOLE])
    assert results(consumer) == ARRIVED
    assert consumer.cache[[3, 5]].tolist() == producer.cache[[1, 2]].tolist()
    producer.step(finished=[SENT])
    assert results(producer) == ({"q"}, set(), set())
    until(lambda: idle(producer, consumer))


def test_workers_cancelled_in_the_queue(worker: Callable[..., Worker]) -> None:
    """Prefill holds nothing for it: its blocks are freed after the computation."""
    producer, consumer = worker("p"), worker("c")
    producer.step(expects=[EXPECT])
    consumer.step(queues=[Queue("r", "t", producer.address)])
    until(lambda: bool(snapshot(producer.runtime).producer.consumers))
    consumer.step(releases=[Release("t", producer.address)])
    until(lambda: bool(snapshot(producer.runtime).producer.closed))
    producer.step(starts=["q"], chunks=[WHOLE])
    producer.step(finished=[SENT])
    assert results(producer) == ({"q"}, set(), set())
    until(lambda: idle(producer, consumer))
    assert consumer.runtime.report() is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_workers_whose_producer_dies(impatient: Callable[..., Worker], when: str) -> None:
    """If the producer dies before or after first contact, decode computes the request and has
    offered no block.
    """
    producer, consumer = impatient("p"), impatient("c")
    address = producer.address
    if when == "before":
        producer.close()
        consumer.step(queues=[Queue("r", "t", address)])
    else:
        producer.step(expects=[EXPECT])
        consumer.step(queues=[Queue("r", "t", address)])
        until(lambda: bool(snapshot(producer.runtime).producer.consumers))
        producer.close()
    (found,) = due(consumer)
    assert (found.request_id, found.transfer_id) == ("r", "t")
    assert found.failure is not None
    assert consumer.runtime.counts()["quarantined"] == 0


@pytest.mark.parametrize("multiple", [0, sides.BLOCK])
def test_an_engine_that_samples_no_first_tokens_refuses_to(multiple: int) -> None:
    """Its model has states, or it speculates."""
    producer = sides.scheduler()
    producer.productions.first_token_multiple = multiple
    producer.new_request(sides.request(sides.PRODUCE | {"first_token": True}))
    assert len(orders(producer).expects) == bool(multiple)
