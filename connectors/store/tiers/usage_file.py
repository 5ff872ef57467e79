"""Count the bytes below one folder for all processes that store there, to keep a shared budget.

The count lies in a small file next to the objects. A process that holds the lock marks this usage
file dirty before it changes other files, and clean before it releases the lock, unless an operation
failed or a file has changed without the lock. A process that finds it dirty, damaged or missing
counts the files again, so a process may be killed at any point. Each process also counts them at
its first use. The lock is ``flock`` on the folder and not on the usage file, so it does not vanish
with this file. The kernel releases the lock of a dead process.
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
"""Assumed allocation unit of the file system, in bytes."""


def allocated(size_bytes: int) -> int:
    """Return the bytes that a file of this size takes from the budget."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class UsageFile:
    """Byte count of a folder.

    In ``with usage.locked(deadline)``, no other thread or process adds, renames or evicts files.

    ``count``  returns the bytes of all files. Called under the lock at the first use, after
               ``distrust``, by ``recount``, and if the usage file is dirty, damaged or missing

    ``used_bytes``, ``begin``, ``add`` and ``recount`` require the lock.
    """

    def __init__(self, folder: OpenFolder, count: Callable[[], int]) -> None:
        self._path = folder.path
        # None after ``close``.
        self._folder: OpenFolder | None = folder
        self._count = count
        self._thread_lock = threading.Lock()
        # Descriptor of the usage file while the folder is locked.
        self._fd: int | None = None
        self._used = 0
        self._distrusted = True
        stat = os.fstat(folder.fd)
        # Identity of the folder: the empty mount point of an unmounted disk is not an empty store.
        self._identity = (stat.st_dev, stat.st_ino)

    @contextlib.contextmanager
    def locked(self, deadline: float) -> Iterator[None]:
        """Hold the lock.

        Raises StoreError if the lock is not free by ``deadline`` (``time.monotonic()`` seconds),
        after ``close``, if the folder was replaced or unmounted, and instead of any OSError, also
        one that the ``with`` block raises.
        """
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreError(f"{self._path}: another thread of this process holds the store's lock")
        try:
            with self._folder_locked(deadline) as folder, self._opened(folder):
                self._read()
                yield
                self._write(dirty=False)
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror or error}") from error
        finally:
            self._thread_lock.release()

    @property
    def used_bytes(self) -> int:
        return self._used

    def begin(self) -> None:
        """Mark the file dirty before files change: after a crash, the next process recounts."""
        self._write(dirty=True)

    def add(self, number: int) -> None:
        self._used = max(0, self._used + number)

    def recount(self) -> None:
        """Count the files now. Raises OSError and StoreError if they cannot be counted."""
        self._write(dirty=True)
        # Reset first, so that a `distrust` during the count is kept.
        self._distrusted = False
        try:
            self._used = self._count()
            # If the disk was unmounted during the count, the count is wrong.
            self._check_folder()
        except (OSError, StoreError):
            self._distrusted = True
            raise

    def distrust(self) -> None:
        """Mark the count as wrong, after changes without the lock. The next ``locked`` recounts."""
        self._distrusted = True

    def close(self) -> None:
        """Make ``locked`` fail from now on. A thread that holds the lock keeps the folder open."""
        self._folder = None

    @contextlib.contextmanager
    def _folder_locked(self, deadline: float) -> Iterator[OpenFolder]:
        """Hold the folder's ``flock``; yield the folder.

        Raises the errors of ``locked``, and OSError.
        """
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

    @contextlib.contextmanager
    def _opened(self, folder: OpenFolder) -> Iterator[None]:
        """Open the usage file; close it at the end."""
        self._fd = folder.file("usage", create=True)
        try:
            yield
        finally:
            os.close(self._fd)
            self._fd = None

    def _check_folder(self) -> None:
        stat = os.stat(self._path)
        if (stat.st_dev, stat.st_ino) != self._identity:
            raise StoreError(f"{self._path} was replaced or unmounted; restart the engine to use it again")

    def _read(self) -> None:
        assert self._fd is not None
        data = os.pread(self._fd, _FIELDS.size + 16, 0)
        fields, digest = data[: _FIELDS.size], data[_FIELDS.size :]
        if len(fields) == _FIELDS.size and xxhash.xxh3_128_digest(fields) == digest and not self._distrusted:
            magic, used, dirty = _FIELDS.unpack(fields)
            if magic == _MAGIC and not dirty:
                self._used = used
                return
        self.recount()

    def _write(self, dirty: bool) -> None:
        assert self._fd is not None, f"{self._path}: the usage file can only be written while its lock is held"
        fields = _FIELDS.pack(_MAGIC, self._used, dirty or self._distrusted)
        os.pwrite(self._fd, fields + xxhash.xxh3_128_digest(fields), 0)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
