"""A tier on real files: stored objects are read, all else is a miss, and the budget holds."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.errors import ConfigurationError, CorruptObjectError, StoreError
from connectors.store.tiers import folder
from connectors.store.tiers.files import DIGEST_BYTES, PIECE_BYTES, Files
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.open_folder import OpenFolder
from tests.campaigns.store.world import held
from tests.store.folder_objects import BLOCK, disk_bytes, file_of, holds, name, payload, soon, write


@pytest.fixture
def tier(tmp_path: Path) -> FolderTier:
    made = FolderTier(tmp_path / "store", 100 * BLOCK, durable=False)
    made.open()
    return made


def flipped(data: bytearray, at: int) -> bytearray:
    data[at] ^= 1
    return data


FIRST, SECOND = (slice(DIGEST_BYTES + n * PIECE_BYTES, DIGEST_BYTES + (n + 1) * PIECE_BYTES) for n in (0, 1))
LONG = 2 * PIECE_BYTES + 10
DAMAGES: dict[str, Callable[[bytearray], bytes | bytearray]] = {
    "digest": lambda data: flipped(data, 5),
    **{
        f"byte {at}": lambda data, at=at: flipped(data, DIGEST_BYTES + at)  # type: ignore[misc]
        for at in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES, LONG - 1)
    },
    "pieces swapped": lambda data: data[:DIGEST_BYTES] + data[SECOND] + data[FIRST] + data[-10:],
    "cut after a piece": lambda data: data[: SECOND.start],
    "truncated": lambda data: data[:-7],
    "extended": lambda data: data + b"\0",
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", [*DAMAGES, "another object", "another size"])
def test_a_damaged_object_is_never_read(tmp_path: Path, damage: str) -> None:
    """A corrupt object is removed, counted, and stored again later. The digest is computed piece by
    piece while the object is read.
    """
    tier = FolderTier(tmp_path / "store", 10 << 20, durable=False)
    for number in (1, 2):
        write(tier, number, size=LONG)
    path, other = file_of(tier, 1), file_of(tier, 2)
    data = bytearray(path.read_bytes())
    damages = DAMAGES | {"another object": lambda _: other.read_bytes(), "another size": bytes}
    path.write_bytes(damages[damage](data))
    with pytest.raises(CorruptObjectError):
        tier.read(name(1), memoryview(bytearray(LONG + (damage == "another size"))))
    assert tier.corrupt == 1
    assert not path.exists()
    assert write(tier, 1, size=LONG)
    assert holds(tier, 1, LONG)
    assert holds(tier, 2, LONG)
    assert tier.used_bytes(soon()) == disk_bytes(tier)


# ---- the budget --------------------------------------------------------------------------------


def test_the_budget_is_never_exceeded(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path / "store", 10 * BLOCK, durable=False)
    for number in range(50):
        write(tier, number)
        assert disk_bytes(tier) <= tier.budget_bytes
        assert tier.used_bytes(soon()) == disk_bytes(tier)
    assert stored(tier, 50) == list(range(40, 50))
    with pytest.raises(StoreError, match="exceed the budget"):
        write(tier, 99, size=11 * BLOCK)


def test_an_object_cut_after_its_count_frees_what_is_left(tmp_path: Path) -> None:
    """Another process has counted the files since."""
    first, second = (FolderTier(tmp_path / "store", 10 * BLOCK, durable=False) for _ in range(2))
    write(first, 0, size=4 * BLOCK, end_token=100)  # the first to be evicted
    os.truncate(file_of(first, 0), 100)
    used(first, 0, seconds_ago=3600)
    for number in range(1, 9):
        write(second, number)
    for number in range(9, 13):
        write(first, number)
        assert disk_bytes(first) <= first.budget_bytes


def used(tier: FolderTier, number: int, seconds_ago: float) -> None:
    os.utime(file_of(tier, number), (time.time() - seconds_ago, time.time() - seconds_ago))


def stored(tier: FolderTier, among: int) -> list[int]:
    return [number for number in range(among) if file_of(tier, number).exists()]


def test_the_least_recently_used_objects_go_first(tmp_path: Path) -> None:
    """Uses survive a restart, and count if another engine makes them after this one has started."""
    one, other = (FolderTier(tmp_path, 6 * BLOCK, durable=False) for _ in range(2))
    for number in range(6):
        write(one, number)
        used(one, number, 3600 - 60 * number)
    assert other.open() == 6
    for number in (0, 2):
        assert holds(one, number)
    for number, kept in enumerate([[0, 2, 3, 4, 5], [0, 2, 4, 5], [0, 2, 5], [0, 2]], 6):
        assert write(other, number)
        assert stored(other, 6) == kept
    assert other.evicted == 4
    assert other.used_bytes(soon()) == disk_bytes(other) == 6 * BLOCK


def test_a_prompt_loses_its_last_objects_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_PERIOD_NS", 3600 * 10**9)  # or the prompt could be stored in two periods
    tier = FolderTier(tmp_path, 4 * BLOCK, durable=False)
    for number in range(4):
        write(tier, number, end_token=256 * (number + 1))
    for number in (4, 5):
        write(tier, number, end_token=512)
    # Of the earlier prompt, then of both.
    assert stored(tier, 6) == [0, 1, 4, 5]


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_objects_from_before_the_clock_was_set_back_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    """By modification time alone, each new object would be the oldest."""
    tier, now_ns = FolderTier(tmp_path, 8 * BLOCK, durable=False), time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now_ns() + 3600 * 10**9)
        for number in range(8):
            write(tier, number)
    if restart:
        tier = FolderTier(tmp_path, 8 * BLOCK, durable=False)
    assert holds(tier, 0), "a use after the correction counts"
    for number in range(8, 15):
        write(tier, number)
    assert stored(tier, 15) == [0, *range(8, 15)]
    for number in range(15, 38):
        write(tier, number)
    assert stored(tier, 38) == list(range(30, 38))


def test_an_object_that_cannot_be_removed_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, it is immutable. It uses its part of the budget."""
    tier = FolderTier(tmp_path, 4 * BLOCK, durable=False)
    for number in range(4):
        write(tier, number)
        used(tier, number, 3600 - 60 * number)
    tier = FolderTier(tmp_path, 4 * BLOCK, durable=False)
    unlink = OpenFolder.unlink

    def refuse(folder: OpenFolder, key: str) -> None:
        if key == name(0).key.hex():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(folder, key)

    monkeypatch.setattr(OpenFolder, "unlink", refuse)
    for number in range(4, 10):
        assert write(tier, number)
    assert stored(tier, 10) == [0, 7, 8, 9]
    assert tier.used_bytes(soon()) == disk_bytes(tier)
    assert len(caplog.records) == 1


