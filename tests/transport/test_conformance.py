"""Behaviour of every transport: one suite for the in-memory one and NIXL, with real memory.

``tests/gpu/test_checks.py`` has NIXL between two processes: bytes, bounds, fragments, large
messages.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from connectors.errors import TransportError
from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind, Region
from connectors.transport.nixl import NixlTransport
from testing.memory_transport import Fabric
from tests.transport.agents import HOST, Agent, make_agent, receive, runs, until, write

SIZE = 1 << 20
CANARY = 0xA5


@pytest.fixture(scope="module", params=["memory", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture(scope="module")
def pair(kind: str, fabric: Fabric) -> Iterator[tuple[Agent, Agent]]:
    """Two agents that know each other. First contact takes time, so the whole module shares
    them.
    """
    ours, theirs = (make_agent(kind, fabric, SIZE) for _ in range(2))
    for one, other in ((ours, theirs), (theirs, ours)):
        assert one.transport.add_peer(other.transport.metadata()) == other.name
    yield ours, theirs
    ours.transport.close()
    theirs.transport.close()


@pytest.fixture
def fresh(pair: tuple[Agent, Agent]) -> tuple[Agent, Agent]:
    pair[0].buffer[:] = np.arange(SIZE // 4, dtype="<u4").view(np.uint8)
    pair[1].buffer[:] = CANARY
    return pair


@pytest.fixture
def lone(kind: str, fabric: Fabric) -> Iterator[Agent]:
    agent = make_agent(kind, fabric, 4096)
    yield agent
    agent.transport.close()


def test_messages_arrive_whole_and_once(pair: tuple[Agent, Agent], lone: Agent) -> None:
    """Messages have the sender's name and any bytes. Their order is not guaranteed. A peer can send
    them before it is known.
    """
    ours, theirs = pair
    payloads = [b"hello", b"", bytes(range(256)), b"\0\0", "ünïcode".encode()]
    for payload in payloads:
        ours.transport.notify(theirs.name, payload)
    assert sorted(receive(theirs, len(payloads), ours)) == sorted((ours.name, payload) for payload in payloads)
    assert theirs.transport.notifications() == []
    lone.transport.add_peer(theirs.transport.metadata())
    lone.transport.notify(theirs.name, b"you do not know me")
    assert receive(theirs, 1, lone) == [(lone.name, b"you do not know me")]


def test_no_connection_is_made_anew_under_a_write(fresh: tuple[Agent, Agent]) -> None:
    """``reconnect`` is refused until the last write to the peer has been polled to its end. Its
    handle then never refers to another write.
    """
    ours, theirs = fresh
    handle = ours.transport.write(theirs.name, runs((ours.address, theirs.address, 512)), HOST, HOST)
    with pytest.raises(TransportError, match="in flight"):
        ours.transport.reconnect(theirs.name)
    until(lambda: ours.transport.poll(handle), [theirs])
    ours.transport.reconnect(theirs.name)
    again = ours.transport.write(theirs.name, runs((ours.address, theirs.address, 512)), HOST, HOST)
    with pytest.raises(KeyError):
        ours.transport.poll(handle)
    until(lambda: ours.transport.poll(again), [theirs])


def test_a_connection_made_anew_while_a_write_is_prepared(
    fresh: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write must not fail as if parts of it could still arrive."""
    ours, theirs = fresh
    if not isinstance(ours.transport, NixlTransport):
        pytest.skip("writes of the memory transport have no preparation")
    prepare = ours.transport.prepare

    def reconnect() -> None:
        with suppress(TransportError):  # the write may be in flight by then
            ours.transport.reconnect(theirs.name)

    other = threading.Thread(target=reconnect, daemon=True)

    def slow(*arguments: Any) -> Any:
        prepared = prepare(*arguments)
        other.start()
        other.join(0.3)
        return prepared

    monkeypatch.setattr(ours.transport, "prepare", slow)
    handle = ours.transport.write(theirs.name, runs((ours.address, theirs.address, 512)), HOST, HOST)
    monkeypatch.undo()
    until(lambda: ours.transport.poll(handle), [theirs])
    other.join(30)
    assert not other.is_alive()
    assert np.array_equal(theirs.buffer[:512], ours.buffer[:512])


