"""A tier: a folder of objects with a byte budget, shared by any number of processes.

    <path>/tandem-kv-store            marks the folder as a store
    <path>/usage                      bytes used, under a lock of <path> (usage_file.py)
    <path>/parts/<process>-<number>   files being written, locked by their writers
    <path>/objects/<namespace>/<key>  complete objects; renamed into place, content never changed

The folder is on a disk, or on tmpfs for host memory. It is opened once, and each file relative to
it (``open_folder.py``). There is no index: a lookup opens the file of a key. Each process reads the
eviction order from the files when it starts, and again when it counts their bytes. Methods block on
the file system, so callers run all but the constructor and ``close`` in threads with deadlines
(``lanes.py``). A failure is a miss or a dropped store.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from connectors.errors import ConfigurationError, CorruptObjectError, StoreError
from connectors.store.tiers.eviction import EvictionOrder
from connectors.store.tiers.files import Files, is_abandoned
from connectors.store.tiers.marker import TierFolders, folder_id, open_tier
from connectors.store.tiers.objects import (
    ObjectFile,
    ObjectHeader,
    ObjectName,
    PayloadDigest,
    check_name,
    check_payload,
    encode_header,
    is_other_format,
    parse_header,
)
from connectors.store.tiers.open_folder import OpenFolder
from connectors.store.tiers.usage_file import UsageFile, allocated

# Minimum interval in seconds between updates of a file's modification time, which records its last
# use for other processes.
_TOUCH_S = 60.0
_RESCAN_S = 10.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OPEN_S = 60.0
_GIVE_UP_S = 1.0


@dataclass(slots=True)
class TierCounts:
    """Counts of this process's events in one tier."""

    hits: int = 0
    corrupt: int = 0
    stored: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    evicted: int = 0
    failed_stores: int = 0


