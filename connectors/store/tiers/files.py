"""System calls on object files: the xxh3_128 digest of name and payload, then the payload.

Tests replace ``Files`` to inject failures.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable

import xxhash

from connectors.store.keys.names import ObjectName
from connectors.store.tiers.open_folder import OpenFolder

DIGEST_BYTES = 16

PIECE_BYTES = 256 << 10
"""Maximum payload bytes per read call. Each reports progress, so that a slow disk does not count as
hanging. A piece fits into the CPU's L2 cache, where its digest is computed."""


def digest_of(name: ObjectName) -> xxhash.xxh3_128:
    """Return a digest of the name, to update with the payload: a moved file is then corrupt."""
    return xxhash.xxh3_128(name.space + name.key)


class Files:
    """One file per call. Methods raise OSError."""

    def find(self, folder: OpenFolder, name: str) -> None:
        folder.stat(name)

    def read(
        self, folder: OpenFolder, name: str, payload: memoryview, piece_read: Callable[[memoryview], None]
    ) -> tuple[bytes, os.stat_result]:
        """Read a file's digest, and its payload into ``payload``, up to the end of either.

        ``piece_read`` gets the bytes of each call.
        """
        fd = folder.open(name, os.O_RDONLY)
        try:
            digest, at = bytearray(DIGEST_BYTES), 0
            count = os.preadv(fd, [digest, payload[:PIECE_BYTES]], 0) - DIGEST_BYTES
            while count > 0:
                piece_read(payload[at : at + count])
                at += count
                count = os.preadv(fd, [payload[at : at + PIECE_BYTES]], DIGEST_BYTES + at)
            return bytes(digest), os.fstat(fd)
        finally:
            os.close(fd)

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

    def write(self, fd: int, digest: bytes, payload: memoryview, sync: bool) -> None:
        with open(fd, "wb", closefd=False) as file:
            file.write(digest)
            file.write(payload)
        if sync:
            os.fdatasync(fd)

    def publish(self, parts: OpenFolder, part: str, folder: OpenFolder, name: str) -> None:
        parts.move(part, folder, name)


def is_abandoned(folder: OpenFolder, name: str) -> bool:
    """Return whether no process has locked this file; False if unknown."""
    try:
        with open(folder.open(name, os.O_RDWR), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False
