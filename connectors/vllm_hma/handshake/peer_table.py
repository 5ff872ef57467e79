"""Bounded table of the workers of other engines that a worker knows.

Every start of an engine is a new peer that never unregisters. Peers that have exchanged messages of a transfer are kept
before those that have only sent Hello, so that a flood of hellos evicts its own entries. A busy peer is never evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from connectors.errors import HandshakeError
from connectors.protocol.wire import Peer

MAX_PEERS = 2048


class PeerTable:
    """Not thread-safe; its owner serialises calls. ``busy`` returns whether a peer has work in progress."""

    def __init__(self, busy: Callable[[Peer], bool], most: int = MAX_PEERS) -> None:
        self._busy = busy
        self._most = most
        # Ordered from least to most recently heard.
        self._new: dict[Peer, None] = {}
        self._regular: dict[Peer, None] = {}

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._new or peer in self._regular

    def __iter__(self) -> Iterator[Peer]:
        return iter((*self._new, *self._regular))

    def __len__(self) -> int:
        return len(self._new) + len(self._regular)

    def admit(self, peer: Peer) -> Peer | None:
        """Add a peer for a Hello. Return the evicted peer, if any. Raises HandshakeError if all are busy."""
        if peer in self._regular:
            self.spoke(peer)
            return None
        self._new.pop(peer, None)
        leaving = None
        if len(self) >= self._most:
            leaving = next((one for one in (*self._new, *self._regular) if not self._busy(one)), None)
            if leaving is None:
                raise HandshakeError(f"this worker knows {len(self)} others, and all of them are busy")
            self.forget(leaving)
        self._new[peer] = None
        return leaving

    def spoke(self, peer: Peer) -> None:
        """Record that an admitted peer has sent a message of a transfer."""
        if peer in self:
            self.forget(peer)
            self._regular[peer] = None

    def forget(self, peer: Peer) -> None:
        self._new.pop(peer, None)
        self._regular.pop(peer, None)