class FolderTier:
    """Objects in one folder. Thread-safe.

    Creates the folder if necessary. Raises ConfigurationError if it cannot be used, or if the
    budget is not positive.

    ``budget_bytes``  limit for the bytes of all files, including those of other processes
    ``durable``       whether to sync each file before it is renamed; tmpfs needs no sync
    ``files``         system calls, replaced in tests
    ``label``         name of the tier in metrics
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
        # Objects that this process has evicted or found corrupt. None: not recorded. The owner of
        # this tier may set a deque.
        self.removed: deque[ObjectName] | None = None
        self._durable = durable
        self.files = files or Files()
        self._folders: TierFolders | None = open_tier(path)
        self._order: EvictionOrder[ObjectFile] = EvictionOrder()
        self._order_lock = threading.Lock()
        self._scanned_at = 0.0
        # Last time at which evictions did not make room on a full file system.
        self._full_at = float("-inf")
        self._part_numbers = itertools.count()
        self._process = uuid.uuid4().hex
        self._usage = UsageFile(self._folders.root, self._scan)

    def open(self) -> int:
        """Read the eviction order from the files, if not done yet; return its number of objects.

        Only eviction needs it. Raises StoreError if the usage file's lock is not free within
        _OPEN_S, or the files cannot be counted.
        """
        with self._usage.locked(time.monotonic() + _OPEN_S):
            pass
        with self._order_lock:
            return len(self._order)

    def id(self) -> str:
        """Return the folder's id, as ``folder_id``. Raises OSError."""
        return folder_id(self._opened().root)

    def used_bytes(self, deadline: float) -> int:
        """Return the bytes of all files, including other processes'.

        Raises StoreError if another thread or process holds the usage file's lock until
        ``deadline``, or the files cannot be counted.
        """
        with self._usage.locked(deadline):
            return self._usage.used_bytes

    def find(self, name: ObjectName) -> ObjectHeader | None:
        """Return the header of an object; None if the file is missing or unreadable.

        Removes a file whose header is corrupt or of another object, and returns None.
        """
        file = ObjectFile.of(name)
        try:
            head, state = self.files.head(self._space(file), file.key)
            header = parse_header(head, state.st_size)
            check_name(header, name)
        except CorruptObjectError:
            self._drop_corrupt(file)
        except OSError:
            pass
        else:
            self.counts.hits += 1
            return header
        return None

    def find_all(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each object whether ``find`` returns a header. Removes corrupt files."""
        return [self.find(name) is not None for name in names]

    def read(
        self, name: ObjectName, payload: memoryview, piece_read: Callable[[], None] = lambda: None
    ) -> ObjectHeader:
        """Read an object into ``payload`` and verify its header and digest.

        Calls ``piece_read`` after each read call. A successful read is a use in the eviction order.
        Raises StoreError if the file is missing or unreadable. Removes a corrupt object, or one
        whose payload has another size than ``payload``, and raises CorruptObjectError. After an
        error, the content of ``payload`` is undefined.
        """
        file, digest = ObjectFile.of(name), PayloadDigest()

        def add(piece: memoryview) -> None:
            # Now, not after the last piece: these bytes are still in the CPU's cache.
            digest.update(piece)
            piece_read()

        try:
            head, state, read = self.files.read(self._space(file), file.key, payload, add)
            header = parse_header(head, state.st_size)
            check_name(header, name)
            check_payload(header, read, digest.digest())
            if payload.nbytes != header.payload_bytes:
                raise CorruptObjectError(
                    f"the file's payload has {header.payload_bytes} bytes, expected {payload.nbytes} bytes"
                )
        except CorruptObjectError:
            self._drop_corrupt(file)
            raise
        except OSError as error:
            raise StoreError(f"{self.path}/{file}: {error.strerror}") from error
        self.counts.loaded_bytes += header.payload_bytes
        self._touch(file, state.st_mtime)
        return header

    def write(self, name: ObjectName, payload: memoryview, cost_ns: int, deadline: float) -> bool:
        """Store an object; return False if it already exists.

        ``cost_ns``   estimated time to recompute the payload, in nanoseconds
        ``deadline``  end of any wait for the usage file's lock or for evictions, in
                      ``time.monotonic()`` seconds

        Raises StoreError if there is no room, if the file system fails, or at ``deadline``.
        """
        file = ObjectFile.of(name)
        try:
            if (modified_at := self._modified_at(file)) is not None:
                self._touch(file, modified_at)
                return False
            return self._write(file, name, payload, cost_ns, deadline)
        except Exception as error:
            self.counts.failed_stores += 1
            if isinstance(error, OSError):
                # The disk fails (EIO) or has been removed (ESTALE).
                raise StoreError(f"{self.path}/{file}: {error.strerror}") from error
            raise

    def close(self) -> None:
        """Make all later calls fail. Calls that run keep the folders open until they return."""
        self._folders = None
        self._usage.close()

    # Files.

    def _opened(self) -> TierFolders:
        if self._folders is None:
            raise OSError(errno.EBADF, "the store is closed")
        return self._folders

    def _space(self, file: ObjectFile, create: bool = False) -> OpenFolder:
        """Open the folder of an object's namespace. Raises OSError, as ``OpenFolder.folder``.

        Opens it at each use, so that a folder that was removed and created again is found.
        """
        return self._opened().objects.folder(file.space, create)

    def _modified_at(self, file: ObjectFile) -> float | None:
        """Return a file's modification time on ``time.time``; None if it is missing.

        Raises OSError.
        """
        try:
            return self._space(file).stat(file.key).st_mtime
        except FileNotFoundError:
            return None

    def _unlink(self, file: ObjectFile) -> None:
        self._space(file).unlink(file.key)

    def _write(self, file: ObjectFile, name: ObjectName, payload: memoryview, cost_ns: int, deadline: float) -> bool:
        header = encode_header(name, payload, cost_ns)
        size = len(header) + payload.nbytes
        parts, part = self._opened().parts, f"{self._process}-{next(self._part_numbers)}"
        fd = self._reserve(parts, part, size, deadline)
        try:
            self.files.write(fd, header, payload, self._durable)
            with self._usage.locked(deadline):
                self._usage.begin()
                if self._modified_at(file) is not None:
                    parts.unlink(part)
                    self._usage.add(-allocated(size))
                    return False
                self.files.publish(parts, part, self._space(file, create=True), file.key)
        except Exception as error:
            self._give_up(parts, part, size)
            if isinstance(error, OSError | StoreError):
                raise StoreError(f"{self.path}/{file}: {error}") from error
            raise
        finally:
            os.close(fd)
        with self._order_lock:
            self._order.add(file, allocated(size), cost_ns, time.time())
        self.counts.stored += 1
        self.counts.stored_bytes += payload.nbytes
        return True

    def _reserve(self, parts: OpenFolder, part: str, size_bytes: int, deadline: float) -> int:
        """Make room, create a file of ``size_bytes`` and return its descriptor.

        Raises StoreError if there is no room, if the file system fails, or at ``deadline``.
        """
        with self._usage.locked(deadline):
            self._make_room(allocated(size_bytes), deadline)
            self._usage.begin()
            try:
                fd = self._create(parts, part, size_bytes, deadline)
            except OSError as error:
                # The count is correct without the file: evictions have reduced it.
                failure = error
            else:
                self._usage.add(allocated(size_bytes))
                return fd
        raise StoreError(f"{parts.path}/{part}: {failure.strerror}") from failure

    def _create(self, parts: OpenFolder, part: str, size_bytes: int, deadline: float) -> int:
        """Create a file of ``size_bytes`` and return its descriptor.

        Requires the usage file's lock.

        If the file system is full, evicts objects of at least ``size_bytes`` and tries once more,
        unless a second try has found it full within the last _RESCAN_S. Raises OSError if the file
        cannot be created or an object cannot be removed, and StoreError as ``_evict_bytes``.
        """
        try:
            return self.files.create(parts, part, size_bytes)
        except OSError as error:
            if error.errno not in _FULL or time.monotonic() - self._full_at < _RESCAN_S:
                raise
        self._evict_bytes(allocated(size_bytes), deadline)
        try:
            return self.files.create(parts, part, size_bytes)
        except OSError as error:
            if error.errno in _FULL:
                self._full_at = time.monotonic()
            raise

    def _evict_bytes(self, size_bytes: int, deadline: float) -> None:
        """Evict objects of at least ``size_bytes``. Requires the usage file's lock.

        Raises StoreError without enough objects or after ``deadline``, and OSError if files cannot
        be removed or counted.
        """
        freed_bytes = 0
        while freed_bytes < size_bytes:
            freed = self._evict_next(deadline)
            if freed is None:
                raise StoreError(f"{self.path}: other files fill the file system; free space, or lower the budget")
            freed_bytes += freed

    def _give_up(self, parts: OpenFolder, part: str, size_bytes: int) -> None:
        """Remove an unfinished file and return its bytes to the budget.

        If the usage file cannot be locked within _GIVE_UP_S, its next use counts all files.
        """
        try:
            with self._usage.locked(time.monotonic() + _GIVE_UP_S):
                self._usage.begin()
                # The part is missing if it was renamed and only the write of the usage file failed.
                with contextlib.suppress(FileNotFoundError):
                    parts.unlink(part)
                    self._usage.add(-allocated(size_bytes))
        except StoreError:
            with contextlib.suppress(OSError):
                parts.unlink(part)
            self._usage.distrust()

    def _make_room(self, size_bytes: int, deadline: float) -> None:
        """Evict objects until ``size_bytes`` fit. Requires the usage file's lock.

        Raises StoreError if they cannot fit or do not fit before ``deadline``, and OSError if files
        cannot be removed or counted.
        """
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
        """Evict the object of least value; return the freed bytes.

        Frees nothing if the object was missing, or if another process has used it since this
        process knows of its last use. Without a known object, counts the files again, in case other
        processes have stored objects, and returns 0. If the last count is not older than _RESCAN_S,
        returns None instead. Requires the usage file's lock. Raises StoreError after ``deadline``,
        and OSError if files cannot be removed or counted.
        """
        freed_bytes = 0
        with self._order_lock:
            victim = self._order.pop()
        if victim is not None:
            file, entry = victim
            used_at = None
            with contextlib.suppress(OSError):
                used_at = self._modified_at(file)
            if used_at is not None and used_at > entry.used_at:
                with self._order_lock:
                    self._order.add(file, entry.size_bytes, entry.cost, used_at)
            else:
                freed_bytes = self._evict(file, entry.size_bytes)
        elif time.monotonic() - self._scanned_at > _RESCAN_S:
            self._usage.recount()
        else:
            return None
        if time.monotonic() >= deadline:
            raise StoreError(f"{self.path}: eviction did not make room before the deadline")
        return freed_bytes

    def _evict(self, file: ObjectFile, size_bytes: int) -> int:
        """Remove an object; return its bytes, 0 if it was missing. Raises OSError."""
        self._usage.begin()
        try:
            self._unlink(file)
        except FileNotFoundError:
            return 0
        except OSError:
            # The object is no longer in the order; the next use of the usage file reads it again.
            self._usage.distrust()
            raise
        self._usage.add(-size_bytes)
        self.counts.evicted += 1
        self._note_removed(file)
        return size_bytes

    def _drop_corrupt(self, file: ObjectFile) -> None:
        self.counts.corrupt += 1
        with contextlib.suppress(OSError):
            self._unlink(file)
        with self._order_lock:
            self._order.discard(file)
        self._usage.distrust()
        self._note_removed(file)

    def _note_removed(self, file: ObjectFile) -> None:
        if self.removed is not None:
            with contextlib.suppress(ValueError):
                self.removed.append(file.name())

    def _touch(self, file: ObjectFile, modified_at: float) -> None:
        """Record a use of a file with this modification time."""
        if time.time() - modified_at > _TOUCH_S:
            with contextlib.suppress(OSError):
                self._space(file).touch(file.key)
        with self._order_lock:
            # Read the clock after ``utime``: for ``_evict_next``, a later modification time is
            # another process's use.
            self._order.use(file, time.time())

    # Eviction order.

    def _scan(self) -> int:
        """Rebuild the eviction order; return the bytes of all parts and objects.

        Removes corrupt objects and abandoned parts. Raises OSError if the files cannot be counted.
        """
        folders = self._opened()
        found: list[tuple[ObjectFile, int, float, float]] = []
        used = 0
        for part in itertools.chain.from_iterable(folders.parts.batches()):
            if is_abandoned(folders.parts, part.name):
                with contextlib.suppress(FileNotFoundError):
                    folders.parts.unlink(part.name)
            used += _bytes_now(part)
        for space in itertools.chain.from_iterable(folders.objects.batches()):
            try:
                folder = folders.objects.folder(space.name)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                # A foreign file, a link or a folder that others can change. It uses bytes of the
                # budget; the store leaves it alone.
                used += _bytes_now(space)
                continue
            for entry in self._read_ahead(folder):
                file = ObjectFile(space.name, entry.name)
                try:
                    state, cost = self._inspect(folder, file)
                except CorruptObjectError:
                    self.counts.corrupt += 1
                    with contextlib.suppress(OSError):
                        folder.unlink(entry.name)
                    used += _bytes_now(entry)
                    self._note_removed(file)
                except FileNotFoundError:
                    # A reader has removed it as corrupt.
                    continue
                else:
                    used += allocated(state.st_size)
                    found.append((file, allocated(state.st_size), cost, state.st_mtime))
        found.sort(key=itemgetter(3))
        # Modification times are exact to _TOUCH_S only (``_touch``).
        periods = [list(used) for _, used in itertools.groupby(found, key=lambda item: item[3] // _TOUCH_S)]
        with self._order_lock:
            self._order = EvictionOrder()
            self._order.add_used(periods)
        self._scanned_at = time.monotonic()
        return used

    def _read_ahead(self, folder: OpenFolder) -> Iterator[os.DirEntry[str]]:
        """Yield a folder's entries; request many headers before the first one is inspected.

        A disk can then read them in parallel.
        """
        for batch in folder.batches():
            for entry in batch:
                self.files.read_ahead(folder, entry.name)
            yield from batch

    def _inspect(self, folder: OpenFolder, file: ObjectFile) -> tuple[os.stat_result, float]:
        """Return the stat result and recompute cost, in nanoseconds, of an object of any model.

        The cost is 0 if the file cannot be read or has the format of another release. Raises
        CorruptObjectError if it is not a regular file or its header fails a check, and OSError if
        it is missing or has no readable state.
        """
        try:
            head, state = self.files.head(folder, file.key)
        except FileNotFoundError:
            raise
        except OSError:
            # An unreadable file still uses bytes of the budget.
            return folder.stat(file.key), 0.0
        try:
            header = parse_header(head, state.st_size)
        except CorruptObjectError:
            # An object of another release is not corrupt, but unusable here.
            if is_other_format(head):
                return state, 0.0
            raise
        if (header.name.space.hex(), header.name.key.hex()) != file:
            raise CorruptObjectError("the file contains another object: it was moved or copied here")
        return state, header.cost_ns


def _bytes_now(entry: os.DirEntry[str]) -> int:
    """Return the bytes of the budget that a file uses; 0 if it is missing. Raises OSError."""
    try:
        return allocated(entry.stat(follow_symlinks=False).st_size)
    except FileNotFoundError:
        return 0
