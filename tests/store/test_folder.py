"""A tier on real files: stored objects are read, all else is a miss, and the budget holds."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from connectors.errors import ConfigurationError, CorruptObjectError, StoreError
from connectors.store.tiers import folder
from connectors.store.tiers.files import PIECE_BYTES, Files
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.objects import HEADER_BYTES
from connectors.store.tiers.open_folder import OpenFolder
from tests.store.folder_objects import (
    BLOCK,
    OTHER_SPACE,
    PAYLOAD,
    disk_bytes,
    file_of,
    holds,
    name,
    payload,
    soon,
    write,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tier(tmp_path: Path) -> FolderTier:
    made = FolderTier(tmp_path / "store", 100 * BLOCK, durable=False)
    made.open()
    return made


def test_what_is_stored_is_read(tier: FolderTier) -> None:
    for number, size in enumerate((1, 63, 4096, 100_000)):
        assert write(tier, number, size=size)
        assert holds(tier, number, size)
    assert not write(tier, 0, size=1), "the object already exists"
    assert not holds(tier, 99)
    assert tier.used_bytes(soon()) == disk_bytes(tier)


def test_objects_survive_their_process(tier: FolderTier) -> None:
    """Another process, or the same after kill -9, reads the same path."""
    write(tier, 1)
    again = FolderTier(tier.path, tier.budget_bytes)
    assert holds(again, 1), "before the index is read"
    assert again.open() == 1


def test_another_model_at_the_same_path_sees_nothing(tier: FolderTier) -> None:
    write(tier, 1)
    assert tier.find(name(1, OTHER_SPACE)) is None
    # Nor does it if files are copied over.
    copied = file_of(tier, 1, OTHER_SPACE)
    copied.parent.mkdir()
    copied.write_bytes(file_of(tier, 1).read_bytes())
    assert tier.find(name(1, OTHER_SPACE)) is None
    assert holds(tier, 1)


@pytest.mark.parametrize(
    "damage", ["flip header", "flip payload", "truncate", "extend", "empty", "swap", "pipe", "link"]
)
def test_a_damaged_object_is_never_read(tier: FolderTier, damage: str) -> None:
    """A corrupt object is removed, counted, and stored again later."""
    write(tier, 1)
    write(tier, 2)
    path = file_of(tier, 1)
    data = bytearray(path.read_bytes())
    match damage:
        case "flip header":
            data[50] ^= 1
        case "flip payload":
            data[-1] ^= 128
        case "truncate":
            del data[-7:]
        case "extend":
            data += b"\0"
        case "empty":
            data.clear()
        case "swap":
            data[:] = file_of(tier, 2).read_bytes()
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    elif damage == "link":
        path.symlink_to(file_of(tier, 2))
    else:
        path.write_bytes(data)
    into = memoryview(bytearray(PAYLOAD))
    with pytest.raises(StoreError):
        tier.read(name(1), into)
    assert tier.counts.corrupt == 1
    assert not path.exists()
    assert write(tier, 1)
    assert holds(tier, 1)
    assert holds(tier, 2)


@pytest.mark.parametrize("at", [0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 9, "swap", "cut"])
def test_damage_in_any_piece_is_found(tmp_path: Path, at: int | str) -> None:
    """The digest is computed piece by piece while the object is read."""
    tier, size = FolderTier(tmp_path / "store", 10 << 20, durable=False), 2 * PIECE_BYTES + 10
    write(tier, 1, size=size)
    assert holds(tier, 1, size)
    path = file_of(tier, 1)
    data = bytearray(path.read_bytes())
    match at:
        case "swap":
            first, second = (
                slice(HEADER_BYTES + n * PIECE_BYTES, HEADER_BYTES + (n + 1) * PIECE_BYTES) for n in (0, 1)
            )
            data[first], data[second] = data[second], data[first]
        case "cut":
            del data[HEADER_BYTES + PIECE_BYTES :]
        case int():
            data[HEADER_BYTES + at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptObjectError):
        tier.read(name(1), memoryview(bytearray(size)))
    assert not path.exists()


def test_headers_are_checked_at_lookup(tier: FolderTier) -> None:
    write(tier, 1)
    data = bytearray(file_of(tier, 1).read_bytes())
    data[30] ^= 4
    file_of(tier, 1).write_bytes(data)
    assert tier.find(name(1)) is None
    assert not file_of(tier, 1).exists()


def test_a_payload_of_another_size_is_refused(tier: FolderTier) -> None:
    write(tier, 1, size=100)
    with pytest.raises(CorruptObjectError, match="100 bytes"):
        tier.read(name(1), memoryview(bytearray(99)))


# ---- the budget --------------------------------------------------------------------------------


def test_the_budget_is_never_exceeded(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path / "store", 10 * BLOCK, durable=False)
    for number in range(50):
        write(tier, number)
        assert disk_bytes(tier) <= tier.budget_bytes
        assert tier.used_bytes(soon()) == disk_bytes(tier)
    # With equal costs the least recently used have gone.
    assert [number for number in range(50) if holds(tier, number)] == list(range(40, 50))
    with pytest.raises(StoreError, match="exceed the budget"):
        write(tier, 99, size=11 * BLOCK)


class FullDisk(Files):
    """A disk with room for a number of objects, less than the tier's budget."""

    def __init__(self, folder: Path, objects: int) -> None:
        self._folder, self._bytes = folder, objects * BLOCK

    def create(self, folder: OpenFolder, name: str, size_bytes: int) -> int:
        used = sum(each.stat().st_size for each in (self._folder / "objects").glob("*/*"))
        if used + size_bytes > self._bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(folder, name, size_bytes)


