"""A fetch ends with the longest prefix of verified objects, whatever fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.store.fetch import Fetch
from connectors.store.planning.chunks import StorePlan, plan_store
from connectors.store.planning.prefix import ObjectRef, needed_objects, possible_objects, usable_prefix
from connectors.store.service import KVStore
from connectors.store.tiers.staging import Staging
from tests.store.groups import group, sliding, state
from tests.store.memory_tiers import LIMITS, MemoryTier, fetched, lanes, memory_store, name

PLAN = plan_store((group(0, 16), sliding(1, 16, 100), state(2)), 128, 4096)
PAGE = 4096
SIZES = {0: 3 * PAGE, 1: PAGE, 2: PAGE}
ALL = [ObjectRef(end, index) for end in (128, 256, 384) for index in range(3)]
NEEDED = [ref for ref in ALL if ref.group == 0 or ref.end_token == 384]
FULL = [ref for ref in ALL if ref.group == 0]

Make = Callable[..., KVStore]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    stagings: list[Staging] = []

    def made(*tiers: MemoryTier, pages: int = 64, plan: StorePlan = PLAN, **limits: float | bool) -> KVStore:
        stagings.append(Staging(pages * PAGE, tmp_path))
        chosen = LIMITS.model_copy(update=limits)
        return memory_store(monkeypatch, stagings[-1], plan, SIZES, *tiers, settings=chosen)

    yield made
    for staging in stagings:
        staging.close()


def begun(store: KVStore, start: int = 0, limit: int = 500, beside: bool = False) -> Fetch:
    names = {ref: name(ref) for ref in possible_objects(store.plan, 0, limit)}
    return Fetch(store, names, start, limit, beside)


def ended(fetch: Fetch, store: KVStore) -> tuple[int, set[ObjectRef]]:
    """Return the end and the objects of a fetch; free its slots, and check that none is left."""
    found = fetched(fetch).end_token, set(fetch.offsets)
    fetch.close()
    store.sweep()
    assert not store.running
    assert store.staging.used_bytes == 0
    return found


@pytest.mark.parametrize(
    ("start", "limit", "beside", "broken", "end", "offsets"),
    [
        (0, 500, False, [], 384, NEEDED),
        (256, 500, False, [], 384, [ref for ref in ALL if ref.end_token == 384]),
        (0, 127, False, [], 0, []),
        # The transfer brings the window and the state of the prompt's end.
        (0, 500, True, [], 384, FULL),
        (0, 500, True, [ObjectRef(384, 0)], 256, FULL[:2]),
        # The fetch falls back to the earlier state, and reads the objects for it.
        (0, 500, False, [ObjectRef(384, 2)], 256, [*FULL[:2], ObjectRef(256, 1), ObjectRef(256, 2)]),
        (0, 500, False, [ObjectRef(128, 0)], 0, []),
    ],
)
def test_the_longest_prefix_of_readable_objects(
    make: Make, start: int, limit: int, beside: bool, broken: list[ObjectRef], end: int, offsets: list[ObjectRef]
) -> None:
    tier = MemoryTier("disk", ALL, broken)
    store = make(tier)
    fetch = begun(store, start, limit, beside)
    assert ended(fetch, store) == (end, set(offsets))
    assert len(tier.reads) == len(set(tier.reads)), "each object is read once"
    assert fetch.present.isdisjoint(broken)
    assert store.counts["store_problems", "failed_load"] == len(broken)
    assert store.counts["store_tokens", "hit"] == end - start
    assert store.counts["store_tokens", "miss"] == limit - end


@pytest.mark.parametrize(("pages", "end"), [(11, 384), (10, 256), (7, 128), (4, 0)])
def test_objects_that_do_not_fit_into_staging_are_not_read(make: Make, pages: int, end: int) -> None:
    tier = MemoryTier("disk", ALL)
    store = make(tier, pages=pages)
    assert ended(begun(store), store)[0] == end
    assert store.counts["store_problems", "no_staging_for_load"] == (end < 384)
    assert len(tier.reads) == end // 128 + 2 * bool(end)


def test_a_fetch_that_is_late_uses_what_it_has(make: Make) -> None:
    store = make(MemoryTier("disk", ALL))
    (reads,) = lanes(store, "reads", held=True)
    fetch = begun(store)
    assert not fetch.poll()
    reads.run(2)
    assert not fetch.poll()
    store.settings = LIMITS.model_copy(update={"load_s": 1e-9})
    assert fetched(fetch).end_token == 0, "the window and the state are missing"
    assert fetch.present == set(ALL), "nothing is stored again"
    assert [store.costs.patience_s({"disk": 1}, other_s) for other_s in (1e-12, 1e9)] == [0.0, 1e9], "a rate"
    assert store.counts["store_problems", "late_load"] == 1
    assert ended(fetch, store) == (0, set())


@pytest.mark.parametrize("ends", ["hangs", "load_s", "stops", "closed"])
def test_a_queued_read_that_is_given_up_frees_its_slot_at_once(make: Make, ends: str) -> None:
    store = make(MemoryTier("disk", ALL))
    (reads,) = lanes(store, "reads", held=True)
    fetch = begun(store)
    assert not fetch.poll()
    running = reads._queue.popleft()  # noqa: SLF001 - a thread has taken it
    running.started = True
    limits = {"hangs": {"lookup_s": 1e-9}, "load_s": {"load_s": 1e-9}}
    if ends == "closed":
        fetch.close()
    elif ends == "stops":
        fetch._patience_s = 0.0  # noqa: SLF001 - the alternative would have ended
        assert fetch.poll()
    else:
        store.settings = LIMITS.model_copy(update=limits[ends])
        assert fetch.poll()
    assert store.staging.used_bytes == SIZES[0], "its thread may still write to it"
    fetch.close()
    running.ok = True
    reads._end(running)  # noqa: SLF001
    store.sweep()
    assert store.staging.used_bytes == 0
    assert not store.running


def test_progress_of_a_tier_counts_for_its_queued_reads(make: Make) -> None:
    store = make(MemoryTier("disk", ALL), lookup_s=0.5)
    (reads,) = lanes(store, "reads", held=True)
    fetch = begun(store)
    assert not fetch.poll()
    fetch._read_at -= 1.0  # noqa: SLF001
    reads._queue[-1].progress()  # noqa: SLF001
    assert not fetch.poll(), "a slow disk is waited for"
    reads.progress_at -= 1.0
    for call in reads._queue:  # noqa: SLF001
        call.progress_at = 0.0
    assert fetch.poll(), "a hanging one is not"


def test_a_long_lookup_leaves_reads_their_time(make: Make) -> None:
    store = make(MemoryTier("disk", ALL), lookup_s=5.0)
    (lookups,), (reads,) = lanes(store, "lookups", held=True), lanes(store, "reads", held=True)
    fetch = begun(store)
    lookups.run()
    [(call, _)] = fetch._lookups  # noqa: SLF001
    assert call is not None
    call.seconds = 5.0
    assert not fetch.poll()
    assert not fetch.poll()
    reads.run()
    assert ended(fetch, store)[0] == 384


def test_lookups_without_an_answer_are_misses(make: Make) -> None:
    store = make(MemoryTier("memory", ALL), MemoryTier("disk", ALL))
    memory, disk = lanes(store, "lookups", held=True)
    fetch = begun(store)
    disk.run()
    assert not fetch.poll(), "memory is faster, and may have the objects too"
    store.settings = LIMITS.model_copy(update={"lookup_s": 1e-9})
    assert fetched(fetch).tier == "disk"
    assert fetch.end_token == 384
    assert store.counts["store_problems", "late_lookup"] == 1
    memory.run()
    assert ended(fetch, store)[0] == 384
    late = make(MemoryTier("disk", ALL), lookup_s=1e-9)
    assert ended(begun(late), late)[0] == 0, "its thread stops to look"
    assert late.counts["store_problems", "late_lookup"] == 1


def test_an_object_that_the_fastest_tier_cannot_read_is_read_from_the_next(make: Make) -> None:
    """The slower tier's objects are then copied to the faster one."""
    memory, disk = MemoryTier("memory", ALL, NEEDED), MemoryTier("disk", ALL)
    memory.objects -= {name(ref) for ref in FULL[:1]}
    store = make(memory, disk)
    fetch = begun(store)
    assert fetched(fetch).end_token == 384
    assert fetch.tier == "disk"
    assert store.counts["store_problems", "failed_load"] == len(NEEDED) - 1
    ended(fetch, store)
    assert name(FULL[0]) in memory.objects


