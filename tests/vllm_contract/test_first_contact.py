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
from connectors.vllm_hma.handshake.side_channel import fetch_metadata
from tests.vllm_contract.workers import IDENTITY, Worker, receive, results


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


def test_another_start_at_the_same_address(worker: Callable[..., Worker]) -> None:
    """A reference to a restarted engine is stale, and the error says so."""
    producer = worker("new")
    with pytest.raises(StaleReferenceError, match="has restarted"):
        fetch_metadata("127.0.0.1", producer.server.port, "old", 60.0)
