"""Every write ends, whatever error the transport or another part raises, and later work
continues.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind
from connectors.protocol.wire import Message, Offer, Peer
from connectors.transport import digest
from connectors.vllm_hma.handshake.message_sender import MessageSender
from connectors.vllm_hma.orders import Chunk, Expect, Finished
from connectors.vllm_hma.worker_side.trace import Trace
from testing.memory_transport import MemoryTransport
from testing.trace import read_trace
from tests.vllm_contract.test_ends import HeldWrites, let_go
from tests.vllm_contract.workers import DIGEST, Worker, receive, results, until


class BreaksOnce(MemoryTransport):
    """A bug in the transport: an error other than TransportError, once, in the named call."""

    where = ""

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        self._break("write")
        return super().write(peer, runs, source, target)

    def poll(self, handle: int) -> bool:
        self._break("poll")
        return super().poll(handle)

    def _break(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            raise RuntimeError("anything")


def transfer(producer: Worker, consumer: Worker, name: str) -> tuple[set[str], set[str], set[str]]:
    """Run a whole transfer and return the consumer's results. The producer's request is sent."""
    consumer.cache[:] = 0
    consumer.step(receives=[receive(producer.address, name, name)])
    producer.step(expects=[Expect(f"q-{name}", name, 7, DIGEST)])
    producer.step(chunks=[Chunk(f"q-{name}", ((1, 2),), 7)])
    found = results(consumer)
    producer.step(finished=[Finished(f"q-{name}", True, "")])
    assert results(producer) == ({f"q-{name}"}, set(), set())
    return found


@pytest.fixture
def pair(worker: Callable[..., Worker]) -> tuple[Worker, Worker]:
    """A producer with content in its cache, and a consumer."""
    producer, consumer = worker("p", transport_class=BreaksOnce), worker("c")
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    return producer, consumer


@pytest.mark.parametrize("where", ["write", "poll"])
def test_a_transport_that_raises_anything(
    pair: tuple[Worker, Worker], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The delivery is aborted, its consumer computes the prompt, and the blocks are freed;
    logged once.
    """
    producer, consumer = pair
    assert isinstance(producer.transport, BreaksOnce)
    producer.transport.where = where
    assert transfer(producer, consumer, "broken") == (set(), {"broken"}, {"broken"})
    assert producer.runtime.counts()["writes"] == 0
    assert caplog.text.count("RuntimeError: anything") == 1
    assert transfer(producer, consumer, "whole") == (set(), {"whole"}, set())
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]


def test_a_digest_that_breaks(pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode does not use bytes without a digest, and the write ends normally."""
    add = digest.TransferDigest.add
    broken: list[bool] = []

    def breaks_once(*arguments: object) -> None:
        if not broken:
            broken.append(True)
            raise RuntimeError("anything")
        add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(digest.TransferDigest, "add", breaks_once)
    assert transfer(*pair, "broken") == (set(), {"broken"}, {"broken"})
    assert transfer(*pair, "whole") == (set(), {"whole"}, set())


def test_a_digest_that_breaks_at_the_end(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another write that ends in the same round is reported; nothing would repeat its ``Sent``."""
    producer, consumer = worker("p", transport_class=HeldWrites), worker("c")
    for name in ("a", "b"):
        consumer.step(receives=[receive(producer.address, name, name)])
        producer.step(expects=[Expect(f"q-{name}", name, 7, DIGEST)])
        producer.step(chunks=[Chunk(f"q-{name}", ((1, 2),), 7)])
    until(lambda: producer.runtime.counts()["writes"] == 2)
    producer.step(finished=[Finished(f"q-{name}", True, "") for name in ("a", "b")])
    hexdigest = digest.TransferDigest.hexdigest
    ended: list[object] = []

    def breaks_at_the_second(one: digest.TransferDigest) -> str:
        ended.append(one)
        if len(ended) == 2:
            raise RuntimeError("no memory")
        return hexdigest(one)

    monkeypatch.setattr(digest.TransferDigest, "hexdigest", breaks_at_the_second)
    let_go(producer)
    sent: set[str] = set()

    def both_sent() -> bool:
        sent.update(producer.runtime.results()[0])
        consumer.runtime.results()
        return sent == {"q-a", "q-b"}

    until(both_sent)


def test_one_action_does_not_cost_the_next(impatient: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose sending raises is lost, which deadlines cover; the actions after it are
    carried out.
    """
    producer, consumer = impatient("p"), impatient("c")
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    send = MessageSender.send
    broken: list[bool] = []

    def breaks_once(sender: MessageSender, peer: Peer, message: Message) -> None:
        if isinstance(message, Offer) and not broken:
            broken.append(True)
            raise RuntimeError("anything")
        send(sender, peer, message)

    assert transfer(producer, consumer, "first") == (set(), {"first"}, set())
    monkeypatch.setattr(MessageSender, "send", breaks_once)
    consumer.step(receives=[receive(producer.address, "lost", "lost"), receive(producer.address, "lost-twin", "lost")])
    assert results(consumer) == (set(), {"lost-twin"}, {"lost-twin"})
    assert results(consumer) == (set(), {"lost"}, {"lost"})
    until(lambda: not any(consumer.runtime.counts().values()))


def test_a_trace_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk ends the trace only."""
    trace = Trace("/dev/full", "engine", 0)
    trace.event("sent", request="r")
    trace.event("sent", request="r2")
    trace.close()
    assert caplog.text.count("cannot write to the trace file") == 1


def test_a_trace_is_read_while_it_is_written(tmp_path: Path) -> None:
    """An incomplete line, also of a killed process, is no event; the others are."""
    path = tmp_path / "trace.jsonl"
    trace = Trace(str(path), "engine", 0)
    trace.event("receive", spans={"a": 1})
    begun = path.stat().st_size
    trace.event("received")
    whole = path.read_bytes()
    for length in range(begun, len(whole)):
        path.write_bytes(whole[:length])
        assert [event["event"] for event in read_trace(path)] == ["receive"]
    path.write_bytes(whole[:-3] + whole)
    assert [event["event"] for event in read_trace(path)] == ["receive", "received"]
    assert [event["event"] for event in read_trace(path, from_byte=len(whole) - 3 + begun)] == ["received"]
