"""A digest, a message or a trace that fails costs its own transfer only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.protocol.wire import Message, Offer, Peer
from connectors.transport import digest
from connectors.vllm_hma.handshake.message_sender import MessageSender
from connectors.vllm_hma.orders import Finished
from connectors.vllm_hma.worker_side.trace import Trace
from testing.trace import read_trace
from tests.vllm_contract.test_ends import HeldWrites, let_go
from tests.vllm_contract.workers import ARRIVED, FAILED, Worker, compute, receive, results, transfer, until


def test_a_digest_that_breaks(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode does not use bytes without a digest, and the write ends normally."""
    pair = worker("p"), worker("c")
    add = digest.TransferDigest.add
    broken: list[bool] = []

    def breaks_once(*arguments: object) -> None:
        if not broken:
            broken.append(True)
            raise RuntimeError("anything")
        add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(digest.TransferDigest, "add", breaks_once)
    assert transfer(*pair) == FAILED
    assert transfer(*pair, "2") == (set(), {"r2"}, set())


def test_a_digest_that_breaks_at_the_end(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another write that ends in the same round is reported; nothing would repeat its ``Sent``."""
    producer, consumer = worker("p", transport_class=HeldWrites), worker("c")
    for name in ("a", "b"):
        consumer.step(receives=[receive(producer.address, f"r{name}", f"t{name}")])
        compute(producer, name)
    until(lambda: producer.runtime.counts()["writes"] == 2)
    producer.step(finished=[Finished(f"q{name}", True, "") for name in ("a", "b")])
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
        return sent == {"qa", "qb"}

    until(both_sent)


def test_one_action_does_not_cost_the_next(impatient: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose sending raises is lost, which deadlines cover; the actions after it are
    carried out.
    """
    producer, consumer = impatient("p"), impatient("c")
    send = MessageSender.send
    broken: list[bool] = []

    def breaks_once(sender: MessageSender, peer: Peer, message: Message) -> None:
        if isinstance(message, Offer) and not broken:
            broken.append(True)
            raise RuntimeError("anything")
        send(sender, peer, message)

    assert transfer(producer, consumer) == ARRIVED
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
