"""Count the bytes below one folder for all processes that store there, to keep a shared budget.

A process that holds the lock marks the usage file dirty, and clean before it releases the lock,
unless a file has changed without the lock or its count. A process that finds it dirty, damaged or
missing counts the files again, and so does each at its first use: a process may be killed at any
point. The lock is ``flock`` on the folder: it does not vanish with the usage file, and the kernel
releases that of a dead process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator

import xxhash

from connectors.errors import StoreError
from connectors.store.tiers.open_folder import OpenFolder

_FIELDS = struct.Struct("<8sQQ")
_MAGIC = b"TandemLd"
_POLL_S = 0.001
BLOCK_BYTES = 4096
"""Assumed allocation unit of the file system."""


def allocated(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class Usage:
    """``used_bytes`` and ``recount`` require ``locked``."""

    def __init__(self, folder: OpenFolder, count: Callable[[], int]) -> None:
        self.used_bytes = 0
        self._path = folder.path
        self._folder: OpenFolder | None = folder
        self._count = count
        self._thread_lock = threading.Lock()
        self._distrusted = True
        # The empty mount point of an unmounted disk is another folder, and not an empty store.
        self._identity = _identity(os.fstat(folder.fd))

    @contextlib.contextmanager
    def locked(self, deadline: float) -> Iterator[None]:
        """Hold the lock: no other thread or process adds, renames or evicts files.

        Raises StoreError if the lock is not free by ``deadline`` (``time.monotonic()`` seconds),
        after ``close``, if the folder was replaced or unmounted, and instead of any OSError, also
        one that the ``with`` block raises.
        """
        with self.held(deadline) as folder, contextlib.closing(_File(folder)) as file:
            used = file.read()
            file.write(0, dirty=True)
            if used is None or self._distrusted:
                self.recount()
            else:
                self.used_bytes = used
            try:
                yield
            finally:
                file.write(max(0, self.used_bytes), dirty=self._distrusted)

    @contextlib.contextmanager
    def held(self, deadline: float) -> Iterator[OpenFolder]:
        """Hold the lock without counting. Raises as ``locked``."""
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreError(f"{self._path}: another thread of this process holds the store's lock")
        try:
            folder = self._folder
            if folder is None:
                raise StoreError(f"{self._path}: the store is closed")
            self._check_folder()
            while not _try_lock(folder.fd):
                if time.monotonic() >= deadline:
                    raise StoreError(f"{self._path}: another process holds the store's lock")
                time.sleep(_POLL_S)
            try:
                # The folder may have been unmounted during the wait.
                self._check_folder()
                yield folder
            finally:
                fcntl.flock(folder.fd, fcntl.LOCK_UN)
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror or error}") from error
        finally:
            self._thread_lock.release()

    def recount(self) -> None:
        # Reset first, so that a `distrust` during the count is kept.
        self._distrusted = False
        try:
            self.used_bytes = self._count()
            # If the disk was unmounted during the count, the count is wrong.
            self._check_folder()
        except (OSError, StoreError):
            self._distrusted = True
            raise

    def distrust(self) -> None:
        """Make the next ``locked`` recount, after changes without the lock."""
        self._distrusted = True

    def close(self) -> None:
        """A thread that holds the lock keeps the folder open."""
        self._folder = None

    def _check_folder(self) -> None:
        if _identity(os.stat(self._path)) != self._identity:
            raise StoreError(f"{self._path} was replaced or unmounted; restart the engine to use it again")


class _File:
    def __init__(self, folder: OpenFolder) -> None:
        self._fd = folder.file("usage", create=True)

    def read(self) -> int | None:
        data = os.pread(self._fd, _FIELDS.size + 16, 0)
        fields, digest = data[: _FIELDS.size], data[_FIELDS.size :]
        if len(fields) < _FIELDS.size or xxhash.xxh3_128_digest(fields) != digest:
            return None
        magic, used, dirty = _FIELDS.unpack(fields)
        return None if magic != _MAGIC or dirty else used

    def write(self, used: int, dirty: bool) -> None:
        fields = _FIELDS.pack(_MAGIC, used, dirty)
        os.pwrite(self._fd, fields + xxhash.xxh3_128_digest(fields), 0)

    def close(self) -> None:
        os.close(self._fd)


def _identity(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
