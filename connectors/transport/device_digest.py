"""Hash KV on the torch device where it lies; only 8 bytes per segment move to the host.

Both ends of a transfer use these hashes of *streams* (``digest.py``) if either cache lies on an
accelerator, where xxh3 would be slow: it is sequential. Each piece of a stream is divided into
segments of at most 16 KiB, and each segment into little-endian signed 32-bit words ``w``, padded
with zeros:

    sum of a segment = k[0] * w[0] + k[1] * w[1] + ...   modulo 2^64
    hash of a stream = xxh3_128 of the sums of its segments, in order

``k`` are 4096 fixed odd keys (multilinear hashing: Lemire and Kaser, "Strongly universal string
hashing is fast"). Integer sums do not depend on order, so all devices compute the same bits. A
change of one word always changes its segment's sum; other damage stays undetected with a
probability of at most 2^-32 per damaged segment.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.util import find_spec

import numpy as np
import torch
import xxhash

from connectors.errors import ConfigurationError, PlanError
from connectors.planning.blocks import Ints
from connectors.planning.layout import EngineLayout, MemoryKind, Region
from connectors.planning.plan import plan_pair
from connectors.transport.batched_digest import BatchedDigest, Launches, Table
from connectors.transport.digest import End, GroupStreams, HostMemory, TransferDigest, digests

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 16 * 2**10
_WORD_BYTES = 4
# Bytes gathered at a time; a CPU's batch fits in its cache. Words and products: 3 times as much.
_HOST_BATCH_BYTES, _DEVICE_BATCH_BYTES = 2**20, 16 * 2**20

KEYS = np.frombuffer(hashlib.shake_128(b"tandem").digest(8 * SEGMENT_BYTES // _WORD_BYTES), "<i8") | 1


class CacheMemory:
    """One worker's KV cache, read to compute digests. Thread-safe.

    ``tensors``  views of the cache; a cache in host memory needs none
    """

    def __init__(self, layout: EngineLayout, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._layout = layout
        self._tensors = tensors
        if layout.memory_kind.memory != "DRAM":
            # Compile the kernel for pairs of equal engines at the start, not in a first transfer.
            plan = plan_pair(layout, layout)
            for end in End:
                digests(plan, self.shared_with(layout.memory_kind), end)()

    def shared_with(self, peer: MemoryKind) -> HostMemory | DeviceMemory:
        """Return this cache with the hash that both ends use if the peer's cache is in ``peer``."""
        return self._host if self._layout.memory_kind.memory == peer.memory == "DRAM" else self._device

    # Two threads may each create an object; both objects give equal hashes.

    @cached_property
    def _host(self) -> HostMemory:
        return HostMemory(self._layout)

    @cached_property
    def _device(self) -> DeviceMemory:
        return DeviceMemory(self._layout, self._tensors)


