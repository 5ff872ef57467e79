"""A producer and a consumer process on one fabric, for benchmarks of the layers below vLLM.

Both run NIXL agents as the connector's workers do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from connectors.planning.blocks import Ints
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from testing.remote import Remote

HOST = MemoryKind("DRAM", 0)

FABRICS = {
    "shm": {"UCX_NET_DEVICES": "lo"},
    "tcp": {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"},
}
"""Variables of UCX for shared memory and TCP loopback."""


class Side:
    """Cache of one end: ``layers`` layers of ``blocks`` pages of ``page_bytes``, registered with
    our transport.
    """

    def __init__(self, name: str, page_bytes: int, blocks: int, layers: int) -> None:
        from connectors.transport.nixl import NixlTransport

        self.memory = np.zeros((layers, blocks, page_bytes), np.uint8)
        pages = LayerPages("", 0, page_bytes, 1, 1, page_bytes, 1, page_bytes, page_bytes, "benchmark")
        every = tuple(
            replace(pages, layer=f"layers.{k}", address=layer.ctypes.data) for k, layer in enumerate(self.memory)
        )
        self.regions = tuple(Region(layer.ctypes.data, layer.nbytes, HOST) for layer in self.memory)
        self.layout = EngineLayout(0, 1, blocks, self.regions, (Group(0, GroupKind.FULL, 1, None, every),))
        self.transport = NixlTransport(name)
        self.transport.register(self.layout.regions)

    def digest(self, ids: Ints) -> str:
        """Return the content of the named blocks of all layers, in order."""
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.memory[:, ids]).data)

    def close(self) -> None:
        self.transport.close()


class Agent:
    """A NIXL agent as vLLM's connector creates it, over the memory of a ``Side``."""

    def __init__(self, name: str, side: Side) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.nixl = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        regions = [(r.address, r.length_bytes, 0, "") for r in side.regions]
        self._registered = self.nixl.register_memory(regions, "DRAM")

    def add_peer(self, metadata: bytes) -> str:
        peer = self.nixl.add_remote_agent(metadata)
        return peer.decode() if isinstance(peer, bytes) else peer

    def close(self) -> None:
        self.nixl.deregister_memory(self._registered)


class Target(Side):
    """Consumer's end: does what an idle worker's progress thread does during a transfer."""

    def __init__(self, *shape: int) -> None:
        super().__init__(f"consumer-{os.getpid()}", *shape)
        self.made = self.transport.metadata(), self.layout

    def idle(self) -> None:
        self.transport.notifications()

    def digest(self, ids: Ints) -> str:
        """Return the digest of the received bytes, and clear them for the next transfer."""
        found = super().digest(ids)
        self.memory[:] = 0
        return found


class Pair:
    """A producer and a consumer process with caches of one shape: see ``Side``.

    ``make``  creates the producer's end from the shape, other arguments, and ``Target.made``
    """

    def __init__(self, make: Callable[..., Any], shape: tuple[int, ...], *arguments: Any, fabric: str = "shm") -> None:
        # NIXL reads them when it is imported.
        variables = {"NIXL_LOG_LEVEL": "ERROR"} | FABRICS[fabric]
        self.consumer = Remote(Target, *shape, environment=variables)
        self.producer = Remote(make, *shape, *arguments, self.consumer.made, environment=variables)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        self.producer.close()
        self.consumer.close()