def test_new_objects_replace_old_ones_on_a_full_disk(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, 100 * BLOCK, files=FullDisk(tmp_path, 4))
    tier.open()
    assert all(write(tier, number) for number in range(10))
    assert [number for number in range(10) if holds(tier, number)] == [6, 7, 8, 9]
    assert tier.counts.evicted == 6
    assert tier.used_bytes(soon()) == disk_bytes(tier) == 4 * BLOCK


def test_a_full_disk_evicts_objects_of_other_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine has read the index before the first one has filled the disk."""
    monkeypatch.setattr(folder, "_RESCAN_S", 0.0)
    one, other = (FolderTier(tmp_path, 100 * BLOCK, files=FullDisk(tmp_path, 4)) for _ in range(2))
    one.open()
    other.open()
    assert all(write(one, number) for number in range(4))
    assert write(other, 4)
    assert sum(holds(other, number) for number in range(4)) == 3
    assert holds(other, 4)
    assert other.used_bytes(soon()) == disk_bytes(other) == 4 * BLOCK


def test_a_disk_full_of_other_files_keeps_most_objects(tmp_path: Path) -> None:
    """Each store would evict an object and still have no room."""
    tier = FolderTier(tmp_path, 100 * BLOCK)
    tier.open()
    assert all(write(tier, number) for number in range(3))
    tier.files = FullDisk(tmp_path, 0)
    for number in (3, 4, 5):
        with pytest.raises(StoreError, match="No space left"):
            write(tier, number)
    assert [number for number in range(6) if holds(tier, number)] == [1, 2]
    assert tier.used_bytes(soon()) == disk_bytes(tier)
    tier.files = Files()
    assert write(tier, 3)
    assert holds(tier, 3)


def test_a_budget_that_shrank_is_kept_after_a_restart(tmp_path: Path) -> None:
    first = FolderTier(tmp_path / "store", 20 * BLOCK, durable=False)
    for number in range(20):
        write(first, number)
    second = FolderTier(tmp_path / "store", 5 * BLOCK, durable=False)
    assert second.open() == 20
    write(second, 100)
    assert disk_bytes(second) <= 5 * BLOCK
    assert holds(second, 100)


# ---- the usage file ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"garbage", bytes(40), bytes(range(40, 80))], ids=["empty", "short", "zeros", "other"]
)
def test_a_damaged_usage_file_is_counted_again(tier: FolderTier, data: bytes) -> None:
    for number in range(5):
        write(tier, number)
    (tier.path / "usage").write_bytes(data)
    assert tier.used_bytes(soon()) == disk_bytes(tier) == 5 * BLOCK


def test_an_old_usage_file_is_corrected_by_the_next_start(tier: FolderTier) -> None:
    """The usage file has a wrong number with the right digest, as after a restore from a backup."""
    old = (tier.path / "usage").read_bytes()
    for number in range(5):
        write(tier, number)
    (tier.path / "usage").write_bytes(old)
    assert tier.used_bytes(soon()) == 0
    again = FolderTier(tier.path, tier.budget_bytes)
    again.open()
    assert again.used_bytes(soon()) == 5 * BLOCK


def test_a_usage_file_that_vanished_is_made_anew(tier: FolderTier) -> None:
    write(tier, 1)
    (tier.path / "usage").unlink()
    assert write(tier, 2)
    assert tier.used_bytes(soon()) == 2 * BLOCK


def test_a_closed_tier_opens_nothing_again(tier: FolderTier) -> None:
    """Threads that return from a hanging disk find their tier closed.

    The campaign found leaked descriptors.
    """
    write(tier, 1)
    gc.collect()  # folders of earlier tests close with their last reference
    descriptors = len(os.listdir("/proc/self/fd"))
    tier.close()
    with pytest.raises(StoreError, match="the store is closed"):
        write(tier, 2)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3


def test_a_disk_that_fails_costs_only_the_store(tier: FolderTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: OpenFolder, name: str, create: bool) -> OpenFolder:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(OpenFolder, "folder", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            write(tier, 1)
    assert tier.counts.failed_stores == 1
    assert write(tier, 1)


class Broken(Files):
    """File operations whose write raises an error that the package does not expect."""

    def write(self, fd: int, header: bytes, payload: memoryview, sync: bool) -> None:
        raise ValueError("broken")


def test_an_unexpected_error_of_a_store_is_counted_and_leaves_nothing(tier: FolderTier) -> None:
    """The thread that runs the call logs the error (``lanes.py``)."""
    tier.files = Broken()
    with pytest.raises(ValueError, match="broken"):
        write(tier, 1)
    assert tier.counts.failed_stores == 1
    assert list((tier.path / "parts").iterdir()) == []
    assert tier.used_bytes(soon()) == 0
    tier.files = Files()
    assert write(tier, 1)
    assert holds(tier, 1)


def test_nothing_is_written_below_the_mount_point_of_an_unmounted_disk(tier: FolderTier) -> None:
    """The descriptor still leads to the objects, whatever is at the path."""
    write(tier, 1)
    tier.path.rename(tier.path.with_name("elsewhere"))
    assert holds(tier, 1)
    with pytest.raises(StoreError):
        write(tier, 2)
    tier.path.mkdir()
    with pytest.raises(StoreError, match="replaced or unmounted"):
        write(tier, 2)
    assert list(tier.path.iterdir()) == []


class Vanishing(Files):
    """The folder disappears at the first read of a header: a disk is unmounted during the count."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def head(self, folder: OpenFolder, name: str) -> tuple[bytes, os.stat_result]:
        if self.folder.exists():
            self.folder.rename(self.folder.with_name("elsewhere"))
        return super().head(folder, name)