class DeviceMemory:
    """A cache on a torch device, the CPU included. Raises ConfigurationError for a region of device
    memory that no tensor holds.

    ``use_kernel``  whether one Triton kernel computes the sums of a write (``batched_digest.py``);
                    None: on an accelerator. Torch does without Triton or its compiler, slowly
    """

    def __init__(
        self, layout: EngineLayout, tensors: Sequence[torch.Tensor] = (), use_kernel: bool | None = None
    ) -> None:
        self.num_blocks = layout.num_blocks
        self._regions = [(region, _bytes_of(region, tensors)) for region in layout.regions]
        self.device = self._regions[0][1].device
        on_cpu = self.device.type == "cpu"
        self._batch_bytes = _HOST_BATCH_BYTES if on_cpu else _DEVICE_BATCH_BYTES
        self._module = torch.get_device_module(self.device)
        # A separate torch stream: digests do not wait for the kernels of the forward pass.
        self._stream = None if on_cpu else self._module.Stream(device=self.device)
        self._keys = torch.from_numpy(KEYS).to(self.device)
        self._use_kernel = (not on_cpu if use_kernel is None else use_kernel) and find_spec("triton") is not None
        self._launches: dict[End, Launches] = {}

    def new_stream(self) -> DeviceStream:
        return DeviceStream(self)

    def new_digests(self, groups: tuple[GroupStreams, ...], end: End) -> Callable[[], TransferDigest]:
        tables: list[Table] = []

        def new() -> TransferDigest:
            try:
                if self._use_kernel and not tables:
                    launches = self._launches.get(end) or Launches(self._keys, SEGMENT_BYTES, self.queue)
                    self._launches[end] = launches
                    tables.append(Table(groups, self.num_blocks, [region for region, _ in self._regions], launches))
            except Exception:
                self._use_kernel = False
                logger.exception("Tandem: Triton cannot compute digests of KV, so torch does, several times slower")
            if self._use_kernel:
                return BatchedDigest(groups, self.num_blocks, tables[0])
            return TransferDigest(groups, self.num_blocks, self.new_stream)

        return new

    def queue(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        # A context per use: threads share the `torch.Stream`, which cannot be entered twice.
        context: contextlib.AbstractContextManager[object] = self._module.stream(self._stream)
        return context

    def sums(self, address: Ints, length: int) -> torch.Tensor:
        """Queue the segment sums of ``length`` bytes at each address, in one region.

        Return them on the device: shape (addresses, segments per address), int64.
        """
        region, content = self._region_of(int(address[0]))
        last = int(address.max()) + length
        if int(address.min()) < region.address or last > region.end:
            raise PlanError(f"the bytes from {int(address.min()):#x} to {last:#x} do not lie in one region")
        offset = address - region.address
        whole = length // SEGMENT_BYTES
        parts = []
        if whole:
            segments = offset[:, None] + np.arange(whole, dtype=np.int64) * SEGMENT_BYTES
            parts.append(self._sum_segments(content, segments.ravel(), SEGMENT_BYTES).view(-1, whole))
        if length % SEGMENT_BYTES:
            tail = self._sum_segments(content, offset + whole * SEGMENT_BYTES, length % SEGMENT_BYTES)
            parts.append(tail.view(-1, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _region_of(self, address: int) -> tuple[Region, torch.Tensor]:
        for region, content in self._regions:
            if region.address <= address < region.end:
                return region, content
        raise PlanError(f"address {address:#x} lies in no region of this cache")

    def _sum_segments(self, content: torch.Tensor, offset: Ints, length: int) -> torch.Tensor:
        words = -(-length // _WORD_BYTES)
        aligned = not (content.data_ptr() % _WORD_BYTES or length % _WORD_BYTES or (offset % _WORD_BYTES).any())
        if aligned:
            content = content[: len(content) // _WORD_BYTES * _WORD_BYTES].view(torch.int32)
            offset = offset // _WORD_BYTES
        row = words if aligned else length
        # Row i begins at byte (aligned: word) i.
        rows = content.as_strided((len(content) - row + 1, row), (1, 1), content.storage_offset())
        index = torch.from_numpy(np.ascontiguousarray(offset)).to(self.device)
        step = max(1, self._batch_bytes // length)
        sums = []
        for first in range(0, len(offset), step):
            gathered = rows[index[first : first + step]]
            if not aligned:
                gathered = torch.nn.functional.pad(gathered, (0, words * _WORD_BYTES - length)).view(torch.int32)
            sums.append((gathered * self._keys[:words]).sum(1))
        return sums[0] if len(sums) == 1 else torch.cat(sums)


class DeviceStream:
    """Sums stay on the device, which may read the bytes after ``feed`` has returned."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._sums: list[torch.Tensor] = []

    def feed(self, address: Ints, length: int) -> None:
        if len(address):
            with self._memory.queue():
                self._sums.append(self._memory.sums(address, length).view(-1))

    def digest(self) -> bytes:
        if not self._sums:
            return xxhash.xxh3_128_digest(b"")
        with self._memory.queue():
            sums = torch.cat(self._sums).cpu()
        return xxhash.xxh3_128_digest(sums.numpy().astype("<i8", copy=False).data)


def _bytes_of(region: Region, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if region.memory_kind.memory == "DRAM":
        memory = (ctypes.c_uint8 * region.length_bytes).from_address(region.address)
        return torch.frombuffer(memory, dtype=torch.uint8)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start <= region.address and region.end <= start + storage.nbytes():
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            return content.set_(storage, region.address - start, (region.length_bytes,), (1,))
    raise ConfigurationError(f"no tensor holds the region at {region.address:#x} of the KV cache")
