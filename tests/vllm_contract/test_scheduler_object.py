"""vLLM's own scheduler with our scheduler side in thousands of random steps: no assertion, no
leak.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.campaigns.schedules.scheduling import KINDS, Engine

STEPS = 600


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    """Events of all runs, by kind."""
    return Counter()


@pytest.mark.parametrize(("blocks", "prefix_caching", "asynchronous"), KINDS)
def test_random_steps(blocks: int, prefix_caching: bool, asynchronous: bool, totals: Counter[str]) -> None:
    """Requests of every kind arrive, are preempted, aborted and failed; all end, and the pool is
    at its baseline.
    """
    seed = KINDS.index((blocks, prefix_caching, asynchronous))
    engine = Engine(seed, blocks, prefix_caching, asynchronous)
    try:
        engine.run(STEPS)
    finally:
        engine.close()
    totals += engine.counts


def test_steps_have_seen_everything(totals: Counter[str]) -> None:
    """The runs cover all kinds: every kind of request and every disturbance has occurred."""
    assert totals["steps"] == STEPS * len(KINDS)
    for what in (
        "plain",
        "produced",
        "produced without an id",
        "produced with its first token",
        "consumed",
        "discard",
        "describe",
        "bad",
        "aborted",
        "aborted productions",
        "aborted receptions",
        "failed receptions",
        "quarantines",
        "preempted",
    ):
        assert totals[what] >= 10, (what, totals)
    assert totals["preempted productions"] > 0


@pytest.mark.parametrize(("blocks", "prefix_caching", "asynchronous"), [(32, False, False), (60, True, False)])
def test_random_steps_with_drafts(blocks: int, prefix_caching: bool, asynchronous: bool) -> None:
    """Lookahead slots, placeholders and rejected drafts leave transfers and the pool as exact as
    without them.
    """
    engine = Engine(0, blocks, prefix_caching, asynchronous, drafts=3)
    try:
        engine.run(STEPS)
    finally:
        engine.close()
    for what in ("produced", "consumed", "placeholders", "accepted drafts", "rejected drafts", "preempted"):
        assert engine.counts[what] >= 10, (what, engine.counts)
    assert engine.counts["failed receptions"] > 0


@pytest.mark.parametrize(("blocks", "prefix_caching", "asynchronous"), [(32, False, False), (60, True, False)])
def test_random_steps_with_images(blocks: int, prefix_caching: bool, asynchronous: bool) -> None:
    """Images are encoded where their KV is computed and nowhere else, and none stays in the
    encoder's cache for a request that has ended.
    """
    engine = Engine(0, blocks, prefix_caching, asynchronous, images=True)
    try:
        engine.run(STEPS)
    finally:
        engine.close()
    for what in ("images", "encoded", "produced", "produced with its first token", "consumed", "preempted"):
        assert engine.counts[what] >= 10, (what, engine.counts)
    assert engine.counts["encoded"] < engine.counts["images"], engine.counts
