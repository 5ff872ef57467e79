"""Workers that meet, break off, forget each other and meet again, over real side channels."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from connectors.codec import encode, encode_agent_metadata
from connectors.errors import FailedWriteError, HandshakeError, PeerSecretError, StaleReferenceError, TransportError
from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind
from connectors.protocol.agent_metadata import AgentMetadata, check_peers
from connectors.protocol.wire import Cancel, Envelope, Hello, Peer, Welcome
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.handshake import handshaker, message_sender
from connectors.vllm_hma.handshake.message_sender import agent_name
from connectors.vllm_hma.handshake.peers import PeerTable
from connectors.vllm_hma.handshake.secret import derive_keys
from connectors.vllm_hma.handshake.side_channel import fetch_metadata
from connectors.vllm_hma.orders import EncodedAgentMetadata
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector
from connectors.vllm_hma.worker_side.writes import Writes
from testing.connector_state import snapshot
from testing.memory_transport import MemoryTransport
from tests.vllm_contract.workers import (
    ARRIVED,
    FAILED,
    IDENTITY,
    LIMITS,
    SENT,
    Worker,
    both_ends,
    compute,
    let_go,
    receive,
    results,
    taken,
    transfer,
    until,
)

SECRET = "the secret of these engines"
CONSUMER = Peer("c", 0)
Make = Callable[..., Worker]


def deliver(producer: Worker, consumer: Worker, name: str, arrives: bool = True) -> None:
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    consumer.cache[:] = 0
    consumer.step(receives=[receive(producer.address, f"r{name}", f"t{name}")])
    compute(producer, name)
    assert results(consumer) == (set(), {f"r{name}"}, set() if arrives else {f"r{name}"})
    assert not arrives or consumer.cache[[3, 5], 0].tolist() == [2, 3]


def kept(producer: Worker) -> tuple[int, set[str]]:
    return len(snapshot(producer.runtime).peers.planned), set(producer.transport.peers)


# ---- first contact -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checks", "refusal"), [("tandem-connect", ""), ("tandem-accept", "the prefill engine refused this engine: ")]
)
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"identity": dataclasses.replace(IDENTITY, model="another")}, "model differs"),
        ({"packing": "other"}, "packing of layer 'layer' differs"),
    ],
)
def test_an_engine_that_does_not_fit(
    worker: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    checks: str,
    refusal: str,
    overrides: dict[str, Any],
    reason: str,
) -> None:
    """Either engine refuses the other, also if only the threads ``checks`` compare."""

    def check(producer: AgentMetadata, consumer: AgentMetadata) -> None:
        if threading.current_thread().name.startswith(checks):
            check_peers(producer, consumer)

    monkeypatch.setattr(handshaker, "check_peers", check)
    producer, consumer = worker("p", **overrides), worker("c")
    consumer.step(receives=[receive(producer.address)])
    assert results(consumer, within_s=LIMITS.progress_s / 2) == FAILED
    assert f"cannot connect to prefill engine p: {refusal}{reason}" in caplog.text


def test_another_start_at_the_same_address(worker: Make) -> None:
    with pytest.raises(StaleReferenceError):
        fetch_metadata("127.0.0.1", worker("new").server.port, "old", 60.0)


# ---- removed peers -----------------------------------------------------------------------------


def lose(producer: Worker) -> None:
    runtime = producer.runtime
    with runtime._lock:  # noqa: SLF001 - no event makes one machine alone forget a peer at a chosen moment
        runtime._perform(runtime._producer.peer_lost(CONSUMER, time.monotonic()))  # noqa: SLF001 - as above
    until(lambda: CONSUMER not in snapshot(runtime).producer.heard_at)


@pytest.mark.parametrize("both_roles", [False, True])
def test_what_is_kept_of_a_removed_worker(worker: Make, both_roles: bool) -> None:
    """A worker that has also produced a transfer keeps its connection."""
    producer, consumer = worker("p"), worker("c")
    deliver(producer, consumer, "1")
    assert kept(producer) == (1, {"c/0"})
    if both_roles:
        deliver(consumer, producer, "2")
    lose(producer)
    assert kept(producer) == (0, {"c/0"} if both_roles else set())


class Paused(MemoryTransport):
    """``add_peer`` waits, before or after it has added the peer, until ``go`` is set."""

    before = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.go, self.waits = threading.Event(), threading.Event()
        self.go.set()

    def add_peer(self, metadata: bytes, name: str | None = None) -> str:
        if not self.before:
            super().add_peer(metadata, name)
        self.waits.set()
        assert self.go.wait(30)
        return super().add_peer(metadata, name) if self.before else str(name)


def paused(worker: Worker, before: bool) -> Paused:
    transport = worker.transport
    assert isinstance(transport, Paused)
    transport.before = before
    transport.waits.clear()
    transport.go.clear()
    return transport


@pytest.mark.parametrize("before", [True, False], ids=["before the connection", "behind the connection"])
@pytest.mark.parametrize("as_consumer", [False, True])
def test_a_peer_that_is_removed_during_the_handshake(worker: Make, before: bool, as_consumer: bool) -> None:
    """The handshake succeeds, whether the peer is about to receive or to produce a prompt.

    The consumer has removed the producer engine before, as after forget_s / 2.
    """
    first, second = (worker(name, transport_class=Paused) for name in "pc")
    deliver(first, second, "1")
    if not as_consumer:
        runtime = second.runtime
        with runtime._lock:  # noqa: SLF001 - as in `lose`
            runtime._perform(runtime._consumer.forget("p"))  # noqa: SLF001
    producer, consumer = (second, first) if as_consumer else (first, second)
    handshake = paused(first, before)
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    until(handshake.waits.is_set)
    lose(first)
    handshake.go.set()
    compute(producer, "2")
    while "r2" not in (found := taken(consumer))[1]:
        time.sleep(0.005)
    assert found[2] == set()
    assert kept(first) == (0 if as_consumer else 1, {"c/0"})


def test_no_peer_is_evicted_during_its_handshake(
    impatient: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the only entry belongs to a peer in a handshake, the new peer is refused."""
    monkeypatch.setattr(PeerTable.__init__, "__defaults__", (1,))
    producer, consumer, newcomer = impatient("p", transport_class=Paused), impatient("c"), impatient("d")
    handshake = paused(producer, before=False)
    consumer.step(receives=[receive(producer.address)])
    until(handshake.waits.is_set)
    newcomer.step(receives=[receive(producer.address, "r2", "t2")])
    until(lambda: "peers are busy" in caplog.text)
    handshake.go.set()
    compute(producer)
    assert results(consumer) == ARRIVED
    assert results(newcomer) == (set(), {"r2"}, {"r2"})


