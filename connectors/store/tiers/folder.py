"""A tier: a folder of objects with a byte budget, shared by any number of processes.

    <path>/tandem-kv-store            marks the folder as a store (marker.py)
    <path>/usage                      bytes used, under a lock of <path> (usage.py)
    <path>/parts/<process>-<number>   files being written, locked by their writers
    <path>/objects/<namespace>/<key>  complete objects; renamed into place, content never changed

There is no index: a lookup asks for the file of a key. Methods block on the file system, so callers
run all but the constructor in threads with deadlines (``lanes.py``). A failure is a miss or a
dropped store.

Eviction removes the object with the earliest modification time, which records its last use
(``_used_ns``), of those that this process has stored or found when it last counted the bytes: at
its start, and when no such object is left. So it evicts objects that others store later last.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from connectors.errors import CorruptObjectError, StoreError
from connectors.store.keys.names import ObjectName
from connectors.store.tiers.files import DIGEST_BYTES, Files, digest_of, is_abandoned
from connectors.store.tiers.marker import folder_id, opened_root
from connectors.store.tiers.open_folder import OpenFolder
from connectors.store.tiers.usage import Usage, allocated

logger = logging.getLogger(__name__)

# Uses within one period count as simultaneous, so most uses change no file.
_PERIOD_NS = 60 * 10**9
# Larger than any prompt, in tokens.
_TOKENS = 1 << 24
_RESCAN_S = 10.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OPEN_S = 60.0
_GIVE_UP_S = _ID_S = 1.0


class FolderTier:
    """Objects in one folder, created if necessary. Thread-safe.

    The constructor raises ConfigurationError, and methods raise StoreError and OSError.

    ``budget_bytes``      limit for the bytes of all files, including those of other processes
    ``durable``           whether to sync each file before it is renamed
    ``corrupt, evicted``  numbers of objects that this process has removed
    """

    def __init__(
        self, path: Path, budget_bytes: int, durable: bool = True, files: Files | None = None, label: str = "disk"
    ) -> None:
        self.path = path
        self.label = label
        self.budget_bytes = budget_bytes
        self.corrupt = self.evicted = 0
        self._durable = durable
        self.files = files or Files()
        with opened_root(path) as root:
            self._objects = root.folder("objects", create=True)
            self._parts = root.folder("parts", create=True)
        # (last known modification time, bytes, folder, file) of each object, a heap. Requires the
        # lock of ``_usage``.
        self._order: list[tuple[int, int, str, str]] = []
        self._scanned_at = 0.0
        self._clock_offset_ns = 0
        # Last time at which evictions did not make room on a full file system.
        self._full_at = float("-inf")
        self._part_numbers = itertools.count()
        self._process = uuid.uuid4().hex
        self._usage = Usage(root, self._scan)

    def open(self) -> int:
        """Read the eviction order, now and not in the first store."""
        with self._usage.locked(time.monotonic() + _OPEN_S):
            return len(self._order)

    def id(self) -> str:
        with self._usage.held(time.monotonic() + _ID_S) as root:
            return folder_id(root)

    def used_bytes(self, deadline: float) -> int:
        with self._usage.locked(deadline):
            return self._usage.used_bytes

    def find(self, name: ObjectName) -> bool:
        """Return whether a file of this name exists; only ``read`` verifies its content."""
        space, key = name.path
        try:
            self.files.find(self._objects.folder(space), key)
        except OSError:
            return False
        return True

    def read(self, name: ObjectName, payload: memoryview, piece_read: Callable[[], None] = lambda: None) -> None:
        """Read an object into ``payload`` and verify its digest.

        Removes a corrupt object, or one of another size, and raises CorruptObjectError. After an
        error, ``payload`` is undefined.
        """
        space, key = name.path
        folder, digest = self._objects.folder(space), digest_of(name)

        def add(piece: memoryview) -> None:
            # Now, not after the last piece: these bytes are still in the CPU's cache.
            digest.update(piece)
            piece_read()

        stored, state = self.files.read(folder, key, payload, add)
        if state.st_size != DIGEST_BYTES + payload.nbytes or stored != digest.digest():
            self.corrupt += 1
            with contextlib.suppress(OSError):
                folder.unlink(key)
            self._usage.distrust()
            raise CorruptObjectError(
                f"{folder.path}/{key}: its size of {state.st_size} bytes or its digest is wrong; it is removed"
            )
        _touch(folder, name, state)

    def write(self, name: ObjectName, payload: memoryview, deadline: float) -> bool:
        """Return False if the object exists. Raises StoreError also at ``deadline``."""
        if self._exists(name):
            return False
        digest = digest_of(name)
        digest.update(payload)
        file_bytes = DIGEST_BYTES + payload.nbytes
        size, part = allocated(file_bytes), f"{self._process}-{next(self._part_numbers)}"
        if size > self.budget_bytes:
            raise StoreError(
                f"{self.path}: the object's {size} bytes exceed the budget of {self.budget_bytes} bytes; raise "
                "disk_gib or memory_gib"
            )
        fd = None
        try:
            with self._usage.locked(deadline):
                self._evict(self.budget_bytes - size, deadline)
                fd = self._create(part, file_bytes, deadline)
                self._usage.used_bytes += size
            self.files.write(fd, digest.digest(), payload, self._durable)
            used_ns = _used_ns(name)
            os.utime(fd, ns=(used_ns, used_ns))
            with self._usage.locked(deadline):
                if self._exists(name):
                    self._parts.unlink(part)
                    self._usage.used_bytes -= size
                    return False
                space, key = name.path
                self.files.publish(self._parts, part, self._objects.folder(space, create=True), key)
                heapq.heappush(self._order, (used_ns, size, space, key))
        except Exception:
            if fd is not None:
                self._give_up(part, size)
            raise
        finally:
            if fd is not None:
                os.close(fd)
        return True

    def _exists(self, name: ObjectName) -> bool:
        space, key = name.path
        try:
            folder = self._objects.folder(space)
            _touch(folder, name, folder.stat(key))
        except FileNotFoundError:
            return False
        return True

    def _create(self, part: str, file_bytes: int, deadline: float) -> int:
        # On a full file system, evict as many bytes and try once more, unless a second try has
        # found it full within the last _RESCAN_S.
        try:
            return self.files.create(self._parts, part, file_bytes)
        except OSError as error:
            if error.errno not in _FULL or time.monotonic() - self._full_at < _RESCAN_S:
                raise
        self._evict(self._usage.used_bytes - file_bytes, deadline)
        try:
            return self.files.create(self._parts, part, file_bytes)
        except OSError as error:
            if error.errno in _FULL:
                self._full_at = time.monotonic()
            raise

    def _give_up(self, part: str, size_bytes: int) -> None:
        try:
            # Missing if it was renamed and only the write of the usage file failed.
            with self._usage.locked(time.monotonic() + _GIVE_UP_S), contextlib.suppress(FileNotFoundError):
                self._parts.unlink(part)
                self._usage.used_bytes -= size_bytes
        except (StoreError, OSError):
            with contextlib.suppress(OSError):
                self._parts.unlink(part)
            self._usage.distrust()

    def _evict(self, limit_bytes: int, deadline: float) -> None:
        """Evict the least recently used objects until ``limit_bytes`` are used. Requires the lock.

        Without a known object, counts the files again, in case other processes have stored some,
        unless the last count is younger than _RESCAN_S. Also counts them again if the clock was set
        back: known times may then be in the future.
        """
        while self._usage.used_bytes > limit_bytes:
            if _clock_offset_ns() < self._clock_offset_ns - _PERIOD_NS:
                self._usage.recount()
            elif self._order:
                self._evict_oldest()
            elif time.monotonic() - self._scanned_at > _RESCAN_S:
                self._usage.recount()
            else:
                raise StoreError(
                    f"{self.path}: no object is left to evict: other files, files being written, or objects that "
                    "other processes have just stored use the space; free disk space, or change disk_gib or memory_gib"
                )
            if time.monotonic() >= deadline:
                raise StoreError(f"{self.path}: eviction did not make room before the deadline")

    def _evict_oldest(self) -> None:
        used_ns, size, space, key = heapq.heappop(self._order)
        try:
            folder = self._objects.folder(space)
            state = folder.stat(key)
            if _last_use_ns(state) > used_ns:
                heapq.heappush(self._order, (state.st_mtime_ns, size, space, key))
                return
            folder.unlink(key)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("Tandem: %s/objects/%s/%s cannot be evicted: %s", self.path, space, key, error.strerror)
            return
        # Another process may have counted a damaged file.
        self._usage.used_bytes -= min(size, allocated(state.st_size))
        self.evicted += 1

    def _scan(self) -> int:
        used, order = 0, []
        for part in self._parts.entries():
            with contextlib.suppress(FileNotFoundError):
                if is_abandoned(self._parts, part.name):
                    self._parts.unlink(part.name)
                used += allocated(part.stat(follow_symlinks=False).st_size)
        for space in self._objects.entries():
            try:
                folder = self._objects.folder(space.name)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue  # a file, a link, or a folder that others can change: the store leaves it alone
            for entry in folder.entries():
                with contextlib.suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    size = allocated(state.st_size)
                    order.append((_last_use_ns(state), size, space.name, entry.name))
                    used += size
        heapq.heapify(order)
        self._order = order
        self._scanned_at = time.monotonic()
        self._clock_offset_ns = _clock_offset_ns()
        return used


def _clock_offset_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


def _last_use_ns(state: os.stat_result) -> int:
    # A time in the future is from before the clock was set back.
    return state.st_mtime_ns if state.st_mtime_ns < time.time_ns() + _PERIOD_NS else 0


def _used_ns(name: ObjectName) -> int:
    """Return the modification time for a use now: the period and, within it, the object's place.

    So a prompt loses its last objects first: without its first one, the others are of no use.
    """
    place = (_TOKENS - 1 - min(name.end_token, _TOKENS - 1)) * (_PERIOD_NS // _TOKENS)
    return time.time_ns() // _PERIOD_NS * _PERIOD_NS + place


def _touch(folder: OpenFolder, name: ObjectName, state: os.stat_result) -> None:
    used_ns = _used_ns(name)
    if _last_use_ns(state) < used_ns:
        with contextlib.suppress(OSError):
            folder.set_mtime(name.path[1], used_ns)
