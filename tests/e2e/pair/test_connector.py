"""The connector between real engines: right answers for all event orders, pools at baseline."""

from __future__ import annotations

import pytest

from testing.engines import generate
from testing.identity import BLOCK_TOKENS, random_prompt
from tests.e2e.pair.conftest import Engines

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]


async def test_streaming_and_ideal_bytes(engines: Engines) -> None:
    """Before the last of 8 chunks ends, 85% of the full-attention bytes are written.

    At most one block per group is moved in excess.
    """
    tokens, chunk_tokens = 8 * 256, 256
    start = len(engines.events())
    await engines.one_to_two.together(random_prompt(tokens, seed=3), 2)
    assert [event["failure"] for event in engines.events(start, "received")] == [None, None], "one per decode rank"
    chunks, writes = engines.events(start, "chunk"), engines.events(start, "write")
    assert len(chunks) == tokens // chunk_tokens
    written = {event["write"]: event["t"] for event in engines.events(start, "written")}
    full = [(event["bytes"]["2"], written[event["write"]]) for event in writes if "2" in event["bytes"]]
    early = sum(count for count, at in full if at <= chunks[-1]["t"])
    assert early / sum(count for count, _ in full) >= 0.85
    # Two layers per group, 4 heads in total, K and V of 32 float32 each, for every token that
    # decode attends to.
    block_bytes = 2 * 4 * BLOCK_TOKENS * 2 * 32 * 4
    for group, needed_tokens in (("0", 128), ("1", 128), ("2", tokens - 1)):
        moved = sum(event["bytes"].get(group, 0) for event in writes)
        assert moved <= needed_tokens * block_bytes / BLOCK_TOKENS + block_bytes


async def test_a_prefill_leg_that_decodes_is_not_produced(engines: Engines) -> None:
    """A prefill request for more than one token is answered, and offers no KV: its windows move."""
    leg = {"do_remote_decode": True}
    answer = await generate(engines.one_to_two.prefill, random_prompt(300, seed=35), 4, leg, logprobs=None)
    assert (len(answer.tokens), answer.transfer) == (4, None)


async def test_a_lease_ends(engines: Engines) -> None:
    await generate(engines.one_to_two.prefill, random_prompt(300, seed=40), 1, {"do_remote_decode": True})
    assert not await engines.one_to_two.prefill.reset_prefix_cache(), "the lease holds blocks"
