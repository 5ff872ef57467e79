"""One engine's store on files and threads: hits by tier, slow and hanging disks, and leftovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from connectors.store import service
from connectors.store.fetch import Fetch
from connectors.store.keys.names import ObjectName
from connectors.store.planning.prefix import ObjectRef
from connectors.store.service import KVStore
from connectors.store.settings import StoreSettings
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.lanes import Lane
from connectors.store.tiers.staging import Staging
from tests.campaigns.store import campaign
from tests.campaigns.store.world import DISK_BUDGET, SIZES, SPACE, FaultyFiles, content, store_plan
from tests.store.test_fetch import ALL, FULL

NAMES = {ref: ObjectName(SPACE, bytes([ref.group]) * 28 + ref.end_token.to_bytes(4, "big")) for ref in ALL}
LIMITS = StoreSettings(lookup_s=60.0, load_s=60.0, store_s=60.0)


class Host:
    """Stores over one disk path and one memory path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stores: list[KVStore] = []

    def start(self, files: FaultyFiles | None = None, staging: int = 1 << 20, **limits: float) -> KVStore:
        tiers = [
            FolderTier(self.root / "memory", DISK_BUDGET, durable=False, label="memory"),
            FolderTier(self.root / "disk", DISK_BUDGET, durable=True, files=files, label="disk"),
        ]
        (self.root / "shm").mkdir(exist_ok=True)
        chosen = LIMITS.model_copy(update=limits)
        store = KVStore(store_plan(), SPACE, SIZES, tiers, Staging(staging, self.root / "shm"), chosen)
        self.stores.append(store)
        return store

    def forget_memory(self) -> None:
        for path in (self.root / "memory" / "objects").glob("*/*"):
            path.unlink()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(service, "_READ_THREADS", 1)
    monkeypatch.setattr(service, "_WRITE_THREADS", 1)
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
        until(store.idle)
        put(store, ref, NAMES[ref])
    until(store.idle)


def put(store: KVStore, ref: ObjectRef, name: ObjectName) -> bool:
    offset = store.reserve(ref)
    if offset is not None:
        store.staging.view(offset, SIZES[ref.group])[:] = content(name, SIZES[ref.group])
        store.commit(ref, name, offset)
    return offset is not None


def fetched(store: KVStore, beside: bool = False) -> Fetch:
    fetch = Fetch(store, NAMES, 0, 500, beside)
    until(fetch.poll)
    return fetch


def left(store: KVStore) -> int:
    until(store.idle)
    return store.staging.used_bytes


@pytest.mark.parametrize("calls", [("find", "read"), ("read",)])
def test_a_disk_that_hangs_costs_the_lookup_deadline_and_then_nothing(host: Host, calls: tuple[str, ...]) -> None:
    """While a disk hangs, the store reads from memory.

    The hanging thread returns with the disk, and only then is its slot free.
    """
    save(host.start(), *ALL)
    files = FaultyFiles()
    # Longer than a busy machine keeps a thread of the suite from running; ``load_s`` is an hour.
    store = host.start(files, lookup_s=5.0, load_s=3600.0)
    files.hang(*calls)
    fetch = fetched(store)
    assert fetch.end_token == 384, "memory has all objects"
    fetch.close()
    host.forget_memory()
    fetch = fetched(store)
    assert fetch.end_token == 0
    fetch.close()
    assert store.counts["store_problems", "late_load"] == (calls == ("read",))
    files.heal()
    assert left(store) == 0


def stored(store: KVStore, tier: int) -> int:
    return len(list((store.tiers[tier].folder.path / "objects").glob("*/*")))


def test_stores_use_half_of_the_staging_memory(host: Host) -> None:
    store, small = host.start(staging=4 * 12288), host.start(staging=12288)
    assert [store.reserve(ref) is None for ref in FULL] == [False, False, True]
    assert [small.reserve(ref) is None for ref in FULL] == [False, True, True]


def test_a_hanging_disk_leaves_staging_to_loads_from_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued writes end at their deadline, although no thread is free to take them; others are
    dropped at once. Memory has all objects.
    """
    monkeypatch.setattr(service, "_QUEUED_WRITES", 2)
    save(host.start(), *ALL)
    files = FaultyFiles()
    store = host.start(files, staging=12 * 12288, store_s=1.0)
    until(store.idle)
    files.hang("write")
    for number in range(32):
        assert put(store, FULL[0], ObjectName(SPACE, bytes([9]) * 31 + bytes([number])))
        until(partial(lambda count: stored(store, 0) == count, len(ALL) + number + 1))
    until(lambda: files.waiting == 1)
    until(lambda: not store.idle() and store.staging.used_bytes <= 12288)
    fetch = fetched(store)
    assert (fetch.end_token, fetch.tier) == (384, "memory")
    fetch.close()
    files.heal()
    assert left(store) == 0
    problems = sum(number for (counter, _), number in store.counts.items() if counter == "store_problems")
    assert stored(store, 1) - len(ALL) + problems == 32


# ---- lanes -------------------------------------------------------------------------------------


def test_a_lane_is_bounded_and_refuses_while_it_hangs() -> None:
    lane, release = Lane("test", 1, 2), threading.Event()

    def wait(_: object) -> None:
        release.wait()

    hanging = lane.submit(wait, time.monotonic() + 60)
    assert hanging is not None
    until(lambda: hanging.started)
    assert lane.accepts
    hanging.deadline = time.monotonic()
    until(lambda: not lane.accepts)
    assert lane.submit(wait, time.monotonic() + 9) is None
    release.set()
    until(lambda: hanging.over)
    until(lambda: lane.accepts)
    late = lane.submit(lambda _: None, time.monotonic() - 1)
    failing = lane.submit(lambda _: 1 // 0, time.monotonic() + 9)
    assert late is not None
    assert failing is not None
    until(lambda: late.over and failing.over)
    assert not late.started, "its deadline had passed"
    assert not failing.ok
    release.clear()
    running = lane.submit(wait, time.monotonic() + 9)
    assert running is not None
    until(lambda: running.started)
    queued = [lane.submit(lambda _: None, time.monotonic() + 9) for _ in range(3)]
    assert [call is None for call in queued] == [False, False, True]
    assert queued[0] is not None
    for call in (queued[0], running):
        lane.cancel(call)
    assert queued[0].over
    assert not running.over, "no thread can interrupt the call"
    lane.close()
    assert all(call is None or call.over for call in queued)
    release.set()
    until(lambda: running.over)
    assert not lane.idle
    lane.sweep()
    assert lane.idle


# ---- the campaign ------------------------------------------------------------------------------


class ConstantDigest:
    def update(self, content: object) -> None: ...

    def digest(self) -> bytes:
        return bytes(16)


@pytest.mark.parametrize("checks", [True, False])
def test_a_cut_of_the_fault_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: bool) -> None:
    """Forty faults. The campaign finds a store that does not check its payloads."""
    if not checks:
        monkeypatch.setattr("connectors.store.tiers.folder.digest_of", lambda _: ConstantDigest())
    outcome = campaign.run(tmp_path, tmp_path, seed=2, faults=40, without=frozenset({"killed_process"}))
    assert all("is not what was stored" in problem for problem in outcome.problems), outcome
    assert bool(outcome.problems) != checks
    assert outcome.hit_tokens > 0
