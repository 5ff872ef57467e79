"""Two workers meet: over the real side channel, with real machines, and the memory transport for the bytes."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import zmq

from connectors.errors import HandshakeError, StaleReferenceError, WireError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, Place, Region
from connectors.protocol.cards import ModelIdentity, WorkerCard, encode_worker_card
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress, prompt_digest
from connectors.transport.memory import Fabric, MemoryTransport
from connectors.vllm_hma.config import ConnectorConfig
from connectors.vllm_hma.fence import StepFence
from connectors.vllm_hma.orders import Chunk, Expect, Finished, Orders, Receive
from connectors.vllm_hma.side_channel import CardServer, fetch_card
from connectors.vllm_hma.worker import WorkerRuntime

BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 8, 4, 64
IDENTITY = ModelIdentity("model", "float32", "auto", "0.32.0")
LIMITS = TransferLimits(handshake_s=3.0, progress_s=1.0, alive_s=0.2, cancel_s=0.3, lease_s=2.0)
DIGEST = prompt_digest([1, 2, 3])


class Worker:
    """A WorkerRuntime over a numpy cache of one full-attention group, and the side channel that shows its card."""

    def __init__(self, fabric: Fabric, name: str, identity: ModelIdentity = IDENTITY, packing: str = "p") -> None:
        self.cache = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        address = self.cache.ctypes.data
        pages = LayerPages("layer", address, BLOCK_BYTES, 1, BLOCK_BYTES, 1, BLOCK_BYTES, BLOCK_BYTES, packing)
        layout = EngineLayout(
            0,
            1,
            1,
            BLOCKS,
            (Region(address, self.cache.nbytes, Place("DRAM", 0)),),
            (Group(0, GroupKind.FULL, BLOCK_TOKENS, None, (pages,)),),
        )
        transport = MemoryTransport(f"{name}/0", fabric)
        transport.register(layout.regions)
        self.card = WorkerCard(name, identity, layout, transport.kind, transport.metadata())
        self.runtime = WorkerRuntime(
            ConnectorConfig(limits=LIMITS), self.card, transport, StepFence(torch.device("cpu"))
        )
        self.server = CardServer("127.0.0.1", 0, [encode_worker_card(self.card)])

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.card.incarnation, "127.0.0.1", self.server.port)

    def step(self, **orders: list) -> None:
        """One engine step, as vLLM's hooks see it."""
        self.runtime.before_forward(Orders(**orders))
        self.runtime.after_forward(Orders(**orders))

    def close(self) -> None:
        self.server.close()
        self.runtime.close()


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """Makes workers on one fabric, and closes them."""
    fabric = Fabric()
    made: list[Worker] = []

    def make(name: str, **overrides: object) -> Worker:
        made.append(Worker(fabric, name, **overrides))
        return made[-1]

    yield make
    for one in made:
        one.close()


def receive(producer: EngineAddress, request: str = "r") -> Receive:
    """An order for two blocks, tokens 0 to 6 of a prompt of 7."""
    return Receive(request, "t", producer, DIGEST, ((3, 5),), 0, 6)


def until(condition: Callable[[], bool], within_s: float = 8.0) -> None:
    """Wait for another thread's work, at most ``within_s``."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {within_s} s"
        time.sleep(0.005)


def results(worker: Worker, within_s: float = 8.0) -> tuple[set[str], set[str], set[str]]:
    """Step until the worker reports something."""
    reported: list[tuple[set[str], set[str], set[str]]] = []

    def something() -> bool:
        reported.append(worker.runtime.results())
        return any(reported[-1])

    until(something, within_s)
    return reported[-1]


def test_a_transfer_from_first_contact_to_the_end(worker: Callable[..., Worker]) -> None:
    """Handshake, offer, chunks, Fin: the bytes arrive, both sides report once, and nothing stays behind."""
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
    """The request fails over to local computation, and the log says what differs."""
    producer, consumer = worker("p", **overrides), worker("c")
    consumer.step(receives=[receive(producer.address)])
    assert results(consumer) == (set(), {"r"}, {"r"})
    assert reason in caplog.text


def test_nobody_at_the_address(worker: Callable[..., Worker]) -> None:
    """An engine that is not there fails the request within handshake_s."""
    consumer = worker("c")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = EngineAddress("p", "127.0.0.1", unused.getsockname()[1])
    consumer.step(receives=[receive(address)])
    assert results(consumer) == (set(), {"r"}, {"r"})


def test_a_silent_producer(worker: Callable[..., Worker]) -> None:
    """A producer whose request never comes is cancelled after progress_s; its answer frees the blocks."""
    producer, consumer = worker("p"), worker("c")
    consumer.step(receives=[receive(producer.address)])
    assert results(consumer) == (set(), {"r"}, {"r"})


def test_a_dead_producer_frees_the_blocks_at_last(worker: Callable[..., Worker]) -> None:
    """Without an answer to Cancel the blocks are in quarantine, until nothing listens at the engine's address."""
    producer, consumer = worker("p"), worker("c")
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    consumer.step(receives=[receive(producer.address)])
    until(lambda: consumer.runtime.census()["offered"] == 1)
    producer.close()
    assert results(consumer, within_s=15.0) == (set(), {"r"}, {"r"})


def test_another_start_at_the_same_address(worker: Callable[..., Worker]) -> None:
    """A reference to an engine that has been restarted is stale, and says so."""
    producer = worker("new")
    with pytest.raises(StaleReferenceError, match="restarted since"):
        fetch_card("127.0.0.1", producer.server.port, "old", 3.0)


def test_the_side_channel_survives_whatever_it_is_sent(worker: Callable[..., Worker]) -> None:
    """Malformed, foreign and oversized questions are answered or dropped, and the next proper one is answered."""
    producer = worker("p")
    context = zmq.Context()
    for question in ([b""], [b"x" * 900], [b"GET / HTTP/1.1"], [b"a", b"b"], [b"y" * 5000]):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{producer.server.port}")
        dealer.send_multipart(question)
        dealer.poll(200)
        dealer.close(linger=0)
    with socket.create_connection(("127.0.0.1", producer.server.port)) as raw:
        raw.sendall(b"\x00" * 4096)
    context.destroy(linger=0)
    assert fetch_card("127.0.0.1", producer.server.port, "p", 3.0).incarnation == "p"


def test_an_answer_that_is_no_card() -> None:
    """Something else on the port gives a typed error, not an exception of its own."""
    server = CardServer("127.0.0.1", 0, [b"not a card"])
    try:
        with pytest.raises(WireError, match="malformed worker card"):
            fetch_card("127.0.0.1", server.port, "p", 3.0)
    finally:
        server.close()


def test_a_host_that_does_not_answer() -> None:
    """A port that takes connections and says nothing costs timeout_s and no more."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(HandshakeError, match=r"did not answer within 0\.5 s"):
            fetch_card("127.0.0.1", mute.getsockname()[1], "p", 0.5)
