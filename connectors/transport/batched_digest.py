"""Digest of a transfer whose sums (``device_digest.py``) one kernel computes for each write.

The kernel computes addresses from block ids. Its int64 inputs are a *table*, uploaded once for each
pair of ranks, and an *order* for each launch:

    table  per piece of each group: address in block 0, bytes to the next block, index of its
           offsets; then the offsets of a block's units from the first one
    order  per job, which is a stream of one ``add``: first piece, pieces, units, index of the block
           ids, bytes of a piece, index of the first sum; then for each ``add`` the block ids, and
           the units' indices within their blocks

The sums of a job are in the order of its stream: by unit, then piece, then segment.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from connectors.errors import PlanError
from connectors.planning.blocks import Ints
from connectors.planning.layout import Region
from connectors.transport.digest import GroupStreams, TransferDigest

_RING_ELEMENTS, _ALIGNMENT = 2**19, 16
_TILE_WORDS, _MAX_ROW_WORDS, _WORD_BYTES = 4096, 1024, 4


@dataclass(slots=True)
class _Launch:
    """A queued kernel.

    ``hashes``  hash and number of sums of each job
    ``start``   its elements of the ring are ``[start, stop)``: the order, then from ``sums`` on the
                sums
    """

    digest: BatchedDigest
    hashes: list[tuple[xxhash.xxh3_128, int]]
    start: int
    sums: int
    stop: int
    event: torch.Event | None


class Launches:
    """Queued kernels of one end, oldest first. Thread-safe.

    Orders and sums pass through one ring of pinned memory: a launch allocates nothing.

    ``queue``  returns a context in which this thread's kernels run on the torch stream of digests
    """

    def __init__(
        self, keys: torch.Tensor, segment_bytes: int, queue: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> None:
        from connectors.transport.digest_kernel import segment_sums

        self._kernel, self._keys, self._queue, self.segment_bytes = segment_sums, keys, queue, segment_bytes
        self._on_cpu = keys.device.type == "cpu"  # in Triton's interpreter
        self._lock = threading.Lock()
        self._launched: deque[_Launch] = deque()
        self._allocate(_RING_ELEMENTS)

    def _allocate(self, elements: int) -> None:
        with self._queue():
            self._ring = torch.empty(elements, dtype=torch.int64, pin_memory=not self._on_cpu)
            self._buffer = torch.empty(elements, dtype=torch.int64, device=self._keys.device)
        self._next = 0

    def upload(self, table: Ints) -> torch.Tensor:
        with self._queue():
            return torch.from_numpy(table).to(self._keys.device)

    def launch(
        self, digest: BatchedDigest, table: Table, order: Ints, hashes: list[tuple[xxhash.xxh3_128, int]], tiles: int
    ) -> None:
        """Queue a kernel for ``digest``.

        ``hashes``  as in ``_Launch``
        ``tiles``   number of tiles of the largest job
        """
        sums = -(-len(order) // _ALIGNMENT) * _ALIGNMENT
        size = sums + sum(count for _, count in hashes)
        with self._lock, self._queue():
            start = self._claim(size)
            ring, buffer = self._ring[start : start + size], self._buffer[:size]
            ring[: len(order)].numpy()[:] = order
            buffer[: len(order)].copy_(ring[: len(order)], non_blocking=True)
            self._kernel[(tiles, len(hashes))](
                buffer,
                table.on_device,
                self._keys,
                buffer[sums:],
                SEGMENT=self.segment_bytes,
                LONGEST=table.longest_words,
                ROWS=table.rows,
                WORDS=_TILE_WORDS // table.rows,
                ALIGNED=table.aligned,
                num_warps=8,
            )
            ring[sums:].copy_(buffer[sums:], non_blocking=True)
            event = None if self._on_cpu else torch.Event(self._keys.device)
            if event is not None:
                event.record()
            self._launched.append(_Launch(digest, hashes, start, start + sums, start + size, event))
            digest.running += 1

    def _claim(self, size: int) -> int:
        """Return the start of ``size`` free elements of the ring. Waits for older launches if full."""
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
        """Wait for the oldest launch, and hash its sums."""
        launch = self._launched[0]
        if launch.event is not None:
            launch.event.synchronize()
        self._launched.popleft()
        at, ring = launch.sums, self._ring.numpy()
        for hasher, count in launch.hashes:
            hasher.update(ring[at : at + count].astype("<i8", copy=False).data)
            at += count
        launch.digest.running -= 1

    def collect(self, digest: BatchedDigest, wait: bool) -> bool:
        """Hash the sums of launches that have ended; return whether all of ``digest`` have.

        ``wait``  whether to wait for those of ``digest``
        """
        with self._lock:
            while self._launched and digest.running:
                event = self._launched[0].event
                if not (wait or event is None or event.query()):
                    break
                self._collect()
            return not digest.running


class Table:
    """The pieces of a pair's plan at one end, on the device. Compiles the kernel for them.

    Raises PlanError unless the pieces of all blocks lie in ``regions``, and Triton's errors.
    """

    def __init__(
        self, groups: Sequence[GroupStreams], num_blocks: int, regions: Sequence[Region], launches: Launches
    ) -> None:
        self.launches = launches
        sides = [side for _, side, _ in groups]
        sizes = [plan.piece_bytes for plan, *_ in groups]
        units = np.concatenate([np.full(len(side.address), side.unit_offset.shape[1]) for side in sides])
        address, stride = (np.concatenate([getattr(side, name) for side in sides]) for name in ("address", "block_stride"))
        offsets = np.concatenate([side.unit_offset.ravel() for side in sides])
        rows = np.stack([address, stride, 3 * len(address) + np.cumsum(units) - units], 1)
        self.on_device = launches.upload(np.concatenate([rows.ravel(), offsets]).astype(np.int64))
        length = np.concatenate(sizes)
        for side, size in zip(sides, sizes, strict=True):
            last = side.address + side.block_stride * (num_blocks - 1) + side.unit_offset.max(1, initial=0) + size
            for first, stop in zip(side.address.tolist(), last.tolist(), strict=True):
                if not any(region.address <= first and stop <= region.end for region in regions):
                    raise PlanError(f"the pages at {first:#x} to {stop:#x} do not lie in one region of the KV cache")
        self.aligned = not any((values % _WORD_BYTES).any() for values in (address, stride, offsets, length))
        self.longest_words = -(-min(int(length.max(initial=1)), launches.segment_bytes) // _WORD_BYTES)
        self.rows = _TILE_WORDS // min(_MAX_ROW_WORDS, max(128, 1 << (self.longest_words - 1).bit_length()))
        bases = np.cumsum([0, *map(len, sizes)]).tolist()
        self.streams = [
            [(base + each.first, each.stop - each.first, each.piece_bytes) for each in streams]
            for base, (*_, streams) in zip(bases, groups, strict=False)
        ]
        # One job without units.
        digest = BatchedDigest((), num_blocks, self)
        launches.launch(digest, self, np.array([0, 1, 0, 6, _WORD_BYTES, 0]), [(xxhash.xxh3_128(), 0)], 1)
        launches.collect(digest, wait=True)


class BatchedDigest(TransferDigest):
    """Digest of one transfer; ``running`` of its launches have not been collected."""

    def __init__(self, groups: tuple[GroupStreams, ...], num_blocks: int, table: Table) -> None:
        super().__init__(groups, num_blocks, xxhash.xxh3_128)
        self._table = table
        self._added: list[tuple[int, list[int], Ints, Ints]] = []
        self.running = 0

    def _feed(self, group: int, numbers: list[int], pieces: slice, ids: Ints, parts: Ints) -> None:
        self._added.append((group, numbers, ids, parts))

    def ready(self) -> bool:
        self._launch()
        return self._table.launches.collect(self, wait=False)

    def hexdigest(self) -> str:
        self._launch()
        self._table.launches.collect(self, wait=True)
        return super().hexdigest()

    def _launch(self) -> None:
        """Queue one kernel for all units added since the last one."""
        added, self._added = self._added, []
        if not added:
            return
        jobs: list[tuple[int, ...]] = []
        hashes: list[tuple[xxhash.xxh3_128, int]] = []
        ids_at, out = 6 * sum(len(numbers) for _, numbers, *_ in added), 0
        for group, numbers, ids, _ in added:
            for number in numbers:
                first, pieces, length = self._table.streams[group][number]
                sums = len(ids) * pieces * -(-length // self._table.launches.segment_bytes)
                jobs.append((first, pieces, len(ids), ids_at, length, out))
                hashes.append((self._hashes[group][number], sums))
                out += sums
            ids_at += 2 * len(ids)
        if not jobs:
            return
        units = [each for *_, ids, parts in added for each in (ids, parts)]
        order = np.concatenate([np.asarray(jobs, np.int64).ravel(), *units])
        tiles = -(-max(count for _, count in hashes) // self._table.rows)
        self._table.launches.launch(self, self._table, order, hashes, tiles)
