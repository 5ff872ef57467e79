"""A part of the campaign `store-schedules`: vLLM's own scheduler with the store,
and a check of attended tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from connectors.planning.layout import EngineLayout, MemoryKind
from connectors.vllm_hma.kv_store.worker import StoreWorker
from tests.campaigns.store import scheduling
from tests.vllm_contract.workers import until

TWO_ENGINES = [(40, 16, True, True, 1, False), (60, 32, False, False, 4, False)]
WITH_STATES = [(40, 16, False, True, 1, True), (90, 16, False, False, 2, True)]


class LateEvent(torch.cpu.Event):
    """An event of a device that passes some steps after the host has recorded it."""

    queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries > 3


@pytest.mark.parametrize("kinds", [TWO_ENGINES, WITH_STATES], ids=["windows", "states"])
def test_the_cache_is_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[scheduling.Kind]
) -> None:
    """Copies end after their step, also of an engine that has become idle."""
    register = StoreWorker.register

    def on_device(worker: StoreWorker, layout: EngineLayout, tensors: Sequence[torch.Tensor] = ()) -> None:
        memory = [(ctypes.c_uint8 * each.length_bytes).from_address(each.address) for each in layout.regions]
        regions = tuple(replace(each, memory_kind=MemoryKind("VRAM", 0)) for each in layout.regions)
        tensors = [torch.frombuffer(each, dtype=torch.uint8) for each in memory]
        register(worker, replace(layout, regions=regions), tensors)

    monkeypatch.setattr(StoreWorker, "_touched", ())
    monkeypatch.setattr(StoreWorker, "register", on_device)
    monkeypatch.setattr(
        torch, "get_device_module", lambda *_: SimpleNamespace(**vars(torch.cpu) | {"Event": LateEvent})
    )
    counts = scheduling.run(tmp_path / "store", 3, 60, kinds)
    assert counts["loads"] > 0


def compute(engine: scheduling.Engine, name: str) -> int:
    """Run one request of three chunks; return the number of objects that its steps store."""
    engine.tokens[name] = [20] * (3 * scheduling.CHUNK + 1)
    sampling = SamplingParams(max_tokens=1)
    engine.scheduler.add_request(Request(name, engine.tokens[name][:], sampling, None, block_hasher=engine.hasher))
    stored = 0
    while engine.scheduler.has_requests() or engine.batches:
        output = engine.scheduler.schedule()
        tables = {each: engine.scheduler.kv_cache_manager.get_block_ids(each) for each in output.num_scheduled_tokens}
        stored += sum(len(store.offsets) for store in scheduling.orders_of(output).stores)
        engine.scheduler.update_from_output(output, engine.execute(output, tables))
    until(engine.store.idle)
    return stored


def test_an_object_that_is_gone_is_stored_again(tmp_path: Path) -> None:
    engine = scheduling.Engine(1, tmp_path / "store", 40, 16, False, False, 1, False)
    objects = tmp_path / "store" / "objects"
    stored = compute(engine, "first")
    assert stored == len(list(objects.glob("*/*"))) > 0
    for path in objects.glob("*/*"):
        path.unlink()
    assert compute(engine, "second") == stored
    assert len(list(objects.glob("*/*"))) == stored
    assert compute(engine, "third") == 0, "all of it is loaded"
    engine.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_cannot_map_the_staging_memory(tmp_path: Path, asynchronous: bool) -> None:
    """vLLM ends an engine with several KV cache groups if a load within a step fails."""
    engine = scheduling.Engine(1, tmp_path / "store", 40, 16, False, False, 1, False)
    try:
        compute(engine, "stored")
    finally:
        engine.close()
    engine = scheduling.Engine(1, tmp_path / "store", 40, 16, False, asynchronous, 2, False)
    try:
        engine.store.staging.close()  # the memory stays mapped, but has no file
        compute(engine, "computed")
        compute(engine, "computed too")
        assert engine.counts["loads"] == 0
        assert engine.store.staging.used_bytes == 0
    finally:
        engine.close()
