"""A tier: a folder of objects with a byte budget, shared by any number of processes.

    <path>/tandem-kv-store            marks the folder as a store (marker.py)
    <path>/usage                      bytes used, under a lock of <path> (usage.py)
    <path>/parts/<process>-<number>   files being written, locked by their writers
    <path>/objects/<namespace>/<key>  complete objects; renamed into place, content never changed

There is no index: a lookup opens the file of a key. Methods block on the file system, so callers
run all but the constructor and ``close`` in threads with deadlines (``lanes.py``). A failure is a
miss or a dropped store.

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
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from connectors.errors import ConfigurationError, CorruptObjectError, StoreError
from connectors.store.tiers.files import Files, is_abandoned
from connectors.store.tiers.marker import folder_id, opened_root
from connectors.store.tiers.objects import (
    HEADER_BYTES,
    ObjectName,
    PayloadDigest,
    check_header,
    encode_header,
)
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


@dataclass(slots=True)
class TierCounts:
    corrupt: int = 0
    stored: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    evicted: int = 0
    failed_stores: int = 0


class FolderTier:
    """Objects in one folder, created if necessary. Thread-safe. Raises ConfigurationError.

    ``budget_bytes``  limit for the bytes of all files, including those of other processes
    ``durable``       whether to sync each file before it is renamed
    """

    def __init__(
        self, path: Path, budget_bytes: int, durable: bool = True, files: Files | None = None, label: str = "disk"
    ) -> None:
        if budget_bytes <= 0:
            raise ConfigurationError(
                f"store: the budget of {path} must be positive, not {budget_bytes} bytes; raise disk_gib or memory_gib"
            )
        self.path = path
        self.label = label
        self.budget_bytes = budget_bytes
        self.counts = TierCounts()
        self._durable = durable
        self.files = files or Files()
        with opened_root(path, create=True) as root:
            self._folders: tuple[OpenFolder, OpenFolder] | None = (
                root.folder("objects", create=True),
                root.folder("parts", create=True),
            )
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
        """Read the eviction order, now and not in the first store. Raises StoreError."""
        with self._usage.locked(time.monotonic() + _OPEN_S):
            return len(self._order)

    def id(self) -> str:
        with self._usage.held(time.monotonic() + _ID_S) as root:
            return folder_id(root)

    def used_bytes(self, deadline: float) -> int:
        with self._usage.locked(deadline):
            return self._usage.used_bytes

    def find(self, name: ObjectName) -> bool:
        """Removes a file with a corrupt or another header."""
        try:
            head, state = self.files.head(self._space(name.path), name.path[1])
            check_header(head, state.st_size, name.path)
        except CorruptObjectError:
            self._drop_corrupt(name)
            return False
        except OSError:
            return False
        return True

    def find_all(self, names: Sequence[ObjectName]) -> list[bool]:
        return [self.find(name) for name in names]

    def read(self, name: ObjectName, payload: memoryview, piece_read: Callable[[], None] = lambda: None) -> None:
        """Read an object into ``payload`` and verify its header and digest.

        Raises StoreError if the file is missing or unreadable. Removes a corrupt object, or one of
        another size, and raises CorruptObjectError. After an error, ``payload`` is undefined.
        """
        digest = PayloadDigest()

        def add(piece: memoryview) -> None:
            # Now, not after the last piece: these bytes are still in the CPU's cache.
            digest.update(piece)
            piece_read()

        try:
            head, state, read = self.files.read(self._space(name.path), name.path[1], payload, add)
            stored = check_header(head, state.st_size, name.path)
            size = state.st_size - HEADER_BYTES
            if not size == payload.nbytes == read:
                raise CorruptObjectError(f"the payload has {size} bytes, expected {payload.nbytes}; {read} were read")
            if stored != digest.digest():
                raise CorruptObjectError("the file's payload has changed since it was written")
        except CorruptObjectError:
            self._drop_corrupt(name)
            raise
        except OSError as error:
            raise self._failed(name, error) from error
        self.counts.loaded_bytes += size
        self._touch(name, state)

    def write(self, name: ObjectName, payload: memoryview, deadline: float) -> bool:
        """Return False if the object exists. Raises StoreError, also at ``deadline``."""
        try:
            state = self._state(name.path)
            if state is None:
                return self._write(name, payload, deadline)
            self._touch(name, state)
            return False
        except Exception as error:
            self.counts.failed_stores += 1
            if isinstance(error, OSError):
                # The disk fails (EIO) or has been removed (ESTALE).
                raise self._failed(name, error) from error
            raise

    def close(self) -> None:
        """Make later calls fail. Calls that run keep the folders open until they return."""
        self._folders = None
        self._usage.close()

    def _opened(self) -> tuple[OpenFolder, OpenFolder]:
        if self._folders is None:
            raise OSError(errno.EBADF, "the store is closed")
        return self._folders

    def _space(self, path: tuple[str, str], create: bool = False) -> OpenFolder:
        return self._opened()[0].folder(path[0], create)

    def _state(self, path: tuple[str, str]) -> os.stat_result | None:
        try:
            return self._space(path).stat(path[1])
        except FileNotFoundError:
            return None

    def _failed(self, name: ObjectName, error: Exception) -> StoreError:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return StoreError(f"{self.path}/objects/{'/'.join(name.path)}: {reason}")

    def _write(self, name: ObjectName, payload: memoryview, deadline: float) -> bool:
        header = encode_header(name, payload)
        size = allocated(len(header) + payload.nbytes)
        parts, part = self._opened()[1], f"{self._process}-{next(self._part_numbers)}"
        fd = None
        try:
            with self._usage.locked(deadline):
                self._make_room(size, deadline)
                fd = self._create(parts, part, len(header) + payload.nbytes, deadline)
                self._usage.used_bytes += size
            self.files.write(fd, header, payload, self._durable)
            used_ns = _used_ns(name)
            os.utime(fd, ns=(used_ns, used_ns))
            with self._usage.locked(deadline):
                if self._state(name.path) is not None:
                    parts.unlink(part)
                    self._usage.used_bytes -= size
                    return False
                self.files.publish(parts, part, self._space(name.path, create=True), name.path[1])
                heapq.heappush(self._order, (used_ns, size, *name.path))
        except Exception:
            if fd is not None:
                self._give_up(parts, part, size)
            raise
        finally:
            if fd is not None:
                os.close(fd)
        self.counts.stored += 1
        self.counts.stored_bytes += payload.nbytes
        return True

    def _create(self, parts: OpenFolder, part: str, size_bytes: int, deadline: float) -> int:
        # On a full file system, evict as many bytes and try once more, unless a second try has
        # found it full within the last _RESCAN_S.
        try:
            return self.files.create(parts, part, size_bytes)
        except OSError as error:
            if error.errno not in _FULL or time.monotonic() - self._full_at < _RESCAN_S:
                raise
        freed_bytes = 0
        while freed_bytes < size_bytes:
            freed = self._evict_next(deadline)
            if freed is None:
                raise StoreError(f"{self.path}: other files fill the file system; free space, or lower the budget")
            freed_bytes += freed
        try:
            return self.files.create(parts, part, size_bytes)
        except OSError as error:
            if error.errno in _FULL:
                self._full_at = time.monotonic()
            raise

    def _give_up(self, parts: OpenFolder, part: str, size_bytes: int) -> None:
        try:
            # Missing if it was renamed and only the write of the usage file failed.
            with self._usage.locked(time.monotonic() + _GIVE_UP_S), contextlib.suppress(FileNotFoundError):
                parts.unlink(part)
                self._usage.used_bytes -= size_bytes
        except StoreError:
            with contextlib.suppress(OSError):
                parts.unlink(part)
            self._usage.distrust()

    def _make_room(self, size_bytes: int, deadline: float) -> None:
        if size_bytes > self.budget_bytes:
            raise StoreError(
                f"{self.path}: the object's {size_bytes} bytes exceed the budget of {self.budget_bytes} bytes; raise "
                "disk_gib or memory_gib"
            )
        while self._usage.used_bytes + size_bytes > self.budget_bytes:
            if self._evict_next(deadline) is None:
                raise StoreError(
                    f"{self.path}: {size_bytes} bytes do not fit into the budget of {self.budget_bytes} bytes: files "
                    "being written, or objects that other processes have just stored, use the rest"
                )

    def _evict_next(self, deadline: float) -> int | None:
        """Evict the least recently used object; return the freed bytes. Requires the lock.

        Without a known object, counts the files again, in case other processes have stored some,
        and returns 0; or None if the last count is not older than _RESCAN_S. Also counts them again
        if the clock was set back: known times may then be in the future. Raises StoreError after
        ``deadline``, and OSError.
        """
        self._opened()
        freed_bytes = 0
        if _clock_offset_ns() < self._clock_offset_ns - _PERIOD_NS:
            self._usage.recount()
        elif self._order:
            freed_bytes = self._evict_oldest()
        elif time.monotonic() - self._scanned_at > _RESCAN_S:
            self._usage.recount()
        else:
            return None
        if time.monotonic() >= deadline:
            raise StoreError(f"{self.path}: eviction did not make room before the deadline")
        return freed_bytes

    def _evict_oldest(self) -> int:
        used_ns, size, space, key = heapq.heappop(self._order)
        try:
            state = self._state((space, key))
            if state is None:
                return 0
            if _last_use_ns(state) > used_ns:
                heapq.heappush(self._order, (state.st_mtime_ns, size, space, key))
                return 0
            self._space((space, key)).unlink(key)
            size = min(size, allocated(state.st_size))  # another process may have counted a damaged file
        except FileNotFoundError:
            return 0
        except OSError as error:
            logger.warning("Tandem: %s/objects/%s/%s cannot be evicted: %s", self.path, space, key, error.strerror)
            return 0
        self._usage.used_bytes -= size
        self.counts.evicted += 1
        return size

    def _drop_corrupt(self, name: ObjectName) -> None:
        self.counts.corrupt += 1
        with contextlib.suppress(OSError):
            self._space(name.path).unlink(name.path[1])
        self._usage.distrust()

    def _touch(self, name: ObjectName, state: os.stat_result) -> None:
        used_ns = _used_ns(name)
        if _last_use_ns(state) < used_ns:
            with contextlib.suppress(OSError):
                self._space(name.path).set_mtime(name.path[1], used_ns)

    def _scan(self) -> int:
        objects, parts = self._opened()
        used, order = 0, []
        for part in parts.entries():
            if is_abandoned(parts, part.name):
                with contextlib.suppress(FileNotFoundError):
                    parts.unlink(part.name)
            used += sum(size for _, size in _stated(part))
        for space in objects.entries():
            try:
                folder = objects.folder(space.name)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                # A foreign file, a link or a folder that others can change. It uses bytes of the
                # budget; the store leaves it alone.
                used += sum(size for _, size in _stated(space))
                continue
            for entry in folder.entries():
                for state, size in _stated(entry):
                    used += size
                    if stat.S_ISREG(state.st_mode):
                        order.append((_last_use_ns(state), size, space.name, entry.name))
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


def _stated(entry: os.DirEntry[str]) -> Iterator[tuple[os.stat_result, int]]:
    with contextlib.suppress(FileNotFoundError):
        state = entry.stat(follow_symlinks=False)
        yield state, allocated(state.st_size)
