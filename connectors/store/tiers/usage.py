"""Count the bytes below one folder for all processes that store there, to keep a shared budget.

A process that holds the lock makes the usage file invalid, and writes it again before it releases
the lock, unless files have changed without the lock or uncounted. Who finds it invalid or missing
counts the files again, and so does each at its first use: a process may be killed at any point. The
lock is ``flock`` on the folder: it does not vanish with the usage file, and the kernel releases
that of a dead process.
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
_RECORD_BYTES = _FIELDS.size + 16
_POLL_S = 0.001
BLOCK_BYTES = 4096
"""Assumed allocation unit of the file system."""


def allocated(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class Usage:
    """``used_bytes`` and ``recount`` require ``locked``."""

    def __init__(self, folder: OpenFolder, count: Callable[[], int]) -> None:
        self.used_bytes = 0
        self._folder = folder
        self._count = count
        self._thread_lock = threading.Lock()
        self._distrusted = True

    @contextlib.contextmanager
    def locked(self, deadline: float) -> Iterator[None]:
        """Hold the lock: no other thread or process adds, renames or evicts files.

        Raises OSError, and StoreError as ``held``.
        """
        with self.held(deadline) as folder, open(folder.open("usage", os.O_RDWR | os.O_CREAT), "r+b") as file:
            data = os.pread(file.fileno(), _RECORD_BYTES, 0)
            os.pwrite(file.fileno(), bytes(_RECORD_BYTES), 0)
            self.used_bytes = int.from_bytes(data[8:16], "little")
            if data != _record(self.used_bytes) or self._distrusted:
                self.recount()
            try:
                yield
            finally:
                if not self._distrusted:
                    os.pwrite(file.fileno(), _record(max(0, self.used_bytes)), 0)

    @contextlib.contextmanager
    def held(self, deadline: float) -> Iterator[OpenFolder]:
        """Hold the lock without counting.

        Raises StoreError if the lock is not free by ``deadline`` (``time.monotonic()`` seconds), or
        if the folder was replaced or unmounted; and OSError.
        """
        folder = self._folder
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreError(f"{folder.path}: another thread of this process holds the store's lock")
        try:
            self._check_folder()
            while not _try_lock(folder.fd):
                if time.monotonic() >= deadline:
                    raise StoreError(f"{folder.path}: another process holds the store's lock")
                time.sleep(_POLL_S)
            try:
                # The folder may have been unmounted during the wait.
                self._check_folder()
                yield folder
            finally:
                fcntl.flock(folder.fd, fcntl.LOCK_UN)
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

    def _check_folder(self) -> None:
        # The empty mount point of an unmounted disk is another folder, and not an empty store.
        if not os.path.samestat(os.stat(self._folder.path), os.fstat(self._folder.fd)):
            raise StoreError(f"{self._folder.path} was replaced or unmounted; restart the engine to use it again")


def _record(used_bytes: int) -> bytes:
    fields = _FIELDS.pack(b"TandemLd", used_bytes, 0)
    return fields + xxhash.xxh3_128_digest(fields)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
