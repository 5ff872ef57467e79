"""First contact of two workers over the real side channel and machines; memory transport for
bytes.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable

import numpy as np
import pytest

from connectors.errors import HandshakeError, StaleReferenceError, WireError
from connectors.protocol.params import EngineAddress
from connectors.vllm_hma.handshake import probe
from connectors.vllm_hma.handshake.processes import Liveness
from connectors.vllm_hma.handshake.side_channel import MetadataServer, fetch_metadata
from connectors.vllm_hma.orders import Chunk, Expect, Finished
from tests.vllm_contract.workers import BLOCKS, DIGEST, IDENTITY, Worker, receive, results, until


def test_a_transfer_from_first_contact_to_the_end(worker: Callable[..., Worker]) -> None:
    """Handshake, offer, chunks, Fin: the bytes arrive, both sides report once, and nothing
    leaks.
    """
    producer, consumer = worker("p"), worker("c")
    producer.cache[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None] + 1
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    producer.step(chunks=[Chunk("q", ((1,),), 4)])
    producer.step(chunks=[Chunk("q", ((2,),), 7)])
    assert results(consumer) == (set(), {"r"}, set())
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]
    producer.step(finished=[Finished("q", True, "")])
    assert results(producer) == ({"q"}, set(), set())


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"identity": dataclasses.replace(IDENTITY, model="another")}, "model differs"),
        ({"identity": dataclasses.replace(IDENTITY, dtype="bfloat16")}, "dtype differs"),
        ({"identity": dataclasses.replace(IDENTITY, engine_version="0.31.0")}, "engine_version differs"),
        ({"packing": "other"}, "packing of layer 'layer' differs"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_with_the_reason(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture, overrides: dict, reason: str
) -> None:
    """The request falls back to local computation, and the log names the difference."""
    producer, consumer = worker("p", **overrides), worker("c")
    consumer.step(receives=[receive(producer.address)])
    assert results(consumer) == (set(), {"r"}, {"r"})
    assert reason in caplog.text


def test_nobody_at_the_address(worker: Callable[..., Worker]) -> None:
    """An absent engine fails the request within handshake_s."""
    consumer = worker("c")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = EngineAddress("p", "127.0.0.1", unused.getsockname()[1])
    consumer.step(receives=[receive(address)])
    assert results(consumer) == (set(), {"r"}, {"r"})


def test_a_silent_producer(impatient: Callable[..., Worker]) -> None:
    """A producer whose request never arrives is cancelled after progress_s; its answer frees the
    blocks.
    """
    producer, consumer = impatient("p"), impatient("c")
    consumer.step(receives=[receive(producer.address)])
    assert results(consumer) == (set(), {"r"}, {"r"})


def test_a_dead_producer_frees_the_blocks_at_last(
    impatient: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer to Cancel the request continues, and its blocks are in quarantine until
    the process has ended.
    """
    producer, consumer = impatient("p"), impatient("c")
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    consumer.step(receives=[receive(producer.address)])
    until(lambda: consumer.runtime.counts()["offered"] == 1)
    producer.close()
    assert results(consumer) == (set(), {"r"}, {"r"})
    monkeypatch.setattr(probe, "liveness", lambda _: Liveness.GONE)
    until(lambda: not any(consumer.runtime.counts().values()))


def test_another_start_at_the_same_address(worker: Callable[..., Worker]) -> None:
    """A reference to a restarted engine is stale, and the error says so."""
    producer = worker("new")
    with pytest.raises(StaleReferenceError, match="has restarted"):
        fetch_metadata("127.0.0.1", producer.server.port, "old", 60.0)


def test_the_side_channel_survives_whatever_it_is_sent(worker: Callable[..., Worker]) -> None:
    """Malformed, foreign and oversized requests are answered or dropped, and the next valid one
    is answered.
    """
    producer = worker("p")
    for question in (
        b"\n",
        b"x" * 900,
        b"GET / HTTP/1.1\r\n\r\n",
        b"y" * 5000,
        b"\x00" * 4096,
        b"\x16\x03\x01\xff\xff",
    ):
        with socket.create_connection(("127.0.0.1", producer.server.port)) as raw:
            raw.sendall(question)
    assert fetch_metadata("127.0.0.1", producer.server.port, "p", 60.0).incarnation == "p"


def test_an_answer_that_is_no_metadata() -> None:
    """Another service on the port causes a typed error."""
    server = MetadataServer("127.0.0.1", 0, [b"not agent metadata"])
    try:
        with pytest.raises(WireError, match="malformed agent metadata"):
            fetch_metadata("127.0.0.1", server.port, "p", 60.0)
    finally:
        server.close()


def test_a_host_that_does_not_answer() -> None:
    """A port that accepts connections and sends nothing costs timeout_s and no more."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(HandshakeError, match=r"did not answer within 0\.5 s: connected, but received only 0 of"):
            fetch_metadata("127.0.0.1", mute.getsockname()[1], "p", 0.5)
