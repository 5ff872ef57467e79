"""vLLM's own scheduler with our scheduler side in thousands of random steps: no assertion, no
leak.
"""

from __future__ import annotations

from collections import Counter

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from connectors.vllm_hma.orders import Orders
from tests.campaigns.schedules.scheduling import BLOCK_TOKENS, KINDS, Engine

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


@pytest.mark.parametrize(("step_tokens", "divided"), [(BLOCK_TOKENS, False), (4, True)])
def test_a_divided_step_for_the_first_token_ends_the_transfer(step_tokens: int, divided: bool) -> None:
    """Its second part would free blocks of the window that is being sent."""
    engine = Engine(0, 60, True, asynchronous=False)
    try:
        engine.scheduler.scheduler_config.long_prefill_token_threshold = step_tokens
        engine.scheduler.adaptive_long_prefill_threshold = False
        # vLLM limits a chunk only if there is another request.
        engine.scheduler.add_request(Request("other", [9] * 3, SamplingParams(max_tokens=90), None))
        params = {"do_remote_decode": True, "transfer_id": "t", "first_token": True}
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        prompt = list(range(10, 10 + BLOCK_TOKENS + 11))
        engine.scheduler.add_request(Request("p", prompt, sampling, None, block_hasher=engine.hasher))
        scheduled: list[int] = []
        finished: list[tuple[str, bool, int]] = []
        while sum(scheduled) < len(prompt):
            output = engine.scheduler.schedule()
            orders = output.kv_connector_metadata
            assert isinstance(orders, Orders)
            scheduled.append(output.num_scheduled_tokens["p"])
            finished += [(one.request_id, one.held, sum(scheduled)) for one in orders.finished]
            engine.scheduler.update_from_output(output, engine.execute(output))
        assert scheduled == ([4, 4, 4, 4, 4, 4, 3] if divided else [16, 11])
        assert finished == ([("p", False, BLOCK_TOKENS + 8)] if divided else [])
        assert set(engine.connector.scheduler.snapshot().productions) == (set() if divided else {"p"})
    finally:
        engine.close()


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
