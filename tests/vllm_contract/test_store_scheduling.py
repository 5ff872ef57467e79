"""A part of `make store-schedules`: vLLM's own scheduler with the store, and a check of attended
tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from connectors.planning.descriptors import Runs
from connectors.store.keys.names import Feature
from tests.campaigns.store import scheduling
from tests.store.test_service import until

TWO_ENGINES = [(40, 16, True, True, 1, False), (60, 32, False, False, 4, False)]
WITH_STATES = [(40, 16, False, True, 1, True), (90, 16, False, False, 2, True)]


@pytest.mark.parametrize("kinds", [TWO_ENGINES, WITH_STATES], ids=["windows", "states"])
def test_two_engines_share_what_they_compute(tmp_path: Path, kinds: list[scheduling.Kind]) -> None:
    """The second engine has another TP size, and loads objects of the first."""
    counts = scheduling.run(tmp_path / "store", 3, 60, kinds)
    assert counts["loads"] > 0
    assert counts["images"] > 0


def test_a_copy_that_is_left_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign must detect its target: nothing is loaded, although vLLM counts it as
    computed.
    """

    def copy_nothing(runs: Runs) -> None:
        pass

    monkeypatch.setattr("connectors.vllm_hma.kv_store.worker.copy_runs", copy_nothing)
    with pytest.raises(AssertionError, match="is not its own"):
        scheduling.run(tmp_path / "store", 3, 60, TWO_ENGINES)


def test_an_image_that_keys_leave_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of another image of equal size would be loaded."""

    def nameless(identifier: str, offset: int) -> Feature:
        return Feature("", offset)

    monkeypatch.setattr("connectors.vllm_hma.kv_store.scheduler.Feature", nameless)
    with pytest.raises(AssertionError, match="is not its own"):
        # The store's threads decide what is loaded, so one engine may load no such KV.
        scheduling.run(tmp_path / "store", 3, 200, TWO_ENGINES[:1] * 5)


def objects(folder: Path) -> set[Path]:
    return set((folder / "objects").glob("*/*"))


def compute(engine: scheduling.Engine, name: str) -> None:
    """Run a prompt of three whole chunks to its end, and all of its stores."""
    prompt = list(range(100, 200))
    engine.tokens[name] = list(prompt)
    request = Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=engine.hasher)
    engine.scheduler.add_request(request)

    def ended() -> bool:
        engine.step()
        return not engine.scheduler.has_requests() and not engine.batches

    until(ended)
    until(engine.store.idle)


def test_an_evicted_object_is_stored_again(tmp_path: Path) -> None:
    """The engine that has stored it computes it again after another one has evicted it."""
    folder = tmp_path / "store"
    engine = scheduling.Engine(1, folder, 40, 16, False, False, 1, False)
    try:
        compute(engine, "first")
        stored = objects(folder)
        assert stored
        for path in stored:
            path.unlink()
        for number in range(10):  # a lookup may be late
            compute(engine, f"again {number}")
            if objects(folder) == stored:
                break
        assert objects(folder) == stored
    finally:
        engine.close()


def test_a_dropped_object_is_stored_by_the_next_request(tmp_path: Path) -> None:
    """The queue of writes was full when its slot was filled."""
    folder = tmp_path / "store"
    engine = scheduling.Engine(1, folder, 40, 16, False, False, 1, False)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for tier in engine.store._tiers:  # noqa: SLF001
                patch.setattr(tier.writes, "submit", lambda *_: None)
            compute(engine, "dropped")
        assert objects(folder) == set()
        compute(engine, "stored")
        assert len(objects(folder)) > 0
    finally:
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
        engine.store.staging.path.unlink()
        compute(engine, "computed")
        compute(engine, "computed too")
        assert engine.counts["loads"] == 0
        assert engine.store.staging.used_bytes == 0
    finally:
        engine.close()
