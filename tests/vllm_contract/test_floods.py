"""Floods of unexpected messages: a worker stores few of them, and checks their receiver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from connectors.codec import encode, encode_agent_metadata
from connectors.errors import PeerSecretError
from connectors.protocol.wire import Cancel, Envelope, Hello, Peer, Welcome
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.handshake import handshaker
from connectors.vllm_hma.handshake.message_sender import agent_name
from connectors.vllm_hma.handshake.secret import derive_keys
from connectors.vllm_hma.handshake.side_channel import fetch_metadata
from connectors.vllm_hma.orders import EncodedAgentMetadata
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector
from testing.connector_state import snapshot
from testing.memory_transport import MemoryTransport
from tests.vllm_contract.workers import Worker, receive, until

SECRET = "the secret of these engines"


def say_hello(to: Worker, sender: Peer, agent_metadata: bytes, secret: str = "") -> None:
    """Deliver a Hello as the transport does."""
    receiver = Peer(to.agent_metadata.incarnation, to.agent_metadata.rank)
    frame = encode(Envelope(sender, receiver, Hello(agent_metadata)), derive_keys(secret).messages)
    to.runtime.frame_received(agent_name(sender), frame, time.monotonic())


def test_hellos_wait_in_bounded_number(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """While four are being answered 256 are pending, a repeated Hello is dropped, and then all
    are answered.
    """
    producer = worker("p")
    go = threading.Event()
    answered: list[Peer] = []

    def slow(_: handshaker.Handshaker, sender: Peer, message: Hello) -> None:
        assert go.wait(30)
        answered.append(sender)

    monkeypatch.setattr(handshaker.Handshaker, "_accept", slow)
    for _ in range(2):
        for number in range(1000):
            say_hello(producer, Peer(f"c{number}", 0), b"{}")
    assert len(snapshot(producer.runtime).handshaker.pending_hellos) == handshaker.MAX_PENDING_HELLOS
    go.set()
    until(lambda: not snapshot(producer.runtime).handshaker.pending_hellos)
    assert len(answered) == len(set(answered)) == handshaker.MAX_PENDING_HELLOS
    say_hello(producer, Peer("one more", 0), b"{}")
    until(lambda: Peer("one more", 0) in answered)


def test_a_hello_that_is_dropped_is_repeated(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer drops Hellos above the limit: their senders lose a second, not the handshake."""
    producer, consumer = worker("p"), worker("c")
    hello_received = handshaker.Handshaker.hello_received
    dropped: list[Peer] = []

    def drop_first(self: handshaker.Handshaker, sender: Peer, message: Hello) -> None:
        if dropped:
            hello_received(self, sender, message)
        dropped.append(sender)

    monkeypatch.setattr(handshaker.Handshaker, "hello_received", drop_first)
    consumer.step(receives=[receive(producer.address)])
    until(lambda: consumer.runtime.counts()["offered"] == 1)
    assert dropped == [Peer("c", 0)] * 2


def test_more_than_64_decode_engines_of_8_ranks_are_known_at_once(worker: Callable[..., Worker]) -> None:
    """Hellos do not replace each other, and senders of dropped ones repeat them."""
    producer, template = worker("p"), worker("c").agent_metadata
    encoded = {}
    for number in range(65 * 8):
        transport = MemoryTransport(f"c{number}/0", producer.transport.fabric)
        metadata = replace(template, incarnation=f"c{number}", transport_metadata=transport.metadata())
        encoded[Peer(metadata.incarnation, 0)] = encode_agent_metadata(metadata)

    def all_known() -> bool:
        unknown = encoded.keys() - snapshot(producer.runtime).producer.consumers.keys()
        for peer in unknown:
            say_hello(producer, peer, encoded[peer])
        return not unknown

    until(all_known, within_s=60.0)


def test_answers_that_nobody_waits_for_are_not_kept(worker: Callable[..., Worker]) -> None:
    """Welcomes without a Hello, from ever new senders, are ignored."""
    consumer = worker("c")
    for number in range(1000):
        me = Peer(f"p{number}", 0)
        consumer.runtime.frame_received(f"p{number}/0", encode(Envelope(me, Peer("c", 0), Welcome())), 0.0)
    assert not snapshot(consumer.runtime).handshaker.answers


@pytest.mark.parametrize(
    ("receiver", "sender", "taken"),
    [
        (Peer("p", 0), Peer("c", 0), True),
        (Peer("p", 1), Peer("c", 0), False),
        (Peer("an older p", 0), Peer("c", 0), False),
        (Peer("p", 0), Peer("d", 0), False),
        (Peer("p", 0), Peer("c", 1), False),
    ],
    ids=["for us", "another rank", "another start", "another sender", "another sender's rank"],
)
def test_whom_a_message_is_for(worker: Callable[..., Worker], receiver: Peer, sender: Peer, taken: bool) -> None:
    """A signed frame for another worker, or with another sender, has no effect."""
    producer, consumer = worker("p", secret=SECRET), worker("c", secret=SECRET)
    agent_metadata = encode_agent_metadata(replace(consumer.agent_metadata))
    say_hello(producer, Peer("c", 0), agent_metadata, SECRET)
    until(lambda: Peer("c", 0) in snapshot(producer.runtime).producer.consumers)
    frame = encode(Envelope(sender, receiver, Cancel("t")), derive_keys(SECRET).messages)
    producer.runtime.frame_received("c/0", frame, 0.0)
    assert sum(snapshot(producer.runtime).producer.early.values()) == int(taken)


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        ({"side_channel_host": "0.0.0.0", "advertise_host": "127.0.0.1"}, True),
        ({"side_channel_host": "0.0.0.0", "advertise_host": "127.0.0.1", "secret": SECRET}, False),
        ({"side_channel_host": "127.0.0.1"}, False),
    ],
    ids=["open", "with a secret", "one machine"],
)
def test_an_engine_without_a_secret_says_so(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture, config: dict[str, str], warned: bool
) -> None:
    """Without a secret the worker warns if other machines can reach it; the side channel uses
    the configured secret.
    """
    agent_metadata = encode_agent_metadata(worker("p").agent_metadata)
    scheduler = SchedulerConnector(parse_config(config), "p", 1, (), 256)
    try:
        scheduler.publish({(0, 0): EncodedAgentMetadata(agent_metadata)})
        assert ("no secret is set" in caplog.text) == warned
        port = snapshot(scheduler).side_channel_port
        assert port is not None
        identity = derive_keys(config.get("secret", "")).identity
        assert fetch_metadata("127.0.0.1", port, "p", 60.0, identity).incarnation == "p"
        if identity:
            with pytest.raises(PeerSecretError):
                fetch_metadata("127.0.0.1", port, "p", 5.0)
    finally:
        scheduler.close()