def test_a_peer_with_a_transfer_is_not_evicted(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a consumer that offered blocks nor a producer that may write to them."""
    monkeypatch.setattr(PeerTable.__init__, "__defaults__", (1,))
    producer, consumer = both_ends(worker)
    until(lambda: not any(one.runtime._peers._handshaking for one in (producer, consumer)))  # noqa: SLF001
    for one in (producer, consumer):
        with pytest.raises(HandshakeError, match="all 1 peers are busy"), one.runtime._peers.handshaking(Peer("x", 0)):  # noqa: SLF001
            pass
    let_go(producer)
    producer.step(finished=[SENT])
    assert results(consumer) == ARRIVED
    for one in (producer, consumer):
        with one.runtime._peers.handshaking(Peer("x", 0)):  # noqa: SLF001
            assert not one.transport.peers


def full(busy: str = "") -> PeerTable:
    """A table of three: a and b have sent Hello, c has sent an offer."""
    table = PeerTable(lambda one: one.incarnation in busy, most=3)
    for name in "abc":
        assert table.admit(Peer(name, 0)) is None
    table.spoke(Peer("c", 0))
    return table


@pytest.mark.parametrize(
    ("busy", "offers", "hellos", "evicted"),
    [
        # The least recent peer with only a Hello; a flood of Hellos evicts its own entries.
        ("", "", "nmlk", "abnm"),
        # Among peers with offers, the least recent one.
        ("", "abca", "d", "b"),
        # A second Hello takes no second place, a has just repeated its, and c keeps its offer.
        ("", "", "acdef", "--bad"),
        # Only a Hello adds a peer.
        ("", "d", "d", "a"),
        # Writes to a and b are in flight.
        ("ab", "", "d", "c"),
    ],
)
def test_who_is_evicted(busy: str, offers: str, hellos: str, evicted: str) -> None:
    table = full(busy)
    for name in offers:
        table.spoke(Peer(name, 0))
    assert [table.admit(Peer(name, 0)) for name in hellos] == [None if n == "-" else Peer(n, 0) for n in evicted]
    assert len(table) == 3
    with pytest.raises(HandshakeError, match="all 3 peers are busy"):
        full("abc").admit(Peer("d", 0))


def test_a_worker_that_was_forgotten_is_met_again(impatient: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode computes its next request: only its Cancel starts a new handshake."""
    monkeypatch.setattr(PeerTable.__init__, "__defaults__", (2,))
    producer, first = impatient("p"), impatient("c")
    deliver(producer, first, "first")
    for number in range(3):
        deliver(producer, impatient(f"c{number}"), f"other {number}")
    assert len(snapshot(producer.runtime).peers.admitted) == kept(producer)[0] == len(kept(producer)[1]) == 2
    deliver(producer, first, "lost", arrives=False)
    deliver(producer, first, "found")


def test_producers_are_forgotten_too(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine outlives many prefill engines; it reconnects to a removed one."""
    monkeypatch.setattr(PeerTable.__init__, "__defaults__", (2,))
    consumer, producers = worker("c"), [worker(f"p{number}") for number in range(4)]
    for number, producer in enumerate([*producers, producers[0]]):
        deliver(producer, consumer, str(number))
    assert len(consumer.transport.peers) == len(snapshot(consumer.runtime).consumer.partners) == 2


# ---- connections -------------------------------------------------------------------------------


class Breakable(MemoryTransport):
    """Transport that acts like NIXL over TCP after a reset: nothing reaches a peer until its
    connection is reopened.
    """

    broken = writes_may_arrive = False

    def notify(self, peer: str, payload: bytes) -> None:
        if self.broken:
            raise TransportError(peer, "NIXL_ERR_REMOTE_DISCONNECT")
        super().notify(peer, payload)

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        if self.broken:
            raise (FailedWriteError if self.writes_may_arrive else TransportError)(peer, "NIXL_ERR_REMOTE_DISCONNECT")
        return super().write(peer, runs, source, target)

    def reconnect(self, peer: str) -> None:
        super().reconnect(peer)
        self.broken = False


@pytest.mark.parametrize("side", ["the consumer's", "the producer's", "the producer's, after its post"])
def test_a_connection_that_broke(worker: Make, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """The next offer, write or Fin uses a new one. A message finds it before a write is posted,
    which would count as started and quarantine blocks.
    """
    producer, consumer = (worker(name, transport_class=Breakable) for name in "pc")
    deliver(producer, consumer, "1")
    broken = (consumer if "consumer" in side else producer).transport
    assert isinstance(broken, Breakable)
    broken.broken = True
    if "post" in side:
        broken.writes_may_arrive = True
        monkeypatch.setattr(message_sender, "_CHECK_EVERY_S", 0.0)
    deliver(producer, consumer, "2")


def test_an_offer_that_reaches_nobody_holds_no_blocks(worker: Make) -> None:
    """The request is computed at once, without quarantine."""
    producer, consumer = worker("p"), worker("c")
    deliver(producer, consumer, "1")
    consumer.transport.fabric.cut("p/0")
    consumer.step(receives=[receive(producer.address, "lost", "lost")])
    assert results(consumer, within_s=LIMITS.progress_s / 2) == (set(), {"lost"}, {"lost"})
    assert consumer.runtime.counts()["quarantined"] == 0
    consumer.transport.fabric.mend("p/0")
    deliver(producer, consumer, "2")


@pytest.mark.parametrize("part", ["notifications", "poll"])
def test_deadlines_are_kept_whatever_fails_in_every_round(
    impatient: Make, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = impatient("p"), impatient("c")
    deliver(producer, consumer, "1")

    def failing(*_: object) -> NoReturn:
        raise RuntimeError("anything")

    monkeypatch.setattr(Writes if part == "poll" else consumer.transport, part, failing)
    consumer.step(receives=[receive(producer.address, "unheard", "unheard")])
    assert results(consumer) == (set(), {"unheard"}, {"unheard"})


# ---- floods ------------------------------------------------------------------------------------


def say_hello(to: Worker, sender: Peer, agent_metadata: bytes = b"{}", secret: str = "") -> None:
    receiver = Peer(to.agent_metadata.incarnation, to.agent_metadata.rank)
    frame = encode(Envelope(sender, receiver, Hello(agent_metadata)), derive_keys(secret).messages)
    to.runtime.frame_received(agent_name(sender), frame, time.monotonic())


def test_hellos_wait_in_bounded_number(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While four are being answered 256 are pending, and a repeated one is dropped."""
    producer, go = worker("p"), threading.Event()
    answered: list[Peer] = []

    def slow(_: handshaker.Handshaker, sender: Peer, message: Hello) -> None:
        assert go.wait(30)
        answered.append(sender)

    monkeypatch.setattr(handshaker.Handshaker, "_accept", slow)
    for number in (*range(9), *range(1000)):
        say_hello(producer, Peer(f"c{number}", 0))
    assert len(snapshot(producer.runtime).handshaker.pending_hellos) == handshaker.MAX_PENDING_HELLOS
    go.set()
    until(lambda: not snapshot(producer.runtime).handshaker.pending_hellos)
    assert len(answered) == len(set(answered)) == handshaker.MAX_PENDING_HELLOS
    say_hello(producer, Peer("one more", 0))
    until(lambda: Peer("one more", 0) in answered)


def test_a_hello_that_is_dropped_is_repeated(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = worker("p"), worker("c")
    hello_received = handshaker.Handshaker.hello_received
    seen: list[Peer] = []

    def drop_first(self: handshaker.Handshaker, sender: Peer, message: Hello) -> None:
        if seen:
            hello_received(self, sender, message)
        seen.append(sender)

    monkeypatch.setattr(handshaker.Handshaker, "hello_received", drop_first)
    consumer.step(receives=[receive(producer.address)])
    until(lambda: consumer.runtime.counts()["offered"] == 1)
    assert seen == [CONSUMER] * 2


def test_more_than_64_decode_engines_of_8_ranks_are_known_at_once(worker: Make) -> None:
    producer, template = worker("p"), worker("c").agent_metadata
    encoded = {}
    for number in range(65 * 8):
        transport = MemoryTransport(f"c{number}/0", producer.transport.fabric)
        metadata = dataclasses.replace(template, incarnation=f"c{number}", transport_metadata=transport.metadata())
        encoded[Peer(metadata.incarnation, 0)] = encode_agent_metadata(metadata)

    def all_known() -> bool:
        unknown = encoded.keys() - snapshot(producer.runtime).producer.consumers.keys()
        for peer in unknown:
            say_hello(producer, peer, encoded[peer])
        return not unknown

    until(all_known)


def test_answers_that_nobody_waits_for_are_not_kept(worker: Make) -> None:
    consumer = worker("c")
    for number in range(1000):
        frame = encode(Envelope(Peer(f"p{number}", 0), CONSUMER, Welcome()))
        consumer.runtime.frame_received(f"p{number}/0", frame, 0.0)
    assert not snapshot(consumer.runtime).handshaker.answers


@pytest.mark.parametrize(
    ("receiver", "sender", "taken"),
    [
        (Peer("p", 0), CONSUMER, True),
        (Peer("p", 1), CONSUMER, False),
        (Peer("an older p", 0), CONSUMER, False),
        (Peer("p", 0), Peer("d", 0), False),
        (Peer("p", 0), Peer("c", 1), False),
    ],
)
def test_whom_a_message_is_for(worker: Make, receiver: Peer, sender: Peer, taken: bool) -> None:
    """A signed frame for another worker, or with another sender, has no effect."""
    producer = worker("p", secret=SECRET)
    for name in "cd":
        metadata = worker(name, secret=SECRET).agent_metadata
        say_hello(producer, Peer(name, 0), encode_agent_metadata(metadata), SECRET)
    until(lambda: len(snapshot(producer.runtime).producer.consumers) == 2)
    frame = encode(Envelope(sender, receiver, Cancel("t")), derive_keys(SECRET).messages)
    producer.runtime.frame_received("c/0", frame, 0.0)
    assert sum(snapshot(producer.runtime).producer.early.values()) == int(taken)


ANYWHERE = {"side_channel_host": "0.0.0.0", "advertise_host": "127.0.0.1"}


@pytest.mark.parametrize(("config", "warned"), [(ANYWHERE, True), (ANYWHERE | {"secret": SECRET}, False), ({}, False)])
def test_an_engine_without_a_secret_says_so(
    worker: Make, caplog: pytest.LogCaptureFixture, config: dict[str, str], warned: bool
) -> None:
    """If other machines can reach it. The side channel uses the configured secret."""
    agent_metadata = encode_agent_metadata(worker("p").agent_metadata)
    scheduler = SchedulerConnector(parse_config(config), "p", 1, (), 256)
    try:
        scheduler.publish({(0, 0): EncodedAgentMetadata(agent_metadata)})
        assert ("no secret is set" in caplog.text) == warned
        port = snapshot(scheduler).side_channel_port
        identity = derive_keys(config.get("secret", "")).identity
        assert fetch_metadata("127.0.0.1", port, "p", 60.0, identity).incarnation == "p"
        if identity:
            with pytest.raises(PeerSecretError):
                fetch_metadata("127.0.0.1", port, "p", 5.0)
    finally:
        scheduler.close()


@pytest.mark.parametrize("secret", ["", SECRET])
def test_peers_with_one_secret_exchange_kv(worker: Make, secret: str) -> None:
    assert transfer(worker("p", secret=secret), worker("c", secret=secret)) == ARRIVED
