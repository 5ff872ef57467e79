"""Digest of a transfer whose sums (``device_digest.py``) one Triton kernel computes for each write.

The kernel computes addresses from block ids. Its inputs are two vectors of int64, a *table* for
each pair of ranks and an *order* for each launch:

    table  of each piece: address in block 0, bytes to the next block, index of its offsets; then
           the offsets of a block's units
    order  of each job, a stream of one ``add``: first piece, pieces, units, index of the block ids,
           bytes of a piece, index of the first sum; then block ids and units of each ``add``

The sums of a job are in the order of its stream: by unit, then piece, then segment.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from connectors.errors import PlanError
from connectors.planning.blocks import Ints
from connectors.planning.layout import Region
from connectors.transport.digest import GroupStreams, TransferDigest

_RING_ELEMENTS, _ALIGNMENT = 2**19, 16
_TILE_WORDS, _MIN_ROW_WORDS, _MAX_ROW_WORDS = 4096, 128, 1024

Hashes = list[tuple[xxhash.xxh3_128, int]]


class _Launch(NamedTuple):
    """A queued kernel. Its order, then its sums, are at ``[start, stop)`` of the ring."""

    digest: BatchedDigest
    hashes: Hashes
    start: int
    sums: int
    stop: int
    event: torch.Event | None


class Launches:
    """Queued kernels of one end. Thread-safe. They allocate nothing: a ring of pinned memory has
    orders and sums.

    ``queue``  returns a context of the torch stream on which this thread's kernels then run
    """

    def __init__(self, keys: torch.Tensor, segment: int, queue: Callable[[], AbstractContextManager[object]]) -> None:
        from connectors.transport.digest_kernel import segment_sums

        self._kernel, self._keys, self.queue, self.segment = segment_sums, keys, queue, segment
        self.device = keys.device  # a CPU in Triton's interpreter
        self.lock = threading.RLock()
        self._launched: deque[_Launch] = deque()
        self._allocate(_RING_ELEMENTS)

    def _allocate(self, elements: int) -> None:
        self._ring = torch.empty(elements, dtype=torch.int64, pin_memory=self.device.type != "cpu")
        self._buffer = torch.empty(elements, dtype=torch.int64, device=self.device)
        self._next = 0

    def launch(self, digest: BatchedDigest, table: Table, order: Ints, hashes: Hashes) -> None:
        sums = -(-len(order) // _ALIGNMENT) * _ALIGNMENT
        size = sums + sum(count for _, count in hashes)
        grid = -(-max(count for _, count in hashes) // table.rows) or 1, len(hashes)
        with self.lock, self.queue():
            start = self._claim(size)
            ring, buffer = self._ring[start : start + size], self._buffer[:size]
            ring.numpy()[: len(order)] = order
            buffer[:sums].copy_(ring[:sums], non_blocking=True)
            self._kernel[grid](buffer, table.on_device, self._keys, buffer[sums:], *table.constants, num_warps=8)
            ring[sums:].copy_(buffer[sums:], non_blocking=True)
            event = None if self.device.type == "cpu" else torch.Event(self.device)
            if event is not None:
                event.record()
            self._launched.append(_Launch(digest, hashes, start, start + sums, start + size, event))
            digest.running += 1

    def _claim(self, size: int) -> int:
        """Return the start of ``size`` free elements; wait for old launches."""
        if size > len(self._ring):
            while self._launched:
                self._collect()
            self._allocate(1 << size.bit_length())
        start = self._next if self._next + size <= len(self._ring) else 0
        while any(each.start < start + size and start < each.stop for each in self._launched):
            self._collect()
        self._next = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        return start

    def _collect(self) -> None:
        launch = self._launched.popleft()
        if launch.event is not None:
            launch.event.synchronize()
        sums = self._ring[launch.sums : launch.stop].numpy().astype("<i8", copy=False)
        for (hasher, count), stop in zip(launch.hashes, np.cumsum([n for _, n in launch.hashes]), strict=True):
            hasher.update(sums[stop - count : stop].data)
        launch.digest.running -= 1

    def collect(self, digest: BatchedDigest, wait: bool) -> bool:
        """Hash the sums of ended launches; return whether all of ``digest`` have ended."""
        with self.lock:
            while digest.running:
                event = self._launched[0].event
                if not (wait or event is None or event.query()):
                    return False
                self._collect()
            return True


class Table:
    """The pieces of a pair's plan at one end, on the device. Compiles the kernel for them.

    Raises PlanError unless the pieces of all blocks lie in ``regions``, and Triton's errors.
    """

    def __init__(
        self, groups: Sequence[GroupStreams], num_blocks: int, regions: Sequence[Region], launches: Launches
    ) -> None:
        self.launches = launches
        self.streams: list[list[tuple[int, int, int]]] = []
        rows: list[tuple[int, int, int]] = []
        offsets: list[int] = []
        longest, aligned = 1, True
        for plan, side, streams in groups:
            self.streams.append([(len(rows) + s.first, s.stop - s.first, s.piece_bytes) for s in streams])
            sides = (side.address.tolist(), side.block_stride.tolist(), side.unit_offset.tolist())
            for address, stride, units, length in zip(*sides, plan.piece_bytes.tolist(), strict=True):
                stop = address + stride * (num_blocks - 1) + max(units) + length
                if not any(region.address <= address and stop <= region.end for region in regions):
                    raise PlanError(f"the pages at {address:#x} to {stop:#x} do not lie in one region of the KV cache")
                rows.append((address, stride, len(offsets)))
                offsets += units
                longest = max(longest, -(-min(length, launches.segment) // 4))
                aligned = aligned and not any(each % 4 for each in (address, stride, length, *units))
        words = min(_MAX_ROW_WORDS, max(_MIN_ROW_WORDS, 1 << (longest - 1).bit_length()))
        self.rows = _TILE_WORDS // words
        self.constants = (launches.segment, longest, self.rows, words, aligned)
        table = [(address, stride, 3 * len(rows) + at) for address, stride, at in rows]
        with launches.queue():
            self.on_device = torch.tensor([*np.ravel(table), *offsets], dtype=torch.int64).to(launches.device)
        digest = BatchedDigest((), num_blocks, self)
        launches.launch(digest, self, np.array([0, 1, 0, 6, 4, 0]), [(xxhash.xxh3_128(), 0)])  # no units
        launches.collect(digest, wait=True)


class BatchedDigest(TransferDigest):
    """``running`` of its launches have not been collected."""

    def __init__(self, groups: tuple[GroupStreams, ...], num_blocks: int, table: Table) -> None:
        super().__init__(groups, num_blocks, xxhash.xxh3_128)
        self._table = table
        self._added: list[tuple[int, list[int], Ints, Ints]] = []
        self.running = 0

    def _feed(self, group: int, numbers: list[int], pieces: slice, ids: Ints, parts: Ints) -> None:
        with self._table.launches.lock:
            self._added.append((group, numbers, ids, parts))

    def ready(self) -> bool:
        return self._collect(wait=False)

    def hexdigest(self) -> str:
        self._collect(wait=True)
        return super().hexdigest()

    def _collect(self, wait: bool) -> bool:
        """Queue one kernel for all units added since the last one; then as ``Launches.collect``."""
        jobs: list[int] = []
        hashes: Hashes = []
        launches = self._table.launches
        with launches.lock:
            added, self._added = self._added, []
            ids_at, out = 6 * sum(len(numbers) for _, numbers, *_ in added), 0
            for group, numbers, ids, _ in added:
                for number in numbers:
                    first, pieces, length = self._table.streams[group][number]
                    jobs += (first, pieces, len(ids), ids_at, length, out)
                    hashes.append((self._hashes[group][number], len(ids) * pieces * -(-length // launches.segment)))
                    out += hashes[-1][1]
                ids_at += 2 * len(ids)
            if jobs:
                order = np.concatenate([jobs, *(each for *_, ids, parts in added for each in (ids, parts))])
                launches.launch(self, self._table, order, hashes)
        return launches.collect(self, wait)
