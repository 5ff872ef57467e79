"""A fuzzing campaign against real workers over NIXL.

A producer and a consumer worker, each with its cache, its runtime and a NIXL agent, the producer's
side channel, and a hostile agent with the addresses of both. Each round has some twenty hostile
actions; then a legitimate transfer must succeed. At the end nothing may be left: no state, no lost
thread, no growth of memory. The agent ``outside`` does not have the secret. The agent ``inside``
has it, as a broken peer would; without a secret every agent is inside.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from typing import cast
from unittest import mock

import numpy as np
import psutil

from connectors.codec import encode, encode_agent_metadata
from connectors.planning.layout import MemoryKind, Region
from connectors.protocol.agent_metadata import PROTOCOL_VERSION
from connectors.protocol.params import EngineAddress
from connectors.protocol.wire import Envelope, Hello, Peer
from connectors.transport.nixl import NixlTransport
from connectors.vllm_hma.handshake.message_sender import agent_name
from connectors.vllm_hma.handshake.peers import PeerTable
from connectors.vllm_hma.handshake.secret import derive_keys
from connectors.vllm_hma.handshake.side_channel import MetadataServer, fetch_metadata
from connectors.vllm_hma.orders import Chunk, Expect, Finished
from testing.connector_state import open_connections, serves, snapshot
from testing.memory_transport import Fabric
from tests.campaigns.fuzz.frames import Hostile
from tests.campaigns.runner import Report
from tests.vllm_contract.workers import DIGEST, SHORT, Worker, receive, results, until

SECRET = "what the hostile agent does not know"
ACTIONS = 20
PEERS = 16
PATIENT = replace(SHORT, handshake_s=12.0, progress_s=12.0, lease_s=5.0)
"""Long deadlines, so that a busy machine causes no finding."""
WARM_UP = 0.4
MAX_GROWTH_MIB = 64


class Agent(NixlTransport):
    """A worker's transport as ``Worker`` makes it."""

    def __init__(self, name: str, fabric: Fabric) -> None:
        super().__init__(name)


@dataclass
class Found:
    """What a campaign has done, and its leftovers."""

    actions: Counter[str] = field(default_factory=Counter)
    transfers: int = 0
    growth_mib: float = 0.0
    warnings: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


class Listener(logging.Handler):
    """Handler of the connector's log: an error, or a frame that raised in its reader, is a
    finding.
    """

    def __init__(self, found: Found) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self._found.warnings[message.partition(":")[2][:40]] += 1
        if record.levelno >= logging.ERROR or "cannot handle a frame" in message or "cannot answer" in message:
            self._found.errors.append(message if record.exc_info is None else f"{message}: {record.exc_info[1]!r}")