class FullDisk(Files):
    """A disk with room for a number of objects, less than the tier's budget."""

    def __init__(self, folder: Path, objects: int) -> None:
        self._folder, self._bytes = folder, objects * BLOCK

    def create(self, folder: OpenFolder, name: str, size_bytes: int) -> int:
        used = sum(each.stat().st_size for each in (self._folder / "objects").glob("*/*"))
        if used + size_bytes > self._bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(folder, name, size_bytes)


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
        with pytest.raises(OSError, match="No space left"):
            write(tier, number)
    assert stored(tier, 6) == [1, 2]
    assert tier.used_bytes(soon()) == disk_bytes(tier)
    tier.files = Files()
    assert write(tier, 3)
    assert holds(tier, 3)


# ---- the usage file ----------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"garbage", bytes(40), bytes(range(40, 80))], ids=repr)
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


class Breaks(Files):
    """A write raises an unexpected error, or the usage file cannot be written after ``create``."""

    def __init__(self, where: str) -> None:
        self.where = where

    def create(self, folder: OpenFolder, name: str, size_bytes: int) -> int:
        fd, pwrite = super().create(folder, name, size_bytes), os.pwrite

        def fail(*arguments: Any) -> int:
            os.pwrite = pwrite
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        if self.where == "usage":
            os.pwrite = fail
        return fd

    def write(self, *arguments: Any) -> None:
        raise ValueError("broken")


