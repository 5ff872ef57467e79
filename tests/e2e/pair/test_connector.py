"""The connector between real engines: right answers for all event orders, pools at baseline."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from testing.engines import Pair, generate
from testing.identity import BLOCK_TOKENS, MAX_TOKENS, compare, difference, prompts, random_prompt
from tests.e2e.pair.conftest import Engines, alone

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

ANSWER_TOKENS = 3
"""Tokens after a prompt of each length; the campaign `identity` compares longer answers."""


@pytest.mark.parametrize("direction", ["one_to_two", "two_to_one"])
async def test_identity(engines: Engines, direction: str) -> None:
    """Tokens and logprobs equal one engine's at every block and window boundary."""
    pair: Pair = getattr(engines, direction)
    cases = [(prompt, await alone(pair, prompt, ANSWER_TOKENS)) for prompt in prompts(27, 700, seed=1)]
    assert (await compare(pair, cases, tokens=ANSWER_TOKENS)).wrong == ()


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


async def test_many_at_once(engines: Engines) -> None:
    """Interleaved transfers in both directions do not disturb each other."""
    todo = [random_prompt(40 + 53 * i, seed=10 + i) for i in range(8)]
    pairs = [engines.one_to_two, engines.two_to_one] * 4
    references = [await alone(pair, prompt) for pair, prompt in zip(pairs, todo, strict=True)]
    sent = (pair.together(prompt, MAX_TOKENS) for pair, prompt in zip(pairs, todo, strict=True))
    answers = await asyncio.gather(*sent)
    assert [difference(r, a) for r, a in zip(references, answers, strict=True)] == [None] * 8


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": "an-engine-that-has-ended"},
        {"transfer_id": "used"},
        {"remote_port": "a port"},
        {"prompt": "another"},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_what_cannot_be_fetched_is_computed(engines: Engines, change: dict[str, object]) -> None:
    """With a stale, used, malformed or foreign reference decode computes the right answer."""
    pair = engines.one_to_two
    prompt, other = random_prompt(300, seed=20), random_prompt(300, seed=21)
    reference = await alone(pair, prompt)
    transfer = pair.address | {"transfer_id": uuid.uuid4().hex} | change
    if change.get("transfer_id") == "used" or "prompt" in change:
        leg = {"do_remote_decode": True} | ({"transfer_id": "used"} if "transfer_id" in change else {})
        first = await generate(pair.prefill, other, 1, leg, logprobs=None)
        assert first.transfer is not None
        if "transfer_id" in change:
            await generate(pair.decode, other, 1, first.transfer)
        else:
            transfer = first.transfer
    answer = await asyncio.wait_for(generate(pair.decode, prompt, MAX_TOKENS, transfer), 60)
    assert difference(reference, answer) is None


async def test_a_prefill_leg_that_decodes_is_not_produced(engines: Engines) -> None:
    """A prefill request for more than one token is answered, and offers no KV: its windows move."""
    leg = {"do_remote_decode": True}
    answer = await generate(engines.one_to_two.prefill, random_prompt(300, seed=35), 4, leg, logprobs=None)
    assert (len(answer.tokens), answer.transfer) == (4, None)


async def test_a_lease_ends(engines: Engines) -> None:
    """Finished blocks that no engine fetches return to the pool after lease_s."""
    await generate(engines.one_to_two.prefill, random_prompt(300, seed=40), 1, {"do_remote_decode": True})
    assert not await engines.one_to_two.prefill.reset_prefix_cache(), "the lease holds blocks"
