"""Staging memory between files and KV blocks, shared by an engine's scheduler and workers."""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from connectors.errors import ConfigurationError, StoreError

_ALIGN = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_REMEDY = (
    "run all ranks on the engine's host, under the user and in the pid namespace of its scheduler, mount /proc without "
    "hidepid, and let the scheduler's process be dumpable (prctl PR_SET_DUMPABLE)"
)
SHARED_MEMORY = Path("/dev/shm")


def slot_bytes(size_bytes: int) -> int:
    return max(1, -(-size_bytes // _ALIGN)) * _ALIGN


@dataclass(frozen=True, slots=True)
class StagingLocation:
    """Path in the engine's pid namespace; boot id, device and inode of the file there."""

    path: str
    identity: tuple[str, int, int]


class Staging:
    """A range of shared memory, divided into slots. Not thread-safe.

    The file has no name, so the kernel frees the memory when the engine's processes have ended,
    also if they are killed. Workers open it at ``location``. Raises ConfigurationError if
    ``size_bytes`` is less than a memory page or does not fit into ``folder``, and OSError.
    """

    def __init__(self, size_bytes: int, folder: Path = SHARED_MEMORY) -> None:
        size = size_bytes // _ALIGN * _ALIGN
        if size <= 0:
            raise ConfigurationError(
                f"store: staging_mib must be at least one page of {_ALIGN} bytes, not {size_bytes} bytes"
            )
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        descriptor = self._file.fileno()
        self.location = StagingLocation(f"/proc/{os.getpid()}/fd/{descriptor}", _identity(descriptor))
        try:
            # Allocate now: with a full /dev/shm, a later access would end the process with SIGBUS.
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            self._file.close()
            raise ConfigurationError(
                f"store: staging_mib {size >> 20} does not fit into {folder}: {error.strerror}; increase the "
                "container's shared memory or reduce staging_mib"
            ) from error
        # Populate now: page faults would halve the speed of the first loads after a start.
        self._memory = mmap.mmap(self._file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._view = memoryview(self._memory)
        self._free: list[tuple[int, int]] = [(0, size)]
        # Bytes and number of users of each slot, by offset.
        self._slots: dict[int, tuple[int, int]] = {}
        self.size_bytes = size
        self.used_bytes = 0

    def bytes_of(self, offsets: Iterable[int]) -> int:
        return sum(self._slots[offset][0] for offset in offsets)

    def take(self, size_bytes: int) -> int | None:
        """Return the offset of a new slot, with one user; None without room."""
        size = slot_bytes(size_bytes)
        for number, (offset, length) in enumerate(self._free):
            if length >= size:
                self._free[number : number + 1] = [(offset + size, length - size)] if length > size else []
                self._slots[offset] = size, 1
                self.used_bytes += size
                return offset
        return None

    def share(self, offset: int) -> None:
        """Add a user to a slot. Each user calls ``give_back`` once."""
        size, users = self._slots[offset]
        self._slots[offset] = size, users + 1

    def give_back(self, offset: int) -> None:
        size, users = self._slots.pop(offset)
        if users > 1:
            self._slots[offset] = size, users - 1
            return
        self.used_bytes -= size
        at = bisect(self._free, (offset, size))
        # Merge it with the free range after it, then with the one before it.
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, size = offset - self._free[at - 1][1], size + self._free.pop(at - 1)[1]
            at -= 1
        self._free.insert(at, (offset, size))

    def view(self, offset: int, size_bytes: int) -> memoryview:
        return self._view[offset : offset + size_bytes]

    def close(self) -> None:
        self._file.close()


def _identity(descriptor: int) -> tuple[str, int, int]:
    state = os.fstat(descriptor)
    return _BOOT_ID.read_text(encoding="ascii").strip(), state.st_dev, state.st_ino


class AttachedStaging:
    """A worker's mapping of its engine's staging memory. Raises StoreError."""

    def __init__(self, location: StagingLocation) -> None:
        try:
            fd = os.open(location.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if _identity(fd) != location.identity:
                    raise StoreError(f"staging memory: {location.path} is another file; {_REMEDY}")
                self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
        except OSError as error:
            raise StoreError(f"staging memory cannot be mapped ({error}); {_REMEDY}") from error
        self._view = memoryview(self._memory)
        self.size_bytes = len(self._view)
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data

    def view(self, offset: int, size_bytes: int) -> memoryview:
        return self._view[offset : offset + size_bytes]
