"""One engine's store: hits by tier, deadlines, bounded queues, and leftovers after each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from connectors.errors import ConfigurationError, StoreError
from connectors.store import fetches, service, writer
from connectors.store.fetches import Fetched
from connectors.store.planning.prefix import ObjectRef, possible_objects
from connectors.store.service import KVStore
from connectors.store.tier_threads import StoreLimits
from connectors.store.tiers import lanes, reads, slot_calls
from connectors.store.tiers.files import PIECE_BYTES
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.lanes import CallState, Lane
from connectors.store.tiers.objects import ObjectName
from connectors.store.tiers.open_folder import OpenFolder
from connectors.store.tiers.staging import AttachedStaging, Staging, StagingLocation
from tests.campaigns.store import campaign
from tests.campaigns.store.faults import extend
from tests.campaigns.store.world import DISK_BUDGET, SIZES, SPACES, FaultyFiles, World, content, store_plan
from tests.store.test_fetch import ALL, NEEDED_384

NAMES = {ref: ObjectName(SPACES[0], bytes([ref.group]) * 28 + ref.end_token.to_bytes(4, "big")) for ref in ALL}
LIMITS = StoreLimits(lookup_s=60.0, load_s=60.0, store_s=60.0, queue_objects=4, read_threads=1, write_threads=1)


class Host:
    """Stores over one disk path and one memory path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stores: list[KVStore] = []

    def start(self, limits: StoreLimits = LIMITS, files: FaultyFiles | None = None, staging: int = 1 << 20) -> KVStore:
        tiers = [
            FolderTier(self.root / "memory", DISK_BUDGET, durable=False, label="memory"),
            FolderTier(self.root / "disk", DISK_BUDGET, durable=True, files=files, label="disk"),
        ]
        (self.root / "shm").mkdir(exist_ok=True)
        store = KVStore(store_plan(), SPACES[0], SIZES, tiers, Staging(staging, self.root / "shm"), limits)
        self.stores.append(store)
        return store


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    for store in made.stores:
        store.close()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.001)


def save(store: KVStore, *refs: ObjectRef) -> None:
    for ref in refs:
        until(lambda: store.idle())
        offset = store.writer.reserve(ref)
        assert offset is not None
        store.staging.view(offset, SIZES[ref.group])[:] = content(NAMES[ref], SIZES[ref.group])
        store.writer.commit(ref, NAMES[ref], offset, 1000)
    until(store.idle)


def fetch(store: KVStore, limit: int = 500) -> Fetched:
    store.fetches.begin("request", NAMES, 0, limit)
    found: list[Fetched] = []

    def done() -> bool:
        answer = store.fetches.poll("request")
        found.extend([answer] if answer else [])
        return bool(found)

    until(done)
    return found[0]


def test_what_could_not_be_read_for_want_of_room_measures_nothing(host: Host) -> None:
    save(host.start(), *ALL)
    store = host.start()
    while store.staging.take(SIZES[0]) is not None:
        continue
    decisions: list[int] = []

    def accept(start_token: int, end_token: int, sizes: Mapping[str, int]) -> bool:
        decisions.append(end_token)
        return True

    store.fetches.begin("request", NAMES, 0, 500, accept=accept)
    until(lambda: store.fetches.poll("request") is not None)
    fetched = store.fetches.poll("request")
    assert fetched is not None
    assert (fetched.end_token, fetched.reads) == (0, {})
    assert not decisions, "there is nothing to decide"


