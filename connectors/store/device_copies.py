"""Copy runs between a KV cache on an accelerator and staging memory.

A gather or scatter on the device and one copy of packed bytes reach the speed of the bus; copies
page by page do not. Torch's own operations gather and scatter, so any torch device works.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from connectors.errors import ConfigurationError, StoreError
from connectors.planning.blocks import Ints
from connectors.planning.descriptors import Runs
from connectors.store.tiers.staging import AttachedStaging

_RING_BYTES, _BATCH_BYTES = 64 * 2**20, 32 * 2**20
_LONGEST_ROW, _SHORTEST_COMMON_ROW = 2**20, 2**12
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

Pieces = list[tuple[int, int, int]]  # (offset in a batch, offset in staging, bytes) of contiguous copies


class DeviceCopies:
    """``HostCopies`` for a device: methods return when copies are queued, or raise StoreError.

    Gathers and scatters run on the thread's current stream, between the forward passes that write
    and overwrite their blocks. Copies from and to staging run on two other streams. A ring buffer
    on the device holds packed batches; a new batch waits until its range is no longer in use.

    ``tensors``  views of the cache

    Raises ConfigurationError if the device is not supported or has no memory left.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._device = tensors[0].device
        if self._device.type not in ("cuda", "cpu"):
            raise ConfigurationError(f"store: supports no KV cache on {self._device.type} devices; remove store")
        self._module: Any = torch.get_device_module(self._device)
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        self._bases = np.asarray(sorted(storages), np.int64)
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._contents = [empty.new_empty(0).set_(storages[base]) for base in sorted(storages)]
        self._in, self._out = self._module.Stream(), self._module.Stream()
        try:
            self._ring = empty.new_empty(_RING_BYTES)
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(f"store: {error}; reduce gpu_memory_utilization, or remove store") from error
        self._next = 0
        # Range of the ring and the event of its last use, oldest first.
        self._used: deque[tuple[int, int, Any]] = deque()
        self._address = 0
        self._host = torch.empty(0, dtype=torch.uint8)
        self._last: tuple[Any, ...] = ()

    def attach(self, staging: AttachedStaging) -> None:
        """Raises StoreError."""
        self._host = torch.frombuffer(staging.view(0, staging.size_bytes), dtype=torch.uint8)
        if self._device.type == "cuda":
            status = int(torch.cuda.cudart().cudaHostRegister(staging.address, staging.size_bytes, 0))
            if status:
                with contextlib.suppress(RuntimeError):  # CUDA reports the failure once more, at the next launch
                    torch.zeros(1, device=self._device)
                raise StoreError(f"cudaHostRegister fails with {status}; reduce staging_mib, or raise memory limits")
        self._address = staging.address

    def load(self, runs: Runs) -> None:
        with self._typed():
            for rows, index, pieces in self._batches(runs.dst, runs.src, runs.length):
                start, content = self._take(rows, index, self._in)
                with self._module.stream(self._in):
                    for offset, at, size in pieces:
                        content[offset : offset + size].copy_(self._host[at : at + size], non_blocking=True)
                self._module.current_stream().wait_event(self.now(self._in))
                rows.index_copy_(0, index, content.view(rows.dtype).view(-1, rows.shape[1]))
                self._used.append((start, start + len(content), self.now()))

    def store(self, runs: Runs) -> None:
        with self._typed():
            for rows, index, pieces in self._batches(runs.src, runs.dst, runs.length):
                start, content = self._take(rows, index, self._module.current_stream())
                torch.index_select(rows, 0, index, out=content.view(rows.dtype).view(-1, rows.shape[1]))
                self._out.wait_event(self.now())
                with self._module.stream(self._out):
                    for offset, at, size in pieces:
                        self._host[at : at + size].copy_(content[offset : offset + size], non_blocking=True)
                self._used.append((start, start + len(content), self.now(self._out)))

    def now(self, stream: Any = None) -> Any:
        """Return an event after what is queued on ``stream``, or on the thread's current one."""
        event = self._module.Event(**({} if self._device.type == "cpu" else {"enable_timing": True}))
        event.record(stream or self._module.current_stream())
        return event

    def seconds(self, first: Any, last: Any) -> float:
        return 0.0 if self._device.type == "cpu" else first.elapsed_time(last) / 1000

    def mark(self) -> tuple[Any, ...]:
        """Return events that have all passed once what is queued has ended."""
        self._last = self.now(), self.now(self._in), self.now(self._out)
        return self._last

    def passed(self, mark: tuple[Any, ...]) -> bool:
        return all(event.query() for event in mark)

    def close(self) -> None:
        """Unregister staging memory; the process's end does so if the device still copies."""
        if self._address and self._device.type == "cuda" and self.passed(self._last):
            torch.cuda.cudart().cudaHostUnregister(self._address)

    def _take(self, rows: torch.Tensor, index: torch.Tensor, stream: Any) -> tuple[int, torch.Tensor]:
        """Return (offset, content) of the ring's next part; ``stream`` waits for its last use, and
        so does the stream of copies from staging, which may get the rest of this part.
        """
        size = len(index) * rows.shape[1] * rows.element_size()
        start = self._next if self._next + size <= _RING_BYTES else 0
        while self._used and self._used[0][2].query():
            self._used.popleft()
        while any(first < start + size and start < last for first, last, _ in self._used):
            event = self._used.popleft()[2]
            stream.wait_event(event)
            self._in.wait_event(event)
        self._next = -(-(start + size) // 256) * 256  # rows of any words begin there
        return start, self._ring[start : start + size]

    def _batches(self, device: Ints, host: Ints, length: Ints) -> Iterator[tuple[torch.Tensor, torch.Tensor, Pieces]]:
        """Yield (rows, index, pieces) of runs between addresses in the cache and in staging.

        Row i begins at word i of a storage, so rows overlap: only those in ``index`` are used, in
        the order of their addresses in staging.
        """
        if not len(length):
            return
        common = int(np.gcd.reduce(length))
        longest = common if _SHORTEST_COMMON_ROW <= common <= _LONGEST_ROW else _LONGEST_ROW
        counts = -(-length // longest)
        run = np.repeat(np.arange(len(length)), counts)
        offset = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
        device, host, length = device[run] + offset, host[run] + offset, np.minimum(longest, length[run] - offset)
        owner = np.searchsorted(self._bases, device, "right") - 1
        order = np.lexsort((host, owner, length))
        device, host, length, owner = device[order], host[order], length[order], owner[order]
        breaks = np.flatnonzero(np.diff(owner) | np.diff(length)) + 1
        for first, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(length)], strict=True):
            content, row = self._contents[owner[first]], int(length[first])
            start = device[first:stop] - self._bases[owner[first]]
            word = next(size for size in _WORDS if not (row % size or (start % size).any()))
            words = content[: len(content) // word * word].view(_WORDS[word])
            rows = words.as_strided((len(words) - row // word + 1, row // word), (1, 1))
            index, step = torch.from_numpy(start // word), max(1, _BATCH_BYTES // row)
            if self._device.type != "cpu":  # from pageable memory, the copy would wait for the stream
                index = index.pin_memory().to(self._device, non_blocking=True)
            for at in range(0, len(index), step):
                places = host[first + at : min(first + at + step, stop)] - self._address
                firsts = np.concatenate(([0], np.flatnonzero(np.diff(places) != row) + 1))
                sizes = np.diff(firsts, append=len(places)) * row
                pieces = zip((firsts * row).tolist(), places[firsts].tolist(), sizes.tolist(), strict=True)
                yield rows, index[at : at + step], list(pieces)

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            with torch.inference_mode():
                yield
        except RuntimeError as error:  # torch's errors of devices, out of memory included
            self._module.synchronize()  # a queued part of the copy may use the ring
            raise StoreError(f"the device rejects a copy: {error}") from error
