"""Copies of a cache on a device equal those of host memory, and events order them.

The device is the CPU; what only a GPU shows is its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from connectors.errors import ConfigurationError, StoreError
from connectors.planning.descriptors import Runs, build_runs
from connectors.store import device_copies
from connectors.store.copying import copy_runs
from connectors.store.device_copies import DeviceCopies
from connectors.store.planning.chunks import plan_store
from connectors.store.planning.layout import object_bytes, plan_rank, prove_store
from connectors.store.planning.moves import load_moves, store_moves
from connectors.store.planning.prefix import completed_objects
from connectors.store.tiers.staging import AttachedStaging, Staging
from tests.planning.builders import Shape, make_engine
from tests.store.simulated_streams import RaceError, SimulatedDevice
from tests.store.test_moves import engines, tables

STAGING_BYTES = 1 << 20


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachedStaging]:
    made = Staging(STAGING_BYTES, tmp_path_factory.mktemp("staging"))
    yield AttachedStaging(made.location)
    made.close()


@pytest.fixture(scope="module", autouse=True)
def small_ring() -> Iterator[None]:
    """Batches and the ring are small, so that tests use each part of the ring many times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "_RING_BYTES", 1 << 14)
        patch.setattr(device_copies, "_BATCH_BYTES", 1 << 12)
        patch.setattr(device_copies, "_LONGEST_ROW", 1 << 11)
        yield


def contents(staging: AttachedStaging) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(staging.view(0, STAGING_BYTES), np.uint8)


def attached(staging: AttachedStaging, *buffers: np.ndarray[Any, np.dtype[np.uint8]]) -> DeviceCopies:
    copies = DeviceCopies([torch.from_numpy(buffer) for buffer in buffers])
    copies.attach(staging)
    return copies