def test_a_count_of_files_that_vanish_meanwhile_is_not_believed(tier: FolderTier) -> None:
    """The usage file is on the disk as well: a wrong count of zero would persist when the disk
    returns.
    """
    for number in range(5):
        write(tier, number)
    again = FolderTier(tier.path, tier.budget_bytes, files=Vanishing(tier.path))
    with pytest.raises(StoreError):
        again.open()
    tier.path.with_name("elsewhere").rename(tier.path)
    assert tier.used_bytes(soon()) == 5 * BLOCK


def test_foreign_files_among_the_models_take_only_their_bytes(tier: FolderTier) -> None:
    """The folder that contains one folder per model also contains a file and links."""
    write(tier, 1)
    (tier.path / "objects/README").write_bytes(bytes(BLOCK))
    (tier.path / "objects/dangling").symlink_to("nowhere")
    (tier.path / "objects/link").symlink_to(tier.path.parent / "precious")
    (tier.path.parent / "precious").mkdir()
    (tier.path.parent / "precious/file").touch()
    again = FolderTier(tier.path, tier.budget_bytes, durable=False)
    assert again.open() == 1
    assert again.used_bytes(soon()) == 4 * BLOCK  # a link counts as one block
    assert write(again, 2)
    assert holds(again, 1)
    assert (tier.path / "objects/README").exists()
    assert (tier.path.parent / "precious/file").exists()


