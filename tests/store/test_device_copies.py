"""Copies of a cache on a device equal those of host memory, and events order them.

The device is the CPU; what only a GPU shows is its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from connectors.errors import ConfigurationError, StoreError
from connectors.planning.descriptors import Runs
from connectors.store import device_copies
from connectors.store.copying import copy_runs
from connectors.store.device_copies import DeviceCopies
from connectors.store.tiers.staging import AttachedStaging, Staging
from tests.store.simulated_streams import RaceError, SimulatedDevice

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


@pytest.mark.parametrize("lengths", [[1, 7, 4999], [8, 512], [4096], [2048, 4096, 5000], [2, 6], [12]])
def test_runs_of_any_length_and_place(staging: AttachedStaging, lengths: list[int]) -> None:
    """Rows of bytes and of words in two tensors, shorter and longer than a row of a batch, there
    and back, equal those that the host copies.
    """
    rng = np.random.default_rng(len(lengths))
    caches = [rng.integers(0, 256, 80_000, np.uint8) for _ in range(2)]
    length, odd = rng.choice(lengths, 12).astype(np.int64), rng.integers(0, 8, 12) if lengths[0] % 8 else 0
    device = np.array([caches[at % 2].ctypes.data + at // 2 * 6000 for at in rng.permutation(24)[:12]], np.int64) + odd
    host = (staging.address + 8192 + rng.permutation(24)[:12] * 6000).astype(np.int64)
    copies, memory = attached(staging, *caches), contents(staging)
    memory[:] = 0
    copy_runs(Runs(device, host, length))
    stored = memory.copy()
    memory[:] = 0
    copies.store(Runs(device, host, length))
    assert np.array_equal(memory, stored)
    loaded = []
    for load in (copy_runs, copies.load):
        for cache in caches:
            cache[:] = 0
        load(Runs(host, device, length))
        loaded.append(np.concatenate(caches))
    assert loaded[0].any()
    assert np.array_equal(*loaded)


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