@pytest.mark.parametrize("beside", [False, True], ids=["compute", "transfer"])
def test_a_load_is_declined_after_the_lookups_if_it_takes_longer(make: Make, beside: bool) -> None:
    memory, disk = MemoryTier("memory", FULL[:1]), MemoryTier("disk", ALL)
    store = make(memory, disk)
    for label in ("memory", "disk"):
        store.costs.read(label, 1, 1.0)
    store.costs.transferred(1 << 40, 1.0)
    store.costs.computed(1000, 0, 1e-3)
    fetch = begun(store, beside=beside)
    assert fetched(fetch).declined
    assert fetch.present == {FULL[0]}, "others are worth a copy in the fastest tier"
    assert ended(fetch, store) == (0, set())
    assert not memory.reads
    assert not disk.reads
    counted = {key: number for key, number in store.totals().items() if number}
    assert counted == {("store_requests", "declined"): 1, ("store_tokens", "miss"): 500}
    queued = begun(store, beside=beside)
    assert any(queued.poll(queued=True) for _ in range(9)), "waiting costs nothing"
    assert queued.end_token == 384
    queued.close()


def test_an_operator_may_prefer_loads_to_computation(make: Make) -> None:
    store = make(MemoryTier("disk", ALL), always_load=True)
    store.costs.read("disk", 1, 1.0)
    store.costs.computed(1000, 0, 1e-3)
    assert ended(begun(store), store)[0] == 384
    store.costs.transferred(1 << 40, 1.0)
    assert ended(begun(store, beside=True), store)[0] == 0, "a transfer computes nothing here"


PLANS = (
    PLAN,
    plan_store((group(0, 16), group(1, 16)), 128, 4096),
    plan_store((group(0, 96, row_tokens=32), sliding(1, 16, 300)), 64, 4096),
    plan_store((state(0), group(1, 1056)), 256, 4096),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.sampled_from(PLANS), tokens=st.integers(0, 1500), blocks=st.integers(0, 1), data=st.data())
def test_whatever_fails_the_end_rests_on_verified_objects(
    make: Make, plan: StorePlan, tokens: int, blocks: int, data: st.DataObject
) -> None:
    start = min(blocks * 192, tokens)
    present = {ref for ref in possible_objects(plan, start, tokens) if data.draw(st.integers(0, 5))}
    broken = {ref for ref in present if not data.draw(st.integers(0, 5))}
    store = make(MemoryTier("disk", present, broken), plan=plan, pages=1024)
    fetch = begun(store, start, tokens)
    assert fetched(fetch).end_token == usable_prefix(plan, present - broken, start, tokens)
    assert set(fetch.offsets) == set(needed_objects(plan, start, fetch.end_token))
    ended(fetch, store)
    store.staging.close()