@settings(max_examples=40, deadline=None)
@given(engines(), st.integers(1, 4), st.sampled_from([8, 16, 24]), st.integers(0, 2**32 - 1))
def test_a_device_copies_what_the_host_copies(
    staging: AttachedStaging, shapes: tuple[Shape, Shape], tp: int, chunk_tokens: int, seed: int
) -> None:
    """Objects have the same bytes, and blocks after a load, at any layout, TP and block size."""
    rng = np.random.default_rng(seed)
    engine, tokens = make_engine(shapes[0], tp), 2 * chunk_tokens
    try:
        plan = plan_store(engine[0].layout.groups, chunk_tokens, 4096)
    except ConfigurationError:
        reject()
    sizes = object_bytes(prove_store(plan, [rank.layout for rank in engine]))
    numbers = {spans.index: number for number, spans in enumerate(each for each in plan.groups if each.stored)}
    addresses, end = {}, staging.address
    for ref in completed_objects(plan, 0, tokens):
        addresses[ref] = end
        end += -(-sizes[numbers[ref.group]] // 64) * 64
    memory = contents(staging)
    memory[:] = 0
    table, target = tables(engine, rng, tokens), tables(engine, rng, tokens)
    stored = []
    for rank in engine:
        for buffer in rank.buffers:
            buffer[:] = rng.integers(0, 256, buffer.shape, np.uint8)
        stored.append(
            build_runs(plans := plan_rank(plan, rank.layout).store, store_moves(plan, plans, table, addresses))
        )
    for runs in stored:
        copy_runs(runs)
    expected = memory.copy()
    memory[:] = 0
    for rank, runs in zip(engine, stored, strict=True):
        attached(staging, *rank.buffers).store(runs)
    assert np.array_equal(memory, expected)
    for rank in engine:
        before = [buffer.copy() for buffer in rank.buffers]
        plans = plan_rank(plan, rank.layout).load
        runs = build_runs(plans, load_moves(plan, plans, target, 0, tokens, addresses))
        copy_runs(runs)
        loaded = [buffer.copy() for buffer in rank.buffers]
        for buffer, old in zip(rank.buffers, before, strict=True):
            buffer[:] = old
        attached(staging, *rank.buffers).load(runs)
        assert all(np.array_equal(*pair) for pair in zip(rank.buffers, loaded, strict=True))


def runs_between(
    rng: np.random.Generator, cache: np.ndarray[Any, np.dtype[np.uint8]], address: int, lengths: list[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return disjoint runs at odd places: addresses in the cache, in staging, and lengths."""
    places = rng.permutation(24)[:12]
    length = rng.choice(lengths, 12).astype(np.int64)
    odd = rng.integers(0, 8, 12) if lengths[0] % 8 else 0
    slot = 8192 + rng.permutation(24)[:12] * 6000
    return (cache.ctypes.data + places * 6000 + odd).astype(np.int64), (address + slot).astype(np.int64), length


@pytest.mark.parametrize("lengths", [[1, 7, 4999], [8, 512], [4096], [2048, 4096, 5000], [2, 6], [12]])
def test_runs_of_any_length_and_place(staging: AttachedStaging, lengths: list[int]) -> None:
    """Rows of bytes and of words, shorter and longer than a row of a batch, there and back."""
    rng = np.random.default_rng(len(lengths))
    cache = rng.integers(0, 256, 160_000, np.uint8)
    device, host, length = runs_between(rng, cache, staging.address, lengths)
    copies, memory, content = attached(staging, cache), contents(staging), cache.copy()
    memory[:] = 0
    copies.store(Runs(device, host, length))
    back = memory.copy()
    cache[:] = 0
    copies.load(Runs(host, device, length))
    expected, stored = np.zeros_like(cache), np.zeros_like(back)
    for at, to, size in zip(device - cache.ctypes.data, host - staging.address, length, strict=True):
        expected[at : at + size] = content[at : at + size]
        stored[to : to + size] = content[at : at + size]
    assert np.array_equal(cache, expected)
    assert np.array_equal(back, stored)


def random_steps(device: SimulatedDevice, staging: AttachedStaging, steps: int = 30) -> None:
    """Run steps of loads, a forward pass, and stores, as vLLM queues them.

    The forward pass reads and writes the whole cache. Once a mark has passed, the host uses the
    slots of its copies; until then they are not used again.
    """
    rng = np.random.default_rng(7)
    cache = np.zeros(160_000, np.uint8)
    with device:
        copies = attached(staging, cache)
        free, open_marks = list(range(24)), []
        everything = [(cache.ctypes.data, cache.ctypes.data + len(cache))]
        for _ in range(steps):
            slots = []
            for copy in (copies.load, copies.store):
                if copy == copies.store:
                    device.access(everything, True)
                chosen = [free.pop(int(rng.integers(len(free)))) for _ in range(min(len(free), 4))]
                host = staging.address + np.array(chosen, np.int64) * 6000
                blocks = cache.ctypes.data + rng.permutation(24)[: len(chosen)] * 6000
                ends = (host, blocks) if copy == copies.load else (blocks, host)
                copy(Runs(*ends, np.full(len(chosen), 4096)))
                slots += chosen
            open_marks.append((copies.mark(), slots))
            device.late = bool(rng.random() < 0.6)
            while open_marks and copies.passed(open_marks[0][0]):
                for slot in (used := open_marks.pop(0)[1]):
                    at = staging.address + slot * 6000
                    device.access([(at, at + 4096)], True, "host")
                free += used


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    made = SimulatedDevice()
    get: Callable[..., Any] = lambda *_: made  # noqa: E731
    monkeypatch.setattr(torch, "get_device_module", get)
    return made


def test_events_order_all_accesses(device: SimulatedDevice, staging: AttachedStaging) -> None:
    """Blocks, the ring and staging: forward passes, gathers, scatters, copies and the host."""
    random_steps(device, staging)
    streams = {access[3] for access in device.accesses}
    assert len(streams) == 4, "the compute stream, one for each direction, and the host"


def test_a_part_of_the_ring_waits_for_all_its_uses(device: SimulatedDevice, staging: AttachedStaging) -> None:
    """A small batch takes the start of a larger part, and a batch of the other stream the rest."""
    cache, slot = np.zeros(160_000, np.uint8), iter(range(24))

    def runs(count: int, size: int, load: bool) -> Runs:
        at = np.array([next(slot) for _ in range(count)], np.int64) * 6000
        host, blocks = staging.address + at, cache.ctypes.data + at
        return Runs(*((host, blocks) if load else (blocks, host)), np.full(count, size))

    with device:
        copies = attached(staging, cache)
        device.late = True
        copies.store(runs(2, 2048, load=False))
        copies.load(runs(6, 2048, load=True))
        copies.store(runs(1, 512, load=False))
        copies.load(runs(2, 2048, load=True))


def test_a_wait_that_is_left_out_is_found(device: SimulatedDevice, staging: AttachedStaging) -> None:
    device.waits = False
    with pytest.raises(RaceError):
        random_steps(device, staging)


def test_a_rejected_copy_is_a_failed_store(
    device: SimulatedDevice, staging: AttachedStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queued part still uses the ring and its slots: later copies follow it."""
    cache, scatter = np.zeros(160_000, np.uint8), torch.Tensor.index_copy_
    host, blocks, length = staging.address + np.array([0]), cache.ctypes.data + np.array([0]), np.array([4096])

    def reject_copy(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with device:
        copies = attached(staging, cache)
        monkeypatch.setattr(torch.Tensor, "index_copy_", reject_copy)
        device.late = True
        with pytest.raises(StoreError, match="rejects a copy"):
            copies.load(Runs(host, blocks, length))
        monkeypatch.setattr(torch.Tensor, "index_copy_", scatter)
        for _ in range(10):
            copies.load(Runs(host, blocks, length))
            copies.store(Runs(blocks, host + 8192, length))
        assert not copies.passed(copies.mark())


def test_devices_without_registered_memory_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no KV cache on meta devices"):
        DeviceCopies([torch.empty(8, device="meta")])
