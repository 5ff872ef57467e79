"""System calls on object files. Tests replace ``Files`` to inject failures."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator

from connectors.errors import CorruptObjectError
from connectors.store.tiers.objects import HEADER_BYTES
from connectors.store.tiers.open_folder import OpenFolder

PIECE_BYTES = 256 << 10
"""Maximum payload bytes per read call. Each reports progress, so that a slow disk does not count as
hanging. A piece fits into the CPU's L2 cache, where its digest is computed."""


class Files:
    """One file per call. Methods raise OSError."""

    def head(self, folder: OpenFolder, name: str) -> tuple[bytes, os.stat_result]:
        with _opened(folder, name) as (fd, state):
            return os.pread(fd, HEADER_BYTES, 0), state

    def read(
        self, folder: OpenFolder, name: str, payload: memoryview, piece_read: Callable[[memoryview], None]
    ) -> tuple[bytes, os.stat_result, int]:
        """Read a file's payload into ``payload``, up to the end of either.

        Return the header's bytes (fewer if the file is shorter) and the number of payload bytes.
        ``piece_read`` gets the bytes of each call. Raises CorruptObjectError for no regular file.
        """
        with _opened(folder, name) as (fd, state):
            header = bytearray(HEADER_BYTES)
            count = os.preadv(fd, [header, payload[:PIECE_BYTES]], 0)
            read = max(0, count - HEADER_BYTES)
            piece_read(payload[:read])
            while HEADER_BYTES <= count < HEADER_BYTES + payload.nbytes:
                more = os.preadv(fd, [payload[read : read + PIECE_BYTES]], HEADER_BYTES + read)
                piece_read(payload[read : read + more])
                if not more:
                    break
                read, count = read + more, count + more
            return bytes(header[: min(count, HEADER_BYTES)]), state, read

    def create(self, folder: OpenFolder, name: str, size_bytes: int) -> int:
        """Create a file with ``size_bytes`` allocated, locked until its descriptor is closed."""
        fd = folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, size_bytes)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                folder.unlink(name)
            raise
        return fd

    def write(self, fd: int, header: bytes, payload: memoryview, sync: bool) -> None:
        count = os.pwritev(fd, [header, payload], 0)
        while count < len(header) + payload.nbytes:
            if count < len(header):
                count += os.pwrite(fd, header[count:], count)
            else:
                count += os.pwrite(fd, payload[count - len(header) :], count)
        if sync:
            os.fdatasync(fd)

    def publish(self, parts: OpenFolder, part: str, folder: OpenFolder, name: str) -> None:
        parts.move(part, folder, name)


def is_abandoned(folder: OpenFolder, name: str) -> bool:
    """Return whether no process has locked this file; False if unknown."""
    try:
        with _opened(folder, name, os.O_RDWR) as (fd, _):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except (OSError, CorruptObjectError):
        return False


@contextlib.contextmanager
def _opened(folder: OpenFolder, name: str, mode: int = os.O_RDONLY) -> Iterator[tuple[int, os.stat_result]]:
    try:
        fd = folder.open(name, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptObjectError(f"{name} is a symbolic link") from error
        raise
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise CorruptObjectError(f"{name} is not a regular file")
        yield fd, state
    finally:
        os.close(fd)
