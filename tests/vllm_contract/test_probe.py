"""The probe of engines that do not answer: it survives any address, and asks at the one where the engine was met."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from connectors.errors import HandshakeError
from connectors.protocol.params import EngineAddress
from connectors.vllm_hma import probe
from connectors.vllm_hma.orders import Chunk, Expect
from connectors.vllm_hma.probe import EngineProbe
from connectors.vllm_hma.side_channel import fetch_card
from tests.vllm_contract.test_ends import HeldWrites, let_go
from tests.vllm_contract.workers import DIGEST, Worker, receive, results, until

MALFORMED = ("a" * 70, "a..b", "nul\x00", "\udcff", ".", "[::1]")


@pytest.fixture
def refusing() -> Iterator[int]:
    """A port where nothing listens, and nobody else will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_a_malformed_host_ends_no_thread(refusing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be an address proves nothing, and keeps nobody else's end from being found out."""
    monkeypatch.setattr(probe, "_CONFIRM_S", 0.01)
    broken: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    lost: list[str] = []
    watcher = EngineProbe(0.2, b"", lambda incarnation, _: lost.append(incarnation))
    try:
        for number, host in enumerate(MALFORMED):
            bad = EngineAddress(f"bad {number}", host, refusing)
            gone = EngineAddress(f"gone {number}", "127.0.0.1", refusing)
            watcher.watch({bad, gone})
            until(partial(lost.__contains__, gone.incarnation))
        assert not [name for name in lost if name.startswith("bad")]
        assert not broken
    finally:
        watcher.close()


@pytest.mark.parametrize("host", MALFORMED)
def test_a_malformed_host_is_a_failed_handshake(host: str, refusing: int) -> None:
    """With a typed error, as for any address where nobody answers."""
    with pytest.raises(HandshakeError):
        fetch_card(host, refusing, "p", 0.2)


def test_who_cannot_be_told_is_told_again(refusing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word of an engine's end may meet an error; the thread that brings it lives on."""
    monkeypatch.setattr(probe, "_CONFIRM_S", 0.01)
    told: list[str] = []

    def tell(incarnation: str, reason: str) -> None:
        told.append(incarnation)
        if len(told) == 1:
            raise RuntimeError("not now")

    watcher = EngineProbe(0.2, b"", tell)
    try:
        watcher.watch({EngineAddress("gone", "127.0.0.1", refusing)})
        until(lambda: len(told) > 1)
    finally:
        watcher.close()


def test_an_engine_is_probed_where_it_was_met(worker: Callable[..., Worker], refusing: int) -> None:
    """A request that names a known engine with an address where nothing listens must not make it one that has ended:
    it may still write."""
    producer, consumer = worker("p", transport_class=HeldWrites), worker("c")
    consumer.step(receives=[receive(producer.address, "first", "other")])
    until(lambda: consumer.runtime.census()["offered"] == 1)
    consumer.step(receives=[receive(dataclasses.replace(producer.address, port=refusing))])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)], chunks=[Chunk("q", ((1, 2),), 7)])
    until(lambda: consumer.runtime.census()["quarantined"] == 1)
    until(lambda: bool(consumer.runtime.snapshot().probed))
    assert consumer.runtime.snapshot().probed == {producer.address}
    let_go(producer)
    until(lambda: "r" in results(consumer)[1])
