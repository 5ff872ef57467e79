"""Messages that nobody asked for, in bulk: what a worker keeps of them, and whom they are for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from connectors.errors import PeerSecretError
from connectors.protocol.cards import encode_worker_card
from connectors.protocol.keys import derive_keys
from connectors.protocol.wire import Cancel, Envelope, Hello, Peer, Welcome, encode
from connectors.vllm_hma import greeter
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.orders import CardMetadata
from connectors.vllm_hma.scheduler import SchedulerConnector
from connectors.vllm_hma.side_channel import fetch_card
from tests.vllm_contract.workers import Worker, until

SECRET = "the secret of these engines"


def test_hellos_wait_in_bounded_number(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """While four are being answered 256 wait, a second one of a peer that waits is none, and afterwards all is well."""
    producer = worker("p")
    inside, go = producer.runtime._greeter, threading.Event()
    answered: list[Peer] = []

    def slow(sender: Peer, message: Hello) -> None:
        assert go.wait(30)
        answered.append(sender)

    monkeypatch.setattr(inside, "_greet", slow)
    for _ in range(2):
        for number in range(1000):
            inside.greeted(Peer(f"c{number}", 0), Hello(b"{}"))
    assert len(inside._pending_hellos) == greeter._MAX_PENDING_HELLOS
    go.set()
    until(lambda: not inside._pending_hellos)
    assert len(answered) == len(set(answered)) == greeter._MAX_PENDING_HELLOS
    inside.greeted(Peer("one more", 0), Hello(b"{}"))
    until(lambda: Peer("one more", 0) in answered)


def test_answers_that_nobody_waits_for_are_not_kept(worker: Callable[..., Worker]) -> None:
    """A Welcome before any Hello, from ever new senders."""
    consumer = worker("c")
    for number in range(1000):
        me = Peer(f"p{number}", 0)
        consumer.runtime._dispatch(f"p{number}/0", encode(Envelope(me, Peer("c", 0), Welcome())), 0.0)
    assert consumer.runtime._greeter._answers == {}


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
    """A signed frame that was for another worker, or is said to come from another, changes nothing here."""
    producer, consumer = worker("p", secret=SECRET), worker("c", secret=SECRET)
    card = encode_worker_card(replace(consumer.card))
    producer.runtime._greeter._greet(Peer("c", 0), Hello(card))
    frame = encode(Envelope(sender, receiver, Cancel("t")), derive_keys(SECRET).messages)
    producer.runtime._dispatch("c/0", frame, 0.0)
    assert producer.runtime._producer._allowance.early.total() == int(taken)


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
    """Where others than this machine's can reach it; and the secret of the configuration is the side channel's."""
    card = encode_worker_card(worker("p").card)
    scheduler = SchedulerConnector(parse_config(config), "p", 1, ())
    try:
        scheduler.publish({(0, 0): CardMetadata(card)})
        assert ("no secret is set" in caplog.text) == warned
        assert scheduler._server is not None
        port = scheduler._server.port
        identity = derive_keys(config.get("secret", "")).identity
        assert fetch_card("127.0.0.1", port, "p", 5.0, identity).incarnation == "p"
        if identity:
            with pytest.raises(PeerSecretError):
                fetch_card("127.0.0.1", port, "p", 5.0)
    finally:
        scheduler.close()