def test_a_load_is_decided_after_the_lookups(host: Host) -> None:
    """The caller sees the tokens and the bytes of each tier. Nothing is read if it declines."""
    save(host.start(), *ALL)
    store = host.start()
    decisions: list[tuple[int, int, dict[str, int]]] = []

    def accept(start_token: int, end_token: int, sizes: Mapping[str, int]) -> bool:
        decisions.append((start_token, end_token, dict(sizes)))
        return False

    store.fetches.begin("request", NAMES, 0, 500, accept=accept)
    until(lambda: store.fetches.poll("request") is not None)
    fetched = store.fetches.poll("request")
    assert fetched is not None
    assert decisions == [(0, 384, {"memory": sum(SIZES[ref.group] for ref in NEEDED_384)})]
    assert (fetched.end_token, fetched.declined, fetched.reads) == (0, True, {})
    assert store.counts == {"misses": 1, "declined": 1, "missed_tokens": 500}
    assert store.totals()["store_requests"] == {"hit": 0, "miss": 0, "declined": 1}
    assert store.staging.used_bytes == 0


def test_a_declined_load_from_disk_lets_the_objects_be_stored_in_memory(host: Host) -> None:
    save(host.start(), *ALL)
    for path in (host.root / "memory" / "objects").glob("*/*"):
        path.unlink()
    store = host.start()
    store.fetches.begin("request", NAMES, 0, 500, accept=lambda start_token, end_token, sizes: False)
    until(lambda: store.fetches.poll("request") is not None)
    fetched = store.fetches.poll("request")
    assert fetched is not None
    assert fetched.present == frozenset()


def test_a_stored_prefix_is_loaded_by_another_engine(host: Host) -> None:
    save(host.start(), *ALL)
    store = host.start()
    fetched = fetch(store)
    assert fetched.end_token == 384
    assert set(fetched.offsets) == set(NEEDED_384)
    for ref, offset in fetched.offsets.items():
        assert bytes(store.staging.view(offset, SIZES[ref.group])) == content(NAMES[ref], SIZES[ref.group])
    store.fetches.end("request")
    until(store.idle)
    assert store.staging.used_bytes == 0
    assert store.counts == {"hits": 1, "hit_tokens": 384, "missed_tokens": 500 - 384}
    totals = store.totals()
    assert totals["store_tokens"] == {"hit": 384, "miss": 116}
    size = sum(SIZES[ref.group] for ref in NEEDED_384)
    assert totals["store_loaded_bytes"] == {"memory": size, "disk": 0}
    assert totals["store_loaded_seconds"]["memory"] > 0
    assert totals["store_stored_bytes"] == {"memory": 0, "disk": 0}
    assert not any(totals["store_problems"].values())


@pytest.mark.parametrize(("delay_s", "lookup_s", "tier"), [(0.2, 60.0, "memory"), (60.0, 10.0, "disk")])
def test_the_fastest_tier_is_read_within_the_deadline_of_lookups(
    host: Host, monkeypatch: pytest.MonkeyPatch, delay_s: float, lookup_s: float, tier: str
) -> None:
    """Disk answers first; memory, which has the objects too, later or too late."""
    save(host.start(), *ALL)
    find_all, over = FolderTier.find_all, threading.Event()

    def find_later(folder: FolderTier, names: Sequence[ObjectName]) -> list[bool]:
        if folder.label == "memory":
            over.wait(delay_s)
        return find_all(folder, names)

    monkeypatch.setattr(FolderTier, "find_all", find_later)
    fetched = fetch(host.start(replace(LIMITS, lookup_s=lookup_s, load_s=60.0)))
    over.set()
    assert fetched.end_token == 384
    assert fetched.tier == tier