@pytest.mark.parametrize("where", ["write", "usage"])
def test_a_failed_store_leaves_nothing(tier: FolderTier, where: str) -> None:
    write(tier, 1)
    gc.collect()  # folders of earlier tests close with their last reference
    descriptors = len(os.listdir("/proc/self/fd"))
    tier.files = Breaks(where)
    with pytest.raises((ValueError, OSError), match=r"broken|Input/output error"):
        write(tier, 2)
    assert list((tier.path / "parts").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert tier.used_bytes(soon()) == disk_bytes(tier) == BLOCK
    tier.files = Files()
    assert write(tier, 2)
    assert holds(tier, 2)


def test_nothing_is_written_below_the_mount_point_of_an_unmounted_disk(tier: FolderTier) -> None:
    write(tier, 1)
    tier.path.rename(tier.path.with_name("elsewhere"))
    assert holds(tier, 1)
    with pytest.raises(FileNotFoundError):
        write(tier, 2)
    tier.path.mkdir()
    with pytest.raises(StoreError, match="replaced or unmounted"):
        write(tier, 2)
    assert list(tier.path.iterdir()) == []


def test_foreign_files_among_the_models_are_left_alone(tier: FolderTier) -> None:
    """The folder that contains one folder per model also contains a file and a link."""
    write(tier, 1)
    (tier.path / "objects/README").touch()
    (tier.path / "objects/link").symlink_to(tier.path.parent / "precious")
    (tier.path.parent / "precious").mkdir()
    (tier.path.parent / "precious/file").touch()
    again = FolderTier(tier.path, tier.budget_bytes, durable=False)
    assert again.open() == 1
    assert write(again, 2)
    assert holds(again, 1)
    assert (tier.path / "objects/README").exists()
    assert (tier.path.parent / "precious/file").exists()


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
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        FolderTier(tmp_path / "file" / "store", BLOCK)


def test_only_the_engines_user_may_write_below_the_folder(tmp_path: Path) -> None:
    """Digests do not authenticate objects, and a container may run without a umask."""
    umask = os.umask(0)
    try:
        assert write(FolderTier(tmp_path, 10 * BLOCK, durable=False), 1)
    finally:
        os.umask(umask)
    assert [path.name for path in tmp_path.rglob("*") if path.stat().st_mode & 0o022] == []


# ---- several processes -------------------------------------------------------------------------


def test_two_processes_may_start_on_a_new_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = OpenFolder.entries

    def list_while_another_starts(folder: OpenFolder) -> Iterator[os.DirEntry[str]]:
        monkeypatch.undo()
        FolderTier(Path(folder.path), 2**20)
        return entries(folder)

    monkeypatch.setattr(OpenFolder, "entries", list_while_another_starts)
    FolderTier(tmp_path / "new", 2**20)


def test_two_writers_of_one_object_count_it_once(tier: FolderTier) -> None:
    """A process that starts removes files of dead writers, and no others."""

    class Overtaken(Files):
        def write(self, *arguments: Any) -> None:
            super().write(*arguments)
            assert write(FolderTier(tier.path, tier.budget_bytes, durable=False), 1)

    (tier.path / "parts" / "dead").touch()
    tier.files = Overtaken()
    assert not write(tier, 1)
    assert tier.used_bytes(soon()) == disk_bytes(tier) == BLOCK
    assert list((tier.path / "parts").iterdir()) == []


def test_a_writer_that_stops_with_the_lock_costs_others_their_deadline_only(tier: FolderTier) -> None:
    write(tier, 1)
    with held(tier.path):
        with pytest.raises(StoreError, match="another process holds the store's lock"):
            tier.write(name(2), payload(2), time.monotonic() + 0.05)
        assert holds(tier, 1)
    assert write(tier, 2)