class Campaign:
    """One hostile agent against one pair of workers."""

    def __init__(self, seed: int, secret: str, inside: bool) -> None:
        self.rng = random.Random(f"{seed} {secret} {inside}")
        self.found = Found()
        self._secret = secret
        self._numbers = count()
        self._listener = Listener(self.found)
        logging.getLogger("connectors").addHandler(self._listener)
        fabric, run = Fabric(), f"{os.getpid()}-{next(_runs)}"
        # Few, so that eviction is frequent.
        with mock.patch.object(PeerTable.__init__, "__defaults__", (PEERS,)):
            self.producer = Worker(fabric, f"p-{run}", transport_class=Agent, secret=secret, limits=PATIENT)  # type: ignore[arg-type]
        self.consumer = Worker(fabric, f"c-{run}", transport_class=Agent, secret=secret, limits=PATIENT)  # type: ignore[arg-type]
        self.victims = [Peer(worker.agent_metadata.incarnation, 0) for worker in (self.producer, self.consumer)]
        self._me = Peer(f"evil-{run}", 0)
        self._agent = NixlTransport(agent_name(self._me))
        self._memory = np.zeros(4096, np.uint8)
        self._agent.register([Region(self._memory.ctypes.data, self._memory.nbytes, MemoryKind("DRAM", 0))])
        self._agent_metadata = replace(
            self.consumer.agent_metadata, incarnation=self._me.incarnation, transport_metadata=self._agent.metadata()
        )
        key = derive_keys(secret if inside else "").messages
        self._hostile = Hostile(self.rng, self._me, encode_agent_metadata(self._agent_metadata), key)
        for worker in (self.producer, self.consumer):
            self._agent.add_peer(worker.transport.metadata())
        self._open: list[socket.socket] = []

    def close(self) -> None:
        for one in self._open:
            one.close()
        self.producer.close()
        self.consumer.close()
        self._agent.close()
        logging.getLogger("connectors").removeHandler(self._listener)

    def run(self, rounds: int) -> Found:
        """Run the campaign. Raises AssertionError for broken rules."""
        self.transfer()
        warm, base = int(rounds * WARM_UP), 0.0
        for number in range(rounds):
            if number == warm:
                base = _rss_mib()
            for _ in range(ACTIONS):
                self.act()
            self._agent.notifications()
            if number % 4 == 0:
                self.false_engine()
            self.transfer()
        self.found.growth_mib = _rss_mib() - base
        self.nothing_is_left()
        return self.found

    # ---- hostility ------------------------------------------------------------------------------

    def act(self) -> None:
        name, act = self.rng.choice(
            (
                ("frames", self._frames),
                ("frames", self._frames),
                ("bursts", self._burst),
                ("hellos of new starts", self._new_start),
                ("forged senders", self._forged),
                ("connections", self._connection),
                ("connections left open", self._left_open),
            )
        )
        self.found.actions[name] += 1
        act()

    def _ids(self) -> list[str]:
        return [f"h-{self.rng.randrange(50)}", f"new-{next(self._numbers)}", "i" * 256, ""]

    def _frames(self) -> None:
        to = self.rng.choice(self.victims)
        self._agent.notify(agent_name(to), self._hostile.frame(to, self._ids()))

    def _burst(self) -> None:
        """Send one frame many times: a replay, if it was valid."""
        to = self.rng.choice(self.victims)
        frame = self._hostile.frame(to, self._ids())
        for _ in range(50):
            self._agent.notify(agent_name(to), frame)

    def _new_start(self) -> None:
        """Simulate an unknown start of an engine, as the transport would report it from an agent
        with forged names.
        """
        me = Peer(f"evil-{next(self._numbers):09}", self.rng.choice((0, 0, 3)))
        metadata = renamed(self._agent.metadata(), agent_name(self._me), agent_name(me))
        agent_metadata = encode_agent_metadata(
            replace(self._agent_metadata, incarnation=me.incarnation, transport_metadata=metadata)
        )
        if self.rng.random() < 0.3:
            agent_metadata = self._hostile.agent_metadata()
        frame = encode(Envelope(me, self.victims[0], Hello(agent_metadata)), self._hostile.key)
        self._deliver(self.producer, agent_name(me), frame)

    def _forged(self) -> None:
        """Send under another name; only frames that the secret rejects, because a peer with the
        secret may end others' transfers.
        """
        if not self._secret:
            return self._frames()
        worker, name = self.rng.choice(((self.producer, self.victims[1]), (self.consumer, self.victims[0])))
        forger = Hostile(self.rng, name, encode_agent_metadata(self._agent_metadata), b"another key")
        to = Peer(worker.agent_metadata.incarnation, 0)
        self._deliver(
            worker, agent_name(name), forger.frame(to, ["legitimate-0", f"legitimate-{self.found.transfers}"])
        )

    def _deliver(self, worker: Worker, sender: str, frame: bytes) -> None:
        """Deliver a frame as the transport does."""
        worker.runtime.frame_received(sender, frame, time.monotonic())

    def _connection(self) -> None:
        """Send something to the side channel, whole or in part, and disconnect."""
        said = self.rng.choice(
            (
                b"tandem/%d metadata\n" % PROTOCOL_VERSION,
                b"tandem/%d car" % PROTOCOL_VERSION,
                b"\x16\x03\x01" + self.rng.randbytes(200),
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
                b"\n" * 1000,
                self.rng.randbytes(5000),
                b"",
            )
        )
        with contextlib.suppress(OSError), self._connect() as one:
            one.sendall(said)
            if self.rng.random() < 0.5:
                one.settimeout(0.05)
                one.recv(1000)

    def _left_open(self) -> None:
        with contextlib.suppress(OSError):
            self._open.append(self._connect())
            self._open[-1].sendall(
                self.rng.choice((b"", b"tandem/%d metadata" % PROTOCOL_VERSION, b"\x16\x03\x01\x02\x00"))
            )
        while len(self._open) > 150:
            self._open.pop(0).close()

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.producer.server.port), timeout=2)

    def false_engine(self) -> None:
        """Send a request to an engine with wrong metadata or silent workers: decode computes it."""
        self.found.actions["false engines"] += 1
        name = f"false-{next(self._numbers)}"
        rank_metadata = [self._hostile.agent_metadata() for _ in range(self.rng.choice((0, 1, 1, 1, 2, 40)))]
        if self.rng.random() < 0.2:
            rank_metadata = [self.rng.randbytes(1000)]
        server = MetadataServer("127.0.0.1", 0, rank_metadata, derive_keys(self._secret).identity)
        try:
            address = EngineAddress(self._me.incarnation, "127.0.0.1", server.port)
            self.consumer.step(receives=[receive(address, name, name)])
            assert results(self.consumer, within_s=60.0) == (set(), {name}, {name})
        finally:
            server.close()

    # ---- legitimate requests --------------------------------------------------------------------

    def transfer(self) -> None:
        """A request's KV is transferred correctly, and the side channel still answers peers with
        the secret.
        """
        number = self.found.transfers
        name = f"legitimate-{number}"
        value = number % 251 + 1
        self.producer.cache[:] = value
        self.consumer.cache[:] = 0
        self.consumer.step(receives=[receive(self.producer.address, name, name)])
        self.producer.step(expects=[Expect(f"q-{name}", name, 7, DIGEST)])
        self.producer.step(chunks=[Chunk(f"q-{name}", ((1, 2),), 7)], finished=[Finished(f"q-{name}", True, "")])
        assert results(self.consumer, within_s=60.0) == (set(), {name}, set()), f"transfer {number} failed"
        assert self.consumer.cache[[3, 5]].min() == value, f"transfer {number} brought wrong bytes"
        assert self.consumer.cache[[1, 2, 4, 6, 7]].max() == 0, f"transfer {number} wrote where it should not"
        assert results(self.producer, within_s=60.0)[0] == {f"q-{name}"}, f"transfer {number} holds its blocks"
        if number % 10 == 0:
            identity = derive_keys(self._secret).identity
            agent_metadata = fetch_metadata(
                "127.0.0.1", self.producer.server.port, self.victims[0].incarnation, 30.0, identity
            )
            assert agent_metadata.incarnation == self.victims[0].incarnation
        self.found.transfers += 1

    def nothing_is_left(self) -> None:
        """After the leases, no state remains; threads are alive; logs have no unexpected lines."""
        for one in self._open:
            one.close()
        for worker in (self.producer, self.consumer):
            nothing_is_left_in(worker)
        assert not self.found.errors, self.found.errors[:3]
        assert self.found.growth_mib < MAX_GROWTH_MIB, str(self.found)


