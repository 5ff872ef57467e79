"""A part of `make store-schedules`: vLLM's own scheduler with the store, and a check of attended
tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.planning.descriptors import Runs
from connectors.store.keys.names import Feature
from tests.campaigns.store import scheduling

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
