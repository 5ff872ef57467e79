"""First contact of two workers over the real side channel and machines; memory transport for
bytes.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable

import pytest

from connectors.errors import StaleReferenceError
from connectors.protocol.params import EngineAddress
from connectors.vllm_hma.handshake import probe
from connectors.vllm_hma.handshake.processes import Liveness
from connectors.vllm_hma.handshake.side_channel import fetch_metadata
from connectors.vllm_hma.orders import Expect
from tests.vllm_contract.workers import DIGEST, IDENTITY, Worker, receive, results, until


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
