"""The producer's heartbeat stops with its engine: a hanging forward pass ends the consumer's
wait.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from connectors.vllm_hma.orders import Chunk, Expect
from connectors.vllm_hma.reports import Kept, WorkerReport
from tests.vllm_contract.workers import DIGEST, LIMITS, Worker, receive, results

STEP = dataclasses.replace(LIMITS, step_s=1.0)


def test_an_engine_that_hangs_keeps_no_consumer_waiting(worker: Callable[..., Worker]) -> None:
    """Its progress thread still answers: the request is computed by decode, and its blocks are
    freed at once.
    """
    producer, consumer = worker("p", limits=STEP), worker("c")
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    producer.step(chunks=[Chunk("q", ((1,),), 4)])
    assert results(consumer, within_s=STEP.step_s + 6 * LIMITS.progress_s) == (set(), {"r"}, {"r"})
    assert Kept("r", "t") not in (consumer.runtime.report() or WorkerReport()).quarantine.begun


def test_an_engine_that_steps_keeps_its_consumers(worker: Callable[..., Worker]) -> None:
    """However long the request waits, other requests' steps keep the heartbeat."""
    producer, consumer = worker("p", limits=STEP), worker("c")
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    for _ in range(30):
        producer.step()
        assert consumer.runtime.results() == (set(), set(), set())
        time.sleep(0.1)
    producer.step(chunks=[Chunk("q", ((1, 2),), 7)])
    assert results(consumer) == (set(), {"r"}, set())
