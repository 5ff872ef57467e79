"""A NIXL agent in this process and one in another, each with memory on one device, like workers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from connectors.planning.descriptors import Runs
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, Region
from connectors.transport.device_digest import CacheMemory
from connectors.transport.nixl import NixlTransport
from testing.remote import Remote
from tests.campaigns.gpu.device import DEADLINE_S, memory_kind_of, set_current, synchronize, until

PAGE_BYTES, PAGES, CANARY = 4096, 256, 0xA5
POLL_S = 0.0005


def layout_of(layers: Sequence[torch.Tensor], page_bytes: int) -> EngineLayout:
    """Return the layout of tensors of pages, one for each layer, as vLLM allocates them."""
    regions = tuple(Region(each.data_ptr(), each.numel(), memory_kind_of(each.device)) for each in layers)
    pages = tuple(
        LayerPages(f"layer{k}", region.address, page_bytes, 1, 1, page_bytes, 1, page_bytes, page_bytes, "p")
        for k, region in enumerate(regions)
    )
    count = regions[0].length_bytes // page_bytes
    return EngineLayout(0, 1, count, regions, (Group(0, GroupKind.FULL, 1, None, pages),))


@dataclass(frozen=True)
class Address:
    """An agent's metadata and the addresses of its buffers, for the other process."""

    metadata: bytes
    pages: int
    bulk: int


class Agent:
    """A transport with two registered buffers: PAGES pages, and ``bulk_bytes`` to measure."""

    def __init__(self, name: str, device: torch.device, bulk_bytes: int) -> None:
        set_current(device)
        self.device, self.memory_kind = device, memory_kind_of(device)
        self.pages = torch.zeros(PAGES * PAGE_BYTES, dtype=torch.uint8, device=device)
        self.bulk = torch.zeros(bulk_bytes, dtype=torch.uint8, device=device)
        synchronize(device)
        layout = layout_of([self.pages], PAGE_BYTES)
        self.memory = CacheMemory(layout, [self.pages])
        self.transport = NixlTransport(name, devices=("lo",))
        self.transport.register([*layout.regions, Region(self.bulk.data_ptr(), bulk_bytes, self.memory_kind)])
        self.inbox: list[tuple[str, bytes]] = []
        self.meet, self.notify = self.transport.add_peer, self.transport.notify

    @property
    def made(self) -> Address:
        return Address(self.transport.metadata(), self.pages.data_ptr(), self.bulk.data_ptr())

    def fill(self, content: bytes) -> None:
        """Fill the pages with repetitions of ``content``."""
        self.pages.copy_(torch.from_numpy(np.resize(np.frombuffer(content, np.uint8), PAGES * PAGE_BYTES)))
        synchronize(self.device)

    def read(self) -> bytes:
        """Return the content of the pages."""
        return self.pages.cpu().numpy().tobytes()

    def digest(self, ids: Sequence[int]) -> bytes:
        """Return the digest of some pages for a peer on a device of the same kind."""
        stream = self.memory.shared_with(self.memory_kind).new_stream()
        stream.feed(self.pages.data_ptr() + np.asarray(ids, np.int64) * PAGE_BYTES, PAGE_BYTES)
        return stream.digest()

    def idle(self) -> None:
        """Let NIXL make progress."""
        self.inbox += self.transport.notifications()

    def take_messages(self) -> list[tuple[str, bytes]]:
        """Return the messages received since the last call."""
        self.idle()
        taken, self.inbox = self.inbox, []
        return taken

    def modules(self) -> list[str]:
        """Return the names of the top-level modules that this process has imported."""
        # It must work without vLLM.
        from connectors.vllm_hma.worker_side import steps  # noqa: F401

        return sorted({name.partition(".")[0] for name in sys.modules})

    def close(self) -> None:
        self.transport.close()


class Pair:
    """``ours`` is the agent of this process; ``call`` calls a method of the other process's
    agent, ``theirs``, which is on ``peer_device`` if that is given.
    """

    def __init__(
        self, device: torch.device, bulk_bytes: int = 16 * 2**20, peer_device: torch.device | None = None
    ) -> None:
        self.device, self.bulk_bytes = device, bulk_bytes
        self._their_kind = memory_kind_of(peer_device or device)
        there = "theirs/0", peer_device or device, bulk_bytes
        self._remote = Remote(Agent, *there, rest_s=POLL_S, answer_s=DEADLINE_S)
        self.theirs: Address = self._remote.made
        self.call = self._remote.call
        try:
            self.ours = Agent("ours/0", device, bulk_bytes)
            self.peer = self.ours.meet(self.theirs.metadata)
            self.us = self.call("meet", self.ours.made.metadata)
        except BaseException:
            self._remote.close()
            raise

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        self._remote.close()
        self.ours.close()

    def refill(self) -> None:
        """Fill our pages with distinct 32-bit words, and theirs with canaries."""
        self.ours.fill(np.arange(PAGES * PAGE_BYTES // 4, dtype="<u4").tobytes())
        self.call("fill", bytes([CANARY]))

    def runs(self, *rows: tuple[int, int, int]) -> Runs:
        """(offset in our pages, offset in theirs, bytes) rows."""
        src, dst, length = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        return Runs(self.ours.pages.data_ptr() + src, self.theirs.pages + dst, length)

    def post(self, runs: Runs) -> int:
        return self.ours.transport.write(self.peer, runs, self.ours.memory_kind, self._their_kind)

    def write(self, runs: Runs) -> None:
        """Post a write and poll it to its end."""
        handle = self.post(runs)
        until(lambda: self.ours.transport.poll(handle), "a write")

    def messages(self, count: int) -> list[tuple[str, bytes]]:
        """Wait for ``count`` messages at the other process, and return them."""
        found: list[tuple[str, bytes]] = []

        def arrived() -> list[tuple[str, bytes]]:
            self.ours.idle()
            taken: list[tuple[str, bytes]] = self.call("take_messages")
            return taken

        while len(found) < count:
            found += until(arrived, f"{count} messages")
        return found
