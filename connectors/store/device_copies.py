"""Copy runs between a KV cache on an accelerator and staging memory.

A gather or scatter on the device and one copy of packed bytes are three times as fast as a copy per
page (docs/benchmarks.md). Only torch operations are used, so any torch device works, a CPU too.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from connectors.errors import ConfigurationError, PlanError, StoreError
from connectors.planning.blocks import Ints
from connectors.planning.descriptors import Runs
from connectors.store.tiers.staging import AttachedStaging

_RING_BYTES = 64 * 2**20
_BATCH_BYTES = _RING_BYTES // 2
_LONGEST_ROW, _SHORTEST_COMMON_ROW = 2**20, 2**12
_ALIGN = 256
_CLOSE_S = 1.0

Mark = tuple[Any, ...]
"""Events of torch; all have passed once the copies before them have ended."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one length in one storage, in the order of their staging addresses.

    ``words``      the storage as a tensor of words
    ``starts``     index of each row's first word, int64 on the device
    ``row_words``  words per row
    ``pieces``     (offset in the batch, offset in staging, bytes) of each contiguous copy
    """

    words: torch.Tensor
    starts: torch.Tensor
    row_words: int
    pieces: list[tuple[int, int, int]]

    @property
    def size_bytes(self) -> int:
        return len(self.starts) * self.row_words * self.words.element_size()

    @property
    def rows(self) -> torch.Tensor:
        """Row i begins at word i. Rows overlap, so only those at ``starts`` may be written."""
        return self.words.as_strided((len(self.words) - self.row_words + 1, self.row_words), (1, 1))

    def packed(self, content: torch.Tensor) -> torch.Tensor:
        return content.view(self.words.dtype).view(-1, self.row_words)


class DeviceCopies:
    """Copies of one rank; the counterpart of ``HostCopies`` for a cache on an accelerator.

    Methods queue copies and return before the device runs them. Gathers and scatters run on the
    thread's current stream, which also runs the forward pass: each follows the kernels that wrote
    its blocks and precedes those that overwrite them. Copies from and to staging run on two streams
    of their own. Packed bytes are in a ring on the device; a batch waits on the device, never on
    the host, for the last use of its part of the ring.

    ``tensors``  views of the cache; all layers of vLLM share one storage

    Raises ConfigurationError if the device cannot register host memory or has no memory left.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        self._device = tensors[0].device
        self._storages = [
            (address, torch.empty(0, dtype=torch.uint8, device=self._device).set_(storages[address]))
            for address in sorted(storages)
        ]
        if self._device.type not in ("cuda", "cpu"):
            raise ConfigurationError(
                f"store: the KV cache is on a device of type {self._device.type}, but the store supports host memory "
                "and CUDA or ROCm devices only; remove store"
            )
        self._module: Any = torch.get_device_module(self._device)
        self._in, self._out = self._module.Stream(), self._module.Stream()
        try:
            self._ring = torch.empty(_RING_BYTES, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                f"store: the device has no {_RING_BYTES >> 20} MiB left; reduce gpu_memory_utilization, or remove store"
            ) from error
        self._next = 0
        # Range of the ring and the event of its last use, oldest first.
        self._used: deque[tuple[int, int, Any]] = deque()
        self._address = 0
        self._staging: torch.Tensor | None = None
        self._last: Mark = ()

    def attach(self, staging: AttachedStaging) -> None:
        """Register staging memory with the device. Raises StoreError if that fails."""
        content = torch.frombuffer(staging.view(0, staging.size_bytes), dtype=torch.uint8)
        if self._device.type == "cuda":
            status = int(torch.cuda.cudart().cudaHostRegister(staging.address, len(content), 0))
            if status:
                with contextlib.suppress(RuntimeError):
                    # CUDA reports the failed call once more, at the next launch of a kernel.
                    torch.zeros(1, device=self._device)
                raise StoreError(
                    f"the device cannot register {len(content) >> 20} MiB of staging memory (cudaHostRegister returns "
                    f"{status}); reduce staging_mib, or raise the container's memory limit"
                )
        self._address, self._staging = staging.address, content

    def load(self, runs: Runs) -> None:
        """Queue copies from staging into blocks. Raises StoreError if the device rejects one."""
        with self._typed():
            for batch in self._batches(runs.dst, runs.src, runs.length):
                start, content = self._take(batch.size_bytes, self._in)
                with self._module.stream(self._in):
                    for offset, at, size in batch.pieces:
                        content[offset : offset + size].copy_(self._host(at, size), non_blocking=True)
                self._module.current_stream().wait_event(self._record(self._in))
                batch.rows.index_copy_(0, batch.starts, batch.packed(content))
                self._used.append((start, start + batch.size_bytes, self.now()))

    def store(self, runs: Runs) -> None:
        """Queue copies from blocks into staging. Raises StoreError if the device rejects one."""
        with self._typed():
            for batch in self._batches(runs.src, runs.dst, runs.length):
                start, content = self._take(batch.size_bytes, self._module.current_stream())
                torch.index_select(batch.rows, 0, batch.starts, out=batch.packed(content))
                self._out.wait_event(self.now())
                with self._module.stream(self._out):
                    for offset, at, size in batch.pieces:
                        self._host(at, size).copy_(content[offset : offset + size], non_blocking=True)
                self._used.append((start, start + batch.size_bytes, self._record(self._out)))

    def mark(self) -> Mark:
        """Return a mark after all copies that are queued and the forward pass before them."""
        self._last = self.now(), self._record(self._in), self._record(self._out)
        return self._last

    def passed(self, mark: Mark) -> bool:
        return all(event.query() for event in mark)

    def now(self) -> Any:
        """Return an event after the kernels that this thread has queued."""
        return self._record(self._module.current_stream())

    def seconds(self, first: Any, last: Any) -> float:
        """Return the device's time between two events that have passed."""
        return 0.0 if self._device.type == "cpu" else first.elapsed_time(last) / 1000

    def close(self) -> None:
        """Unregister staging memory, unless the device still copies after a second."""
        until = time.monotonic() + _CLOSE_S
        while not self.passed(self._last) and time.monotonic() < until:
            time.sleep(0.001)
        if self._staging is not None and self._device.type == "cuda" and self.passed(self._last):
            torch.cuda.cudart().cudaHostUnregister(self._address)
        self._staging = None

    def _host(self, offset: int, size: int) -> torch.Tensor:
        assert self._staging is not None, "attach precedes copies"
        return self._staging[offset : offset + size]

    def _record(self, stream: Any) -> Any:
        timed = {} if self._device.type == "cpu" else {"enable_timing": True}
        event = self._module.Event(**timed)
        event.record(stream)
        return event

    def _take(self, size_bytes: int, stream: Any) -> tuple[int, torch.Tensor]:
        """Return (offset, content) of the next part of the ring; ``stream`` waits for its use."""
        start = self._next if self._next + size_bytes <= _RING_BYTES else 0
        end = start + size_bytes
        while self._used and self._used[0][2].query():
            self._used.popleft()
        while any(first < end and start < last for first, last, _ in self._used):
            stream.wait_event(self._used.popleft()[2])
        self._next = -(-end // _ALIGN) * _ALIGN
        return start, self._ring[start:end]

    def _batches(self, device: Ints, host: Ints, length: Ints) -> Iterator[_Batch]:
        """Divide runs into batches; addresses in the cache are ``device``, in staging ``host``."""
        if not len(length):
            return
        common = int(np.gcd.reduce(length))
        longest = common if _SHORTEST_COMMON_ROW <= common <= _LONGEST_ROW else _LONGEST_ROW
        device, host, length = _rows(device, host, length, longest)
        bases = np.asarray([address for address, _ in self._storages], np.int64)
        owner = np.searchsorted(bases, device, "right") - 1
        order = np.lexsort((host, owner, length))
        device, host, length, owner = device[order], host[order], length[order], owner[order]
        breaks = np.flatnonzero(np.diff(owner) | np.diff(length)) + 1
        for first, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(length)], strict=True):
            row = int(length[first])
            base, content = self._storages[int(owner[first])]
            start = device[first:stop] - base
            if owner[first] < 0 or int(start.max()) + row > len(content):
                raise PlanError(f"a run of {row} bytes lies outside the KV cache's tensors")
            word = next(size for size in (8, 4, 2, 1) if not (row % size or (start % size).any()))
            words = content[: len(content) // word * word].view(_WORDS[word])
            index = self._upload(start // word)
            step = max(1, _BATCH_BYTES // row)
            for at in range(0, len(index), step):
                part = host[first + at : min(first + at + step, stop)] - self._address
                yield _Batch(words, index[at : at + step], row // word, _pieces(part, row))

    def _upload(self, index: Ints) -> torch.Tensor:
        content = torch.from_numpy(np.ascontiguousarray(index))
        # From pageable memory, the copy would wait for the stream.
        return content if self._device.type == "cpu" else content.pin_memory().to(self._device, non_blocking=True)

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            with torch.inference_mode():
                yield
        except RuntimeError as error:  # torch's errors of devices, out of memory included
            # Some copies may be queued: later ones, on any stream, follow them.
            streams = self._module.current_stream(), self._in, self._out
            for event in [self._record(stream) for stream in streams]:
                for stream in streams:
                    stream.wait_event(event)
            self._used.clear()
            raise StoreError(f"the device rejects a copy: {error}") from error


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _rows(device: Ints, host: Ints, length: Ints, longest: int) -> tuple[Ints, Ints, Ints]:
    """Divide runs into rows of ``longest`` bytes; the last row of a run may be shorter."""
    counts = -(-length // longest)
    run = np.repeat(np.arange(len(length)), counts)
    offset = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
    return device[run] + offset, host[run] + offset, np.minimum(longest, length[run] - offset)


def _pieces(host: Ints, row: int) -> list[tuple[int, int, int]]:
    """Merge ascending rows that are adjacent in staging: see ``_Batch.pieces``."""
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(host) != row) + 1))
    counts = np.diff(firsts, append=len(host))
    return list(zip((firsts * row).tolist(), host[firsts].tolist(), (counts * row).tolist(), strict=True))