def test_an_object_behind_a_link_is_not_read(tier: FolderTier) -> None:
    write(tier, 1)
    space = file_of(tier, 1).parent
    space.rename(tier.path.parent / "space").chmod(0o777)
    assert tier.find(name(1)) is None, "the folder is missing"
    space.symlink_to(tier.path.parent / "space")
    assert tier.find(name(1)) is None
    with pytest.raises(StoreError, match="it is a link"):
        write(tier, 2)
    space.unlink()
    (tier.path.parent / "space").rename(space)
    assert tier.find(name(1)) is None, "all users may write to the folder"
    space.chmod(0o700)
    assert holds(tier, 1)


def test_a_folder_of_objects_that_is_removed_is_made_anew(tier: FolderTier) -> None:
    write(tier, 1)
    file_of(tier, 1).unlink()
    file_of(tier, 1).parent.rmdir()
    assert write(tier, 1)
    assert holds(tier, 1)


class Flickering(Files):
    """The folder is missing during each read of a header, and present again at the end of the
    count.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def head(self, folder: OpenFolder, name: str) -> tuple[bytes, os.stat_result]:
        away = self.folder.rename(self.folder.with_name("elsewhere"))
        try:
            return super().head(folder, name)
        finally:
            away.rename(self.folder)


def test_a_count_during_which_the_folder_was_away_is_complete(tier: FolderTier) -> None:
    for number in range(5):
        write(tier, number)
    again = FolderTier(tier.path, tier.budget_bytes, files=Flickering(tier.path))
    assert again.open() == 5
    assert tier.used_bytes(soon()) == 5 * BLOCK


def test_a_usage_file_that_vanishes_under_the_lock_does_not_open_the_lock(tier: FolderTier) -> None:
    """Without the lock, one process would count the files while another adds some."""
    again = FolderTier(tier.path, tier.budget_bytes)
    with tier._usage.locked(soon()):  # noqa: SLF001 - a critical section of a writer
        (tier.path / "usage").unlink()
        with pytest.raises(StoreError, match="another process holds the store's lock"):
            again.used_bytes(time.monotonic() + 0.05)
    assert write(again, 1)
    assert tier.used_bytes(soon()) == BLOCK


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigurationError, match=r"'thesis\.tex', which is not part of a store"):
        FolderTier(tmp_path, BLOCK)
    with pytest.raises(ConfigurationError, match="must be positive"):
        FolderTier(tmp_path / "store", 0)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match="all users of this host may write"):
        FolderTier(tmp_path / "open", BLOCK)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        FolderTier(tmp_path / "file" / "store", BLOCK)


def test_a_folder_of_the_engines_group_is_accepted(tmp_path: Path) -> None:
    """Kubernetes mounts a volume with an ``fsGroup`` like this."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o2775)
    assert write(FolderTier(tmp_path / "volume", 10 * BLOCK, durable=False), 1)


def test_only_the_engines_user_may_write_below_the_folder(tmp_path: Path) -> None:
    """Digests do not authenticate objects, and a container may run without a umask."""
    umask = os.umask(0)
    try:
        assert write(FolderTier(tmp_path, 10 * BLOCK, durable=False), 1)
    finally:
        os.umask(umask)
    assert [path.name for path in tmp_path.rglob("*") if path.stat().st_mode & 0o022] == []


# ---- several processes -------------------------------------------------------------------------

WRITER = """
import sys, time
from pathlib import Path
from connectors.store.tiers.folder import FolderTier
from tests.store.folder_objects import BLOCK, holds, write
tier = FolderTier(Path(sys.argv[1]), int(sys.argv[2]) * BLOCK, durable=False)
first, stop = int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
for turn in range(1000):
    for number in range(first, stop):
        write(tier, number)
        holds(tier, number)
"""


