"""Peers of a rank: their table entries and connections, and the plans of consumer workers.

Every start of an engine adds peers, which never unregister, so the table has a limit. A full table
evicts peers without a message of a transfer first, so a flood of Hellos evicts its own entries, and
never a busy one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from connectors.errors import HandshakeError
from connectors.planning.layout import MemoryKind
from connectors.planning.plan import PairPlan
from connectors.protocol.consumer import Consumer
from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Peer
from connectors.transport.base import Transport
from connectors.vllm_hma.handshake.message_sender import MessageSender, agent_name

MAX_PEERS = 2048


class PeerTable:
    """Known peers, by last use. Not thread-safe."""

    def __init__(self, busy: Callable[[Peer], bool], most: int = MAX_PEERS) -> None:
        self._busy = busy
        self._most = most
        # Whether each peer has sent a message of a transfer, from least to most recently used.
        self._spoke: dict[Peer, bool] = {}

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._spoke

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._spoke)

    def __len__(self) -> int:
        return len(self._spoke)

    def admit(self, peer: Peer) -> Peer | None:
        """Return the evicted peer, if any. Raises HandshakeError if a full table is all busy."""
        leaving, spoke = None, self._spoke.pop(peer, None)
        if spoke is None and len(self) >= self._most:
            candidates = sorted(self._spoke, key=self._spoke.__getitem__)
            leaving = next((one for one in candidates if not self._busy(one)), None)
            if leaving is None:
                raise HandshakeError(f"the peer table is full: all {len(self)} peers are busy; retry later")
            self.forget(leaving)
        self._spoke[peer] = bool(spoke)
        return leaving

    def spoke(self, peer: Peer) -> None:
        if self._spoke.pop(peer, None) is not None:
            self._spoke[peer] = True

    def forget(self, peer: Peer) -> None:
        self._spoke.pop(peer, None)


@dataclass(eq=False, repr=False)
class Peers:
    """Peers of one worker, in both roles.

    ``lock``  guards these peers and the Producer and Consumer state machines. The caller of
              ``plan``, ``spoke`` and ``forget`` holds it; the other methods take it
    """

    producer: Producer
    consumer: Consumer
    transport: Transport
    message_sender: MessageSender
    lock: threading.RLock

    def __post_init__(self) -> None:
        self._handshaking: Counter[Peer] = Counter()
        self._plans: dict[Peer, tuple[MemoryKind, PairPlan]] = {}
        self._table = PeerTable(self._busy)

    @contextmanager
    def handshaking(self, peer: Peer) -> Iterator[None]:
        """Keep a peer, also if a machine removes it. Raises HandshakeError if all are busy."""
        with self.lock:
            evicted = self._table.admit(peer)
            if evicted is not None:
                self._evict(evicted)
            self._handshaking[peer] += 1
        try:
            yield
        finally:
            with self.lock:
                self._handshaking[peer] -= 1
                if not self._handshaking[peer]:
                    del self._handshaking[peer]

    def welcome(self, peer: Peer, memory_kind: MemoryKind, plan: PairPlan, consumer: ConsumerPeer) -> None:
        with self.lock:
            self._plans[peer] = (memory_kind, plan)
            self.producer.welcome(peer, consumer, time.monotonic())

    def plan(self, peer: Peer) -> tuple[MemoryKind, PairPlan] | None:
        return self._plans.get(peer)

    def spoke(self, peer: Peer) -> None:
        self._table.spoke(peer)

    def forget(self, peer: Peer) -> None:
        """Release what neither a state machine nor a handshake still needs of a removed peer."""
        if self.producer.knows(peer):
            return
        self._plans.pop(peer, None)
        if not self.consumer.knows(peer) and peer not in self._handshaking:
            self._drop(peer)

    def _evict(self, peer: Peer) -> None:
        """Remove an idle peer; its engine's other workers, too, unless requests depend on one."""
        self.producer.peer_lost(peer, time.monotonic())
        for sibling in self.consumer.forget(peer.incarnation):
            self.forget(sibling.peer)
        self._plans.pop(peer, None)
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        self._table.forget(peer)
        self.message_sender.forget(peer)
        self.transport.remove_peer(agent_name(peer))

    def _busy(self, peer: Peer) -> bool:
        return peer in self._handshaking or self.producer.serves(peer) or self.consumer.awaits(peer)
