"""The workers of other engines that a worker knows: how many, and which to forget when it meets one more.

Every start of an engine is a new peer that never says goodbye. Those that a transfer was spoken of with are kept before
those that have only said hello, so that a flood of hellos pushes out its own; one with something under way is never
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from connectors.errors import HandshakeError
from connectors.protocol.wire import Peer

MAX_PEERS = 2048


class PeerTable:
    """Not thread-safe; its owner serialises calls. ``busy`` says whether something is under way with a peer."""

    def __init__(self, busy: Callable[[Peer], bool], most: int = MAX_PEERS) -> None:
        self._busy = busy
        self._most = most
        # Each from the one that was silent longest to the one that spoke last.
        self._new: dict[Peer, None] = {}
        self._regular: dict[Peer, None] = {}

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._new or peer in self._regular

    def __iter__(self) -> Iterator[Peer]:
        return iter((*self._new, *self._regular))

    def __len__(self) -> int:
        return len(self._new) + len(self._regular)

    def admit(self, peer: Peer) -> Peer | None:
        """A hello has come or is sent. Who must be forgotten for it, if anybody; HandshakeError where nobody can be."""
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
        """An admitted peer has sent a message of a transfer."""
        if peer in self:
            self.forget(peer)
            self._regular[peer] = None

    def forget(self, peer: Peer) -> None:
        self._new.pop(peer, None)
        self._regular.pop(peer, None)