def test_what_is_unknown_is_refused(pair: tuple[Agent, Agent]) -> None:
    """Peers that were never added, metadata of any bytes, kinds of memory, and a write of nothing,
    which could never end.
    """
    ours, theirs = pair
    with pytest.raises(TransportError, match="0 runs"):
        ours.transport.write(theirs.name, Runs(*[np.empty(0, np.int64)] * 3), HOST, HOST)
    for call in (
        lambda: ours.transport.write("nobody", runs((ours.address, theirs.address, 8)), HOST, HOST),
        lambda: ours.transport.notify("nobody", b"hello"),
        lambda: ours.transport.reconnect("nobody"),
    ):
        with pytest.raises(TransportError) as refusal:
            call()
        assert refusal.value.peer == "nobody"
    for metadata in (b"", b"junk", bytes(1000), b"\xff" * 40):
        with pytest.raises(TransportError):
            ours.transport.add_peer(metadata)
    with pytest.raises(TransportError):
        ours.transport.register([Region(ours.address, 16, MemoryKind("NO_SUCH_MEMORY", 0))])


def test_regions_registered_later_can_be_written(kind: str, fabric: Fabric, lone: Agent) -> None:
    """Metadata has all regions of several calls of ``register``."""
    more = [np.zeros(512, np.uint8) for _ in range(3)]
    lone.transport.register([Region(buffer.ctypes.data, 512, HOST) for buffer in more])
    sender = make_agent(kind, fabric, 4096, fill=7)
    sender.transport.add_peer(lone.transport.metadata())
    targets = [lone.address, *(buffer.ctypes.data for buffer in more)]
    write(sender, lone, runs(*((sender.address, target, 512) for target in targets)))
    assert all((buffer == 7).all() for buffer in more)
    sender.transport.close()


def test_close_is_idempotent_and_final(lone: Agent, pair: tuple[Agent, Agent]) -> None:
    """A second close has no effect; all other calls on a closed transport raise TransportError."""
    metadata = pair[0].transport.metadata()
    lone.transport.add_peer(metadata)
    handle = lone.transport.write(pair[0].name, runs((lone.address, pair[0].address, 8)), HOST, HOST)
    lone.transport.close()
    lone.transport.close()
    for call in (
        lambda: lone.transport.notify(pair[0].name, b"x"),
        lambda: lone.transport.write(pair[0].name, runs((lone.address, pair[0].address, 8)), HOST, HOST),
        lambda: lone.transport.add_peer(metadata),
        lambda: lone.transport.register([Region(lone.address, 16, HOST)]),
        lambda: lone.transport.poll(handle),
        lone.transport.metadata,
        lone.transport.notifications,
    ):
        with pytest.raises(TransportError) as refusal:
            call()
        assert refusal.value.peer == lone.name
    lone.transport.remove_peer(pair[0].name)


def test_a_closed_peer_breaks_nothing(kind: str, fabric: Fabric) -> None:
    """Writes and messages to a closed peer raise TransportError or have no effect; the agent
    stays usable.
    """
    ours, gone, other = (make_agent(kind, fabric, 4096, fill=9) for _ in range(3))
    for peer in (gone, other):
        ours.transport.add_peer(peer.transport.metadata())
    write(ours, gone, runs((ours.address, gone.address, 8)))
    ours.transport.notify(gone.name, b"hello")
    receive(gone, 1, ours)
    gone.transport.close()
    gone.buffer[:] = CANARY
    for _ in range(3):
        for call in (
            lambda: write(ours, gone, runs((ours.address, gone.address, 64))),
            lambda: ours.transport.notify(gone.name, b"are you there?"),
        ):
            try:
                call()
            except TransportError as error:
                assert error.peer == gone.name  # noqa: PT017
    ours.transport.remove_peer(gone.name)
    other.buffer[:] = 0
    write(ours, other, runs((ours.address, other.address, 64)))
    assert (other.buffer[:64] == 9).all()
    ours.transport.close()
    other.transport.close()


def test_a_removed_peer_is_unknown(kind: str, fabric: Fabric, pair: tuple[Agent, Agent], lone: Agent) -> None:
    """After remove_peer nothing is sent; adding the peer again restores it; removing an unknown
    one has no effect.
    """
    theirs = pair[1]
    theirs.buffer[:] = CANARY
    lone.transport.add_peer(theirs.transport.metadata())
    lone.transport.remove_peer("nobody")
    lone.transport.remove_peer(theirs.name)
    with pytest.raises(TransportError):
        lone.transport.write(theirs.name, runs((lone.address, theirs.address, 8)), HOST, HOST)
    lone.transport.add_peer(theirs.transport.metadata())
    write(lone, theirs, runs((lone.address, theirs.address, 8)))
    assert (theirs.buffer[:8] == 0).all()
