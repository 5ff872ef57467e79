"""Bounded table of a worker's peers: workers of other engines.

Every start of an engine adds new peers, which never unregister. A full table evicts peers that have
sent no message of a transfer before peers that have sent one, so a flood of Hellos evicts its own
entries. It never evicts a busy peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from connectors.errors import HandshakeError
from connectors.protocol.wire import Peer

MAX_PEERS = 2048


class PeerTable:
    """Known peers, by last use. Not thread-safe: its owner serialises calls.

    ``busy``  returns whether a peer has work in progress
    ``most``  maximum number of peers
    """

    def __init__(self, busy: Callable[[Peer], bool], most: int = MAX_PEERS) -> None:
        self._busy = busy
        self._most = most
        # Peers without and with a message of a transfer, from least to most recently used.
        self._new: dict[Peer, None] = {}
        self._regular: dict[Peer, None] = {}

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._new or peer in self._regular

    def __iter__(self) -> Iterator[Peer]:
        return iter((*self._new, *self._regular))

    def __len__(self) -> int:
        return len(self._new) + len(self._regular)

    def admit(self, peer: Peer) -> Peer | None:
        """Add a peer whose handshake begins, or record its use; return the evicted peer, if any.

        Raises HandshakeError if the table is full and all its peers are busy.
        """
        if peer in self._regular:
            self.spoke(peer)
            return None
        self._new.pop(peer, None)
        leaving = None
        if len(self) >= self._most:
            leaving = next((one for one in (*self._new, *self._regular) if not self._busy(one)), None)
            if leaving is None:
                raise HandshakeError(f"the peer table is full: all {len(self)} peers are busy; retry later")
            self.forget(leaving)
        self._new[peer] = None
        return leaving

    def spoke(self, peer: Peer) -> None:
        """Record that a peer has sent a message of a transfer. No effect if it has no entry."""
        if peer in self:
            self.forget(peer)
            self._regular[peer] = None

    def forget(self, peer: Peer) -> None:
        self._new.pop(peer, None)
        self._regular.pop(peer, None)
