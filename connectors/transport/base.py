"""Interface of a transport: registered memory, one-sided writes, messages.

Order of calls: ``register`` once, ``metadata`` to send to peers, ``add_peer`` with theirs, then ``write`` /
``poll`` and ``notify`` / ``notifications`` in any order, ``close`` last. A peer can be notified as soon as its
metadata has been added on this side; it need not have added ours. ``add_peer``, ``reconnect`` and ``notify`` may be
called from any thread at any time; the owner serialises the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind, Region

WriteHandle = int


class Transport(Protocol):
    """Moves bytes and messages between agents. ``name`` is this agent's, unique among all that may ever meet."""

    name: str
    kind: str

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable for our writes and writable for peers'. Raises TransportError."""

    def metadata(self) -> bytes:
        """Return the metadata with which a peer reaches this agent and its registered memory."""
        ...

    def add_peer(self, metadata: bytes, name: str | None = None) -> str:
        """Learn of a peer; its name. Adding it again is harmless.

        Raises TransportError for unusable metadata, and where it is not that of ``name``: then nothing is learned.
        """
        ...

    def reconnect(self, peer: str) -> None:
        """Make the connection to an added peer anew. Raises TransportError, also while a write to it is under way."""

    def remove_peer(self, peer: str) -> None:
        """Forget a peer. Nothing may be under way to it."""

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> WriteHandle:
        """Start copying ``runs``, at least one, from our registered memory to the peer's.

        Raises TransportError where nothing was posted, and FailedWriteError where parts of the write may still arrive.
        """
        ...

    def poll(self, handle: WriteHandle) -> bool:
        """True once all bytes of a write are in the peer's memory; the handle is spent then.

        Raises FailedWriteError where the write has failed; the handle is spent then too. Parts of the write may still
        arrive: an error is no acknowledgement.
        """
        ...

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a message, delivered at most once. Raises TransportError where the peer is known to be out of reach."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """(sender's name, payload) of the messages that have come since the last call."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
