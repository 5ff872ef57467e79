"""A cache on a device: its copies end after the step, so ranks report them in a later one.

Device memory is CPU memory here. ``tests/store/test_device_copies.py`` shows bytes and order.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from connectors.errors import StoreError
from connectors.planning.layout import MemoryKind
from connectors.store.planning.prefix import ObjectRef
from connectors.store.settings import StoreSettings
from connectors.store.tiers.staging import Staging
from connectors.vllm_hma.kv_store import worker as worker_module
from connectors.vllm_hma.kv_store.orders import Load, Store, StoreOrders, StoreReport
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from tests.planning.builders import Rank, make_rank
from tests.vllm_contract.stored_prompt import END, SHAPE, tables

TABLES = tuple(tuple(table) for table in tables(END))
STORED = {ObjectRef(16, 0): 0, ObjectRef(32, 0): 4096}
MOVED = tuple(tuple(block and block + 1 for block in table) for table in TABLES)


class HeldEvent(torch.cpu.Event):
    """An event of a device that passes when a test says so."""

    passed = False

    def query(self) -> bool:
        return HeldEvent.passed


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[HeldEvent]:
    monkeypatch.setattr(HeldEvent, "passed", False)
    monkeypatch.setattr(StoreWorker, "_touched", ())
    module = SimpleNamespace(**vars(torch.cpu) | {"Event": HeldEvent})
    monkeypatch.setattr(torch, "get_device_module", lambda *_: module)
    return HeldEvent


@pytest.fixture
def rank() -> Rank:
    return make_rank(SHAPE, 0, 1)


@pytest.fixture
def worker(rank: Rank, held: type[HeldEvent]) -> StoreWorker:
    """The worker of a rank whose cache is on a device."""
    regions = tuple(replace(each, memory_kind=MemoryKind("VRAM", 0)) for each in rank.layout.regions)
    made = StoreWorker(StoreSettings(path="/unused", chunk_tokens=16, staging_mib=1), 4096, SpoiledSteps(2))
    made.register(replace(rank.layout, regions=regions), [torch.from_numpy(buffer) for buffer in rank.buffers])
    return made


def test_a_step_is_reported_once_its_copies_have_ended(staging: Staging, rank: Rank, worker: StoreWorker) -> None:
    """Until then slots are in use, and a peer must not write to blocks."""
    view = rank.views[0][0]
    view[...] = np.random.default_rng(3).integers(0, 256, view.shape, np.uint8)
    content = view[list(TABLES[0][:4])].copy()
    orders = StoreOrders(staging.location, stores=[Store("a", TABLES, STORED)])
    worker.begin_step()
    worker.load(orders)
    assert worker.touching() is None
    worker.store(orders)
    assert worker.report() == StoreReport(attached=1)
    assert worker.touching() is not None
    worker.load(StoreOrders(staging.location, [Load(3, "b", MOVED, 0, 32, STORED, beside_transfer=True)]))
    assert worker.report() is None
    HeldEvent.passed = True
    assert worker.touching() is None
    assert worker.report() == StoreReport(loaded={3: 1}, filled={0: 1, 4096: 1})
    assert np.array_equal(view[list(MOVED[0][:4])], content)
    assert worker.report() is None


def test_a_device_that_hangs_ends_the_engine(
    staging: Staging, worker: StoreWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write to the slots of its copies, so no other object may get them."""
    orders = StoreOrders(staging.location, stores=[Store("a", TABLES, STORED)])
    worker.load(orders)
    worker.store(orders)
    assert worker.report() == StoreReport(attached=1)
    monkeypatch.setattr(worker_module, "_HANGS_S", -1.0)
    with pytest.raises(StoreError, match="the device has not ended copies of the KV store"):
        worker.report()


def test_a_report_that_waits_for_an_idle_engines_next_step_is_no_hang(
    staging: Staging, worker: StoreWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call reports one measured step; an engine without requests makes no call."""
    for tokens in (512, 256):
        worker.begin_step()
        worker.load(StoreOrders(staging.location))
        worker.store(StoreOrders(staging.location, timed_tokens=tokens))
        assert worker.report() in (StoreReport(attached=1), None)
    monkeypatch.setattr(worker_module, "_HANGS_S", -1.0)
    HeldEvent.passed = True
    assert worker.report() == StoreReport(timed_tokens=512)
    assert worker.report() == StoreReport(timed_tokens=256)
