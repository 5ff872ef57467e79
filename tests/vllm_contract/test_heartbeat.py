"""The producer's heartbeat stops with its engine: a hanging forward pass ends the consumer's
wait.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from connectors.codec import decode
from connectors.protocol.wire import Alive
from connectors.vllm_hma.orders import Chunk, Expect
from connectors.vllm_hma.reports import Kept, WorkerReport
from connectors.vllm_hma.worker_side import runtime
from tests.vllm_contract.workers import DIGEST, SHORT, Worker, receive, results, until

STEP = dataclasses.replace(SHORT, step_s=1.0)


def test_an_engine_that_hangs_keeps_no_consumer_waiting(worker: Callable[..., Worker]) -> None:
    """The progress thread answers: decode computes the prompt, and its blocks are freed at once."""
    # Longer than a pause of the machine, which would also end the wait.
    patient = dataclasses.replace(SHORT, progress_s=4.0)
    producer, consumer = worker("p", limits=STEP), worker("c", limits=patient)
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    producer.step(chunks=[Chunk("q", ((1,),), 4)])
    assert results(consumer, within_s=60.0) == (set(), {"r"}, {"r"})
    assert Kept("r", "t") not in (consumer.runtime.report() or WorkerReport()).quarantine.begun


def test_an_engine_that_steps_keeps_its_consumers(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the request waits, other requests' steps keep the heartbeat."""
    now, alive = [time.monotonic()], [0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(runtime, "time", clock)
    producer, consumer = worker("p", limits=STEP), worker("c", limits=SHORT)
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    until(lambda: producer.runtime.counts()["live"] == consumer.runtime.counts()["offered"] == 1)
    notify = producer.transport.notify

    def counted(peer: str, payload: bytes) -> None:
        notify(peer, payload)
        alive[0] += isinstance(decode(payload).message, Alive)

    producer.transport.notify = counted  # type: ignore[method-assign]
    for turn in range(30):  # more than six seconds on the clock of both workers
        producer.step()
        # More than alive_s: a sum of floats may round to slightly less.
        now[0] += 1.1 * STEP.alive_s
        until(lambda turn=turn: alive[0] > turn)  # type: ignore[misc]
        assert consumer.runtime.results() == (set(), set(), set())
    producer.step(chunks=[Chunk("q", ((1, 2),), 7)])
    assert results(consumer) == (set(), {"r"}, set())