def test_lookups_behind_a_slow_one_are_counted_as_late(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next poll comes after the lane has dropped the calls whose deadline has passed."""
    monkeypatch.setattr("connectors.store.fetches._LOOKUPS_PER_CALL", 1)
    save(host.start(), *ALL)
    find_all = FolderTier.find_all

    def find_slowly(folder: FolderTier, names: Sequence[ObjectName]) -> list[bool]:
        time.sleep(0.3)
        return find_all(folder, names)

    monkeypatch.setattr(FolderTier, "find_all", find_slowly)
    store = host.start(replace(LIMITS, lookup_s=0.2, load_s=60.0))
    store.fetches.begin("request", NAMES, 0, 500)
    until(lambda: not any(tier.lookups.pending for tier in store.fetches._tiers))  # noqa: SLF001
    assert store.fetches.poll("request") is not None
    assert store.counts["late_lookups"] >= 2 * len(ALL) - 2
    store.fetches.end("request")
    until(store.idle)


def test_objects_without_a_name_are_missing(host: Host) -> None:
    """A group that is stored whole may need an object that ends after the prompt."""
    save(host.start(), *ALL)
    store = host.start()
    store.fetches.begin("request", {ref: name for ref, name in NAMES.items() if ref.end_token < 384}, 0, 500)
    until(lambda: store.fetches.poll("request") is not None)
    fetched = store.fetches.poll("request")
    assert fetched is not None
    assert fetched.end_token == 256


def test_what_disk_held_is_in_memory_afterwards(host: Host) -> None:
    save(host.start(), *ALL)
    for path in (host.root / "memory" / "objects").glob("*/*"):
        path.unlink()
    store = host.start(replace(LIMITS, queue_objects=64))
    assert fetch(store).end_token == 384
    store.fetches.end("request")
    until(store.idle)
    assert len(list((host.root / "memory" / "objects").glob("*/*"))) == len(NEEDED_384)


def test_a_corrupt_object_in_memory_is_read_from_disk(host: Host) -> None:
    save(host.start(), *ALL)
    for path in (host.root / "memory" / "objects").glob("*/*"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    store = host.start()
    store.fetches.begin("request", NAMES, 0, 500)
    until(lambda: all(tier.counts.hits == len(ALL) for tier in store.tiers))
    # Both lookups have answered: memory is read first.
    time.sleep(0.05)
    until(lambda: store.fetches.poll("request") is not None)
    fetched = store.fetches.poll("request")
    assert fetched is not None
    assert fetched.end_token == 384
    assert store.counts["failed_reads"] == len(NEEDED_384)


def test_a_disk_that_hangs_costs_the_lookup_deadline_and_then_nothing(host: Host) -> None:
    """While a disk hangs, the store reads from memory.

    The hanging thread returns with the disk, and only then is its slot free.
    """
    first = host.start()
    save(first, *ALL)
    files = FaultyFiles()
    # Longer than a busy machine keeps a thread of the suite from running.
    store = host.start(StoreLimits(lookup_s=10.0, load_s=60.0, read_threads=1), files)
    files.hang("head", "read")
    assert fetch(store).end_token == 384, "memory has all objects"
    store.fetches.end("request")
    for path in (host.root / "memory" / "objects").glob("*/*"):
        path.unlink()
    assert fetch(store).end_token == 0
    store.fetches.end("request")
    files.heal()
    until(store.idle)
    assert store.staging.used_bytes == 0


def test_a_disk_that_hangs_in_a_read_costs_the_lookup_deadline(host: Host) -> None:
    """The lookup finds the objects, and their reads return no byte. ``load_s`` is an hour."""
    save(host.start(), *ALL)
    for path in (host.root / "memory" / "objects").glob("*/*"):
        path.unlink()
    files = FaultyFiles()
    # Longer than a busy machine keeps a thread of the suite from running: the lookup must answer.
    store = host.start(StoreLimits(lookup_s=10.0, load_s=3600.0, read_threads=1), files)
    files.hang("read")
    assert fetch(store).end_token == 0
    assert store.counts["late"] == 1
    store.fetches.end("request")
    files.heal()
    until(store.idle)
    assert store.staging.used_bytes == 0


class SlowFiles(FaultyFiles):
    """Files that return each object in four pieces, with a pause before each on the clock of the
    store.

    That clock stands still otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = time.monotonic()
        self._reader = 0
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += threading.get_ident() != self._reader
        return self.now

    def read(
        self, folder: OpenFolder, name: str, payload: memoryview, piece_read: Callable[[memoryview], None]
    ) -> tuple[bytes, os.stat_result, int]:
        self._reader = threading.get_ident()
        for _ in range(4):
            self.now += 0.2
            looks = self._looks
            until(lambda: self._looks > looks)  # noqa: B023 - ends before the next piece
            piece_read(payload[:0])
        return super().read(folder, name, payload, piece_read)


def test_a_disk_that_is_slow_but_does_not_hang_is_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each object takes longer than ``lookup_s``, and no piece of it does."""
    files = SlowFiles()
    save(host.start(), *refs_of_group(0)[:1])
    for path in (host.root / "memory" / "objects").glob("*/*"):
        path.unlink()
    for module in (fetches, lanes, reads, service, slot_calls, writer):
        monkeypatch.setattr(module, "time", files)
    store = host.start(StoreLimits(lookup_s=0.7, load_s=3600.0, read_threads=1), files)
    store.fetches.begin("request", NAMES, 0, 500, full_attention_only=True)
    until(lambda: store.fetches.poll("request") is not None)
    fetched = store.fetches.poll("request")
    assert fetched is not None
    assert fetched.end_token == 128


def test_a_large_object_is_read_in_pieces(tmp_path: Path) -> None:
    pieces: list[int] = []
    tier = FolderTier(tmp_path / "disk", 1 << 30)
    name, data = ObjectName(SPACES[0], bytes(32)), memoryview(os.urandom(2 * PIECE_BYTES + 5))
    assert tier.write(name, data, 1, time.monotonic() + 10)
    into = memoryview(bytearray(len(data)))
    tier.read(name, into, lambda: pieces.append(1))
    assert into == data
    assert len(pieces) == 3
    tier.close()


def test_a_store_whose_disk_hangs_in_a_write_is_closed(host: Host) -> None:
    """The writing thread holds the usage file's lock."""
    files = FaultyFiles()
    store = host.start(files=files)
    until(store.idle)
    files.hang("publish")
    offset = store.writer.reserve(ALL[0])
    assert offset is not None
    store.writer.commit(ALL[0], NAMES[ALL[0]], offset, 1000)
    until(lambda: files.waiting == 1)
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(60)
    ended = not closing.is_alive()
    files.heal()
    assert ended


def test_a_read_that_comes_late_keeps_its_memory_until_then(host: Host) -> None:
    save(host.start(), *ALL)
    for path in (host.root / "memory" / "objects").glob("*/*"):
        path.unlink()
    files = FaultyFiles()
    store = host.start(StoreLimits(lookup_s=60.0, load_s=60.0, read_threads=1), files)
    files.hang("read")
    store.fetches.begin("request", NAMES, 0, 500)
    until(lambda: store.fetches.poll("request") is None and files.waiting == 1)
    store.fetches.end("request")
    assert store.staging.used_bytes > 0, "a thread may still write to it"
    files.heal()
    until(store.idle)
    assert store.staging.used_bytes == 0


def test_a_fetch_that_is_stopped_returns_what_it_has_verified(host: Host) -> None:
    """Beside a transfer: the caller waits for no read that hangs."""
    save(host.start(), *ALL)
    # In memory is the first chunk; the disk hangs before it reads the others.
    for path in (host.root / "memory" / "objects").glob("*/*"):
        if path.name != NAMES[ObjectRef(128, 0)].key.hex():
            path.unlink()
    files = FaultyFiles()
    store = host.start(StoreLimits(lookup_s=60.0, load_s=60.0, read_threads=1), files)
    files.hang("read")
    store.fetches.begin("request", NAMES, 0, 500, full_attention_only=True)
    until(lambda: store.fetches.poll("request") is None and store.tiers[0].counts.loaded_bytes > 0)
    until(lambda: store.fetches.poll("request") is None and store.fetches.idle_s("request") >= 0.02)
    store.fetches.stop("request")
    fetched = store.fetches.poll("request")
    assert fetched is not None
    assert fetched.end_token == 128
    assert set(fetched.offsets) == {ObjectRef(128, 0)}
    # Each tier is measured on its own: the disk's reads had not ended.
    (read, memory_s), (not_read, disk_s) = fetched.reads["memory"], fetched.reads["disk"]
    assert (read, not_read) == (SIZES[0], 0)
    assert 0 < memory_s < disk_s
    store.fetches.end("request")
    files.heal()
    until(store.idle)
    assert store.staging.used_bytes == 0


def stored_in_memory(store: KVStore, count: int) -> bool:
    return store.tiers[0].counts.stored == count


def test_a_slow_disk_drops_stores_and_never_waits(host: Host) -> None:
    files = FaultyFiles()
    store = host.start(files=files)
    until(store.idle)
    files.hang("write")
    for number, ref in enumerate(ALL):
        offset = store.writer.reserve(ref)
        assert offset is not None
        store.staging.view(offset, SIZES[ref.group])[:] = content(NAMES[ref], SIZES[ref.group])
        store.writer.commit(ref, NAMES[ref], offset, 1000)
        until(partial(stored_in_memory, store, number + 1))
    files.heal()
    until(store.idle)
    # One was being written, four were queued, and the other four were dropped. Memory has all.
    assert store.tiers[1].counts.stored == 5
    assert store.staging.used_bytes == 0
    assert fetch(store).end_token == 384


def test_without_staging_memory_stores_drop_and_loads_miss(host: Host) -> None:
    save(host.start(), *ALL)
    store = host.start(staging=3 * 12288)
    taken = [store.staging.take(12288) for _ in range(3)]
    assert None not in taken
    assert store.writer.reserve(ObjectRef(128, 0)) is None
    assert fetch(store).end_token == 0
    assert store.counts["no_room_to_load"] > 0
    for offset in taken:
        assert offset is not None
        store.staging.give_back(offset)
    assert store.staging.used_bytes == 0


def test_stores_use_half_of_the_staging_memory(host: Host) -> None:
    """Stores that wait for a slow tier leave room for loads; one object always has room."""
    store = host.start(staging=4 * 12288)
    offsets = [store.writer.reserve(ref) for ref in refs_of_group(0)]
    assert [offset is None for offset in offsets] == [False, False, True]
    small = host.start(staging=12288)
    offsets += [small.writer.reserve(ref) for ref in refs_of_group(0)]
    assert [offset is None for offset in offsets[3:]] == [False, True, True]


EIGHT = {
    ref: ObjectName(SPACES[0], bytes([ref.group]) * 28 + ref.end_token.to_bytes(4, "big"))
    for ref in possible_objects(store_plan(), 0, 1100)
}


def fetch_eight(store: KVStore) -> Fetched:
    store.fetches.begin("request", EIGHT, 0, 1100)
    until(lambda: store.fetches.poll("request") is not None)
    fetched = store.fetches.poll("request")
    assert fetched is not None
    return fetched


def save_eight(store: KVStore) -> None:
    for ref, name in EIGHT.items():
        until(store.idle)
        offset = store.writer.reserve(ref)
        assert offset is not None
        store.staging.view(offset, SIZES[ref.group])[:] = content(name, SIZES[ref.group])
        store.writer.commit(ref, name, offset, 1000)
    until(store.idle)


def test_a_hanging_disk_leaves_staging_to_loads_from_memory(host: Host) -> None:
    """Queued writes end at their deadline, although no thread is free to take them."""
    save_eight(host.start())
    files = FaultyFiles()
    limits = StoreLimits(lookup_s=60.0, load_s=60.0, store_s=1.0, write_threads=1)
    store = host.start(limits, files, staging=12 * 12288)
    until(store.idle)
    files.hang("write")
    for number in range(32):
        offset = store.writer.reserve(ObjectRef(128, 0))
        if offset is not None:
            name = ObjectName(SPACES[0], bytes([9]) * 31 + bytes([number]))
            store.writer.commit(ObjectRef(128, 0), name, offset, 1000)
    until(lambda: files.waiting == 1)
    until(lambda: not store.idle() and store.staging.used_bytes <= 12288)
    fetched = fetch_eight(store)
    assert fetched.end_token == 1024
    assert fetched.tier == "memory"
    store.fetches.end("request")
    files.heal()
    until(store.idle)
    assert store.staging.used_bytes == 0
    disk = store.tiers[1].counts
    assert disk.stored + disk.failed_stores + store.counts["dropped_stores"] == 32


@pytest.mark.parametrize("ends", ["at its deadline", "with its request"])
def test_an_ended_fetch_keeps_no_slots_of_queued_reads(host: Host, ends: str) -> None:
    """Only the read that hangs keeps its slot."""
    save_eight(host.start())
    for path in (host.root / "memory" / "objects").glob("*/*"):
        path.unlink()
    files = FaultyFiles()
    store = host.start(StoreLimits(lookup_s=5.0, load_s=6.0, read_threads=1), files)
    files.hang("read")
    store.fetches.begin("request", EIGHT, 0, 1100)
    until(lambda: store.fetches.poll("request") is not None or files.waiting == 1)
    if ends == "at its deadline":
        until(lambda: store.fetches.poll("request") is not None)
    else:
        store.fetches.end("request")
    assert 0 < store.staging.used_bytes <= 12288
    store.fetches.end("request")
    files.heal()
    until(store.idle)
    assert store.staging.used_bytes == 0


@pytest.mark.parametrize("chunks", range(1, 9))
def test_staging_for_some_chunks_loads_as_many(host: Host, chunks: int) -> None:
    """Each resume point needs a window and a state of its own, 4096 bytes of staging each."""
    save_eight(host.start())
    store = host.start(staging=chunks * 12288 + 2 * 4096)
    fetched = fetch_eight(store)
    assert fetched.end_token == chunks * 128
    assert store.counts["no_room_to_load"] == (chunks < 8)
    store.fetches.end("request")
    until(store.idle)
    assert store.staging.used_bytes == 0


def test_a_corrupt_state_costs_one_chunk_of_full_staging(host: Host) -> None:
    """The slot of the chunk that is no longer needed has room for the earlier window and state."""
    save_eight(host.start())
    for tier in ("memory", "disk"):
        path = host.root / tier / "objects" / SPACES[0].hex() / EIGHT[ObjectRef(1024, 2)].key.hex()
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    store = host.start(staging=8 * 12288 + 2 * 4096)
    fetched = fetch_eight(store)
    assert fetched.end_token == 7 * 128


def refs_of_group(index: int) -> list[ObjectRef]:
    return [ref for ref in ALL if ref.group == index]


# ---- lanes and staging -------------------------------------------------------------------------


def test_a_lane_is_bounded_and_refuses_while_it_hangs() -> None:
    lane, release = Lane("test", 1, 2), threading.Event()
    hanging = lane.submit(release.wait, time.monotonic() + 60)
    assert hanging is not None
    until(lambda: hanging.state is CallState.RUNNING)
    assert not lane.hangs
    hanging.deadline = time.monotonic()
    until(lambda: lane.hangs)
    assert lane.submit(lambda: None, time.monotonic() + 9) is None
    release.set()
    until(lambda: hanging.over)
    until(lambda: not lane.hangs)
    late = lane.submit(lambda: None, time.monotonic() - 1)
    assert late is not None
    until(lambda: late.over)
    assert late.state is CallState.FAILED, "its deadline had passed"
    failing = lane.submit(lambda: 1 // 0, time.monotonic() + 9)
    assert failing is not None
    until(lambda: failing.over)
    assert failing.state is CallState.FAILED
    release.clear()
    running = lane.submit(release.wait, time.monotonic() + 9)
    assert running is not None
    until(lambda: running.state is CallState.RUNNING)
    queued = [lane.submit(lambda: None, time.monotonic() + 9) for _ in range(3)]
    assert [call is None for call in queued] == [False, False, True]
    assert queued[0] is not None
    for call in (queued[0], running):
        lane.cancel(call)
    assert queued[0].state is CallState.FAILED
    assert running.state is CallState.RUNNING, "no thread can interrupt the call"
    assert lane.pending == 2
    lane.close()
    assert all(call is None or call.state is CallState.FAILED for call in queued)
    release.set()


def test_staging_is_dealt_out_and_merged_again(tmp_path: Path) -> None:
    staging = Staging(4 * 4096, tmp_path)
    slots = [staging.take(size) for size in (1, 4096, 4097)]
    assert slots == [0, 4096, 8192]
    assert staging.take(1) is None
    staging.share(4096)
    staging.give_back(4096)
    assert staging.take(1) is None, "it has another user"
    for offset in (0, 8192, 4096):
        staging.give_back(offset)
    assert staging.take(4 * 4096) == 0
    with pytest.raises(ConfigurationError, match="must be at least one page"):
        Staging(100, tmp_path)


def test_workers_see_the_staging_memory_of_their_engine(tmp_path: Path) -> None:
    staging = Staging(4096, tmp_path)
    attached = AttachedStaging(staging.location)
    staging.view(100, 3)[:] = b"abc"
    assert bytes(attached.view(100, 3)) == b"abc"
    staging.close()
    with pytest.raises(StoreError, match="user and in the pid namespace"):
        AttachedStaging(staging.location)


def test_workers_do_not_map_another_file(tmp_path: Path) -> None:
    """The path leads to another file if the descriptor's number has been reused, and on another
    host, where another process may have the scheduler's pid.
    """
    first, second = Staging(4096, tmp_path), Staging(4096, tmp_path)
    number = int(Path(first.location.path).name)
    first.close()
    os.dup2(int(Path(second.location.path).name), number)
    try:
        with pytest.raises(StoreError, match="is another file"):
            AttachedStaging(first.location)
    finally:
        os.close(number)
    elsewhere = ("another host", *second.location.identity[1:])
    with pytest.raises(StoreError, match="is another file"):
        AttachedStaging(StagingLocation(second.location.path, elsewhere))
    second.close()


def test_a_killed_engine_leaves_no_staging_file(tmp_path: Path) -> None:
    script = """
import json
import sys
from pathlib import Path
from connectors.store.tiers.staging import Staging
staging = Staging(4096, Path(sys.argv[1]))
staging.view(0, 3)[:] = b"abc"
print(json.dumps([staging.location.path, staging.location.identity]), flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=pipe, stdout=pipe, text=True) as engine:
        assert engine.stdout is not None
        path, identity = json.loads(engine.stdout.readline())
        attached = AttachedStaging(StagingLocation(path, tuple(identity)))
        engine.kill()
    assert bytes(attached.view(0, 3)) == b"abc"
    assert os.listdir(tmp_path) == []


# ---- the campaign ------------------------------------------------------------------------------


def test_a_cut_of_the_fault_campaign(tmp_path: Path) -> None:
    """Forty faults; `make store-faults` runs ten thousand."""
    outcome = campaign.run(tmp_path, tmp_path, seed=2, faults=40, without=frozenset({"killed_process"}))
    assert outcome.right, outcome
    assert outcome.hit_tokens > 0
    assert outcome.counts["corrupt"] > 0


def test_the_campaign_finds_a_store_that_does_not_check_its_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.store.tiers.folder.check_payload", lambda *_: None)
    outcome = campaign.run(tmp_path, tmp_path, seed=2, faults=40, without=frozenset({"killed_process"}))
    assert outcome.wrong


def test_files_that_the_campaign_extends_many_times_fit_into_the_budget(tmp_path: Path) -> None:
    world = World(tmp_path, tmp_path, seed=1)
    for turn in range(40):
        world.ask(turn % 2)
    for _ in range(40):
        extend(world)
        world.check_budget()
    world.close()
    assert world.outcome.right, world.outcome
