"""In-memory transport between agents of one process: real bytes and bounds checks, no network.

Tests and simulations run whole transfers on it without NIXL; engines do not use it. Agents on one
``Fabric`` can reach each other unless one is cut off. Like NIXL, it refuses runs outside registered
memory on either side.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

import numpy as np

from connectors.errors import TransportError
from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind, Region


class Fabric:
    """A simulated network of agents, by name.

    ``cut`` disconnects one agent from all others, ``mend`` reconnects it.
    """

    def __init__(self) -> None:
        self.agents: dict[str, MemoryTransport] = {}
        self.unreachable: set[str] = set()

    def cut(self, name: str) -> None:
        self.unreachable.add(name)

    def mend(self, name: str) -> None:
        self.unreachable.discard(name)

    def agent(self, sender: str, peer: str) -> MemoryTransport:
        """Return the agent ``peer``.

        Raises TransportError if it does not exist, or if it or ``sender`` is cut off.
        """
        if peer not in self.agents or peer in self.unreachable or sender in self.unreachable:
            raise TransportError(peer, "this agent is unreachable on this fabric")
        return self.agents[peer]


class MemoryTransport:
    """One agent of a fabric; implements ``Transport``.

    ``write`` copies at once or raises TransportError; the next ``poll`` reports the write done.
    """

    kind = "memory"

    def __init__(self, name: str, fabric: Fabric) -> None:
        self.name = name
        self.fabric = fabric
        self._regions: list[Region] = []
        self._peers: set[str] = set()
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._pending: dict[int, str] = {}
        self._next_handle = 0
        self._closed = False
        fabric.agents[name] = self

    @property
    def peers(self) -> frozenset[str]:
        """Names of the peers added to this agent."""
        return frozenset(self._peers)

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        for region in regions:
            if region.memory_kind.memory != "DRAM":
                raise TransportError(
                    self.name, f"the memory transport moves DRAM only, not {region.memory_kind.memory}"
                )
        self._regions.extend(regions)

    def metadata(self) -> bytes:
        self._check_open()
        return self.name.encode()

    def add_peer(self, metadata: bytes, name: str | None = None) -> str:
        self._check_open()
        peer = metadata.decode(errors="replace")
        if name is not None and peer != name:
            raise TransportError(name, f"the metadata belongs to agent {peer[:80]!r}")
        self.fabric.agent(self.name, peer)
        self._peers.add(peer)
        return peer

    def reconnect(self, peer: str) -> None:
        if peer in self._pending.values():
            raise TransportError(peer, "cannot reconnect while a write to this peer is in flight")
        self._reach(peer)

    def remove_peer(self, peer: str) -> None:
        self._peers.discard(peer)

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        receiver = self._reach(peer)
        if not len(runs):
            raise TransportError(peer, "cannot write 0 runs; at least one is needed")
        self._check_inside(self.name, runs.src, runs.length)
        receiver._check_inside(peer, runs.dst, runs.length)  # noqa: SLF001 - another agent of this class
        for dst, src, length in zip(runs.dst.tolist(), runs.src.tolist(), runs.length.tolist(), strict=True):
            ctypes.memmove(dst, src, length)
        self._next_handle += 1
        self._pending[self._next_handle] = peer
        return self._next_handle

    def poll(self, handle: int) -> bool:
        self._check_open()
        del self._pending[handle]
        return True

    def notify(self, peer: str, payload: bytes) -> None:
        self._reach(peer)._inbox.append((self.name, payload))  # noqa: SLF001 - another agent of this class

    def notifications(self) -> list[tuple[str, bytes]]:
        self._check_open()
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.fabric.agents.pop(self.name, None)
            self._regions.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(self.name, "this transport has been closed")

    def _reach(self, peer: str) -> MemoryTransport:
        self._check_open()
        if peer not in self._peers:
            raise TransportError(peer, "its metadata has not been added")
        return self.fabric.agent(self.name, peer)

    def _check_inside(self, owner: str, address: np.ndarray, length: np.ndarray) -> None:
        inside = np.zeros(len(address), bool)
        for region in self._regions:
            inside |= (address >= region.address) & (address + length <= region.end)
        if not inside.all():
            outside = int(address[~inside][0])
            raise TransportError(owner, f"address {outside:#x} is outside its registered memory")
