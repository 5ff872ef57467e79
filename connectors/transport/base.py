"""Interface of a transport: registered memory, one-sided writes, messages.

Call order: ``register``, ``metadata``, then the other methods in any order, and ``close`` last.
``write``, ``reconnect`` and ``notify`` need ``add_peer`` first, on this side only. ``add_peer``,
``reconnect`` and ``notify`` are thread-safe, and so is ``write`` for one thread at a time; the
owner serialises all other calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind, Region

WriteHandle = int


class Transport(Protocol):
    """Moves bytes and messages between agents.

    ``name``  this agent's name, unique among all agents that may ever be peers
    ``kind``  name of the transport, equal at all peers
    """

    name: str
    kind: str

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory for reads by this agent and writes by peers. Raises TransportError."""

    def metadata(self) -> bytes: ...

    def add_peer(self, metadata: bytes, name: str | None = None) -> str:
        """Add a peer and return its name.

        A known peer keeps its connection; ``reconnect`` then uses the new metadata. Raises
        TransportError, and adds no peer, if the metadata is unusable or of an agent with another
        ``name``, or the peer unreachable.
        """
        ...

    def reconnect(self, peer: str) -> None:
        """Raises TransportError, also while a write is in flight."""

    def remove_peer(self, peer: str) -> None:
        """No write or message to the peer may be in flight."""

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> WriteHandle:
        """Start to copy ``runs`` (at least one) to the peer's registered memory; return a handle.

        Raises TransportError if nothing was posted, FailedWriteError if parts may still arrive.
        """
        ...

    def poll(self, handle: WriteHandle) -> bool:
        """Return whether all bytes of a write are in the peer's memory. True ends the handle.

        So does FailedWriteError, which is no acknowledgement: parts of the write may still arrive.
        """
        ...

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a message, delivered at most once. Raises TransportError, or loses it silently."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return (sender's name, payload) of new messages. Raises TransportError."""
        ...

    def close(self) -> None:
        """Release all writes, also unfinished ones, and deregister all memory. Idempotent."""