def start_writer(path: Path, budget_blocks: int, first: int, stop: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(budget_blocks), str(first), str(stop)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_may_start_on_a_new_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = OpenFolder.names

    def list_while_another_starts(folder: OpenFolder) -> list[str]:
        monkeypatch.undo()
        FolderTier(Path(folder.path), 2**20).close()
        return names(folder)

    monkeypatch.setattr(OpenFolder, "names", list_while_another_starts)
    FolderTier(tmp_path / "new", 2**20).close()


def test_processes_share_a_path_and_may_be_killed(tmp_path: Path) -> None:
    """Two writers of the same keys are killed during their work: the budget holds, and no parts
    remain.
    """
    path = tmp_path / "store"
    tier = FolderTier(path, 30 * BLOCK, durable=False)
    writers = [start_writer(path, 30, 0, 40), start_writer(path, 30, 20, 60)]
    try:
        for _ in range(100):
            assert disk_bytes_now(tier) <= 30 * BLOCK
        os.kill(writers[0].pid, signal.SIGKILL)
        writers[0].wait()
        for _ in range(20):
            assert disk_bytes_now(tier) <= 30 * BLOCK
    finally:
        for process in writers:
            process.kill()
            process.wait()
    again = FolderTier(path, 30 * BLOCK, durable=False)
    again.open()
    assert list((path / "parts").iterdir()) == []
    assert again.used_bytes(soon()) == disk_bytes(again)
    found = [number for number in range(60) if holds(again, number)]
    assert found
    assert again.counts.corrupt == 0
    assert write(again, 1000)


def disk_bytes_now(tier: FolderTier) -> int:
    """``disk_bytes`` locks, so that a file renamed by another process is not counted twice."""
    with tier._usage.locked(soon()):  # noqa: SLF001 - files hold still
        return disk_bytes(tier)


def test_a_writer_that_stops_with_the_lock_costs_others_their_deadline_only(tier: FolderTier) -> None:
    """Lookups and loads need no lock."""
    write(tier, 1)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); "
            "print('held', flush=True); time.sleep(600)",
            str(tier.path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(StoreError, match="another process holds the store's lock"):
            tier.write(name(2), payload(2), 1, time.monotonic() + 0.05)
        assert holds(tier, 1)
    finally:
        holder.kill()
        holder.wait()
    assert write(tier, 2), "the kernel has released the lock of a dead process"


def test_the_index_of_a_thousand_objects_is_read_quickly(tmp_path: Path) -> None:
    """All objects are found again, with their sizes; the store's campaign measures the time."""
    tier = FolderTier(tmp_path / "store", 2000 * BLOCK, durable=False)
    for number in range(1000):
        write(tier, number)
    again = FolderTier(tmp_path / "store", 2000 * BLOCK, durable=False)
    assert again.open() == 1000
    assert again.used_bytes(soon()) == 1000 * BLOCK


class Recorded(Files):
    """Files that record the calls which read headers, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def read_ahead(self, folder: OpenFolder, name: str) -> None:
        self.calls.append(("read_ahead", name))
        super().read_ahead(folder, name)

    def head(self, folder: OpenFolder, name: str) -> tuple[bytes, os.stat_result]:
        self.calls.append(("head", name))
        return super().head(folder, name)


def test_a_start_requests_many_headers_before_it_waits_for_one(tmp_path: Path) -> None:
    """The disk reads requested headers in parallel, several times as fast as one by one."""
    tier = FolderTier(tmp_path / "store", 300 * BLOCK, durable=False)
    for number in range(300):
        write(tier, number)
    files = Recorded()
    assert FolderTier(tier.path, tier.budget_bytes, files=files).open() == 300
    assert [call for call, _ in files.calls] == 256 * ["read_ahead"] + 256 * ["head"] + 44 * ["read_ahead"] + 44 * [
        "head"
    ]
    asked, read = ([key for call, key in files.calls if call == which] for which in ("read_ahead", "head"))
    assert asked == read
    assert len(set(read)) == 300