def nothing_is_left_in(worker: Worker) -> None:
    until(lambda: not any(worker.runtime.counts().values()), within_s=60.0)
    left = snapshot(worker.runtime)
    assert left.alive
    assert serves(worker.server)
    assert len(left.peers.admitted) <= PEERS
    assert len(left.peers.planned) <= len(left.peers.admitted)
    transport = cast(NixlTransport, worker.transport)
    assert len(transport._metadata) <= PEERS + 1  # noqa: SLF001
    assert not left.producer.early
    assert not left.producer.offered_blocks
    until(lambda: not snapshot(worker.runtime).handshaker.pending_hellos)
    assert not snapshot(worker.runtime).handshaker.answers
    until(lambda: not open_connections(worker.server), within_s=60.0)


_runs = count()


def renamed(metadata: bytes, old: str, new: str) -> bytes:
    """Return an agent's metadata under another name: NIXL stores the name behind its length."""

    def field_of(name: str) -> bytes:
        return len(name).to_bytes(8, "little") + name.encode()

    assert metadata.count(field_of(old)) == 1
    return metadata.replace(field_of(old), field_of(new))


def _rss_mib() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


THREADS_END_S = 30.0
KINDS = {"no secret": ("", True), "outside": (SECRET, False), "inside": (SECRET, True)}


def connector(report: Report, *, count: int = 300, seed: int = 1, only: str = "") -> None:
    """``count`` rounds of each kind: `no secret`, `outside` (without it), `inside` (with it)."""
    for kind, (secret, inside) in KINDS.items():
        if only in kind:
            with report.case(kind), contextlib.closing(Campaign(seed, secret, inside)) as one:
                found = one.run(count)
                report.row(
                    kind=kind,
                    actions=found.actions,
                    transfers=found.transfers,
                    growth_mib=round(found.growth_mib, 1),
                    warnings=found.warnings.most_common(12),
                )
    until = time.monotonic() + THREADS_END_S
    while (alive := [one.name for one in threading.enumerate() if one.name.startswith("tandem")]) and (
        time.monotonic() < until
    ):
        time.sleep(0.1)
    report.equal("threads that outlive their workers", alive, [])
