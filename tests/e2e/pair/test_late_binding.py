"""Decode allocates blocks when prefill is about to start the prompt, not at the arrival."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from testing.engines import Answer, Pair, generate
from testing.identity import MAX_TOKENS, difference, random_prompt
from testing.sequential_proxy import PRODUCE
from tests.e2e.pair.conftest import Engines, alone

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

PROMPTS, PROMPT_TOKENS = 8, 900


def split(pair: Pair, prompt: list[int]) -> tuple[str, asyncio.Future[Answer], asyncio.Future[Answer]]:
    """Send both legs of a request at once; return the transfer's id and both legs."""
    each = uuid.uuid4().hex
    produce, fetch = PRODUCE | {"transfer_id": each}, pair.address | {"transfer_id": each}
    prefill = generate(pair.prefill, prompt, 1, produce, logprobs=None, request_id=each)
    decode = generate(pair.decode, prompt, MAX_TOKENS, fetch)
    return each, asyncio.ensure_future(prefill), asyncio.ensure_future(decode)


def most_bound_and_not_started(events: list[dict[str, Any]], ids: set[str]) -> int:
    """Return the peak number of transfers with decode blocks but without a computed chunk."""
    bound, started, most = set[str](), set[str](), 0
    for event in sorted(events, key=lambda each: each["t"]):
        if event["event"] == "receive":
            bound.add(event["transfer"])
        elif event["event"] == "chunk":
            started |= {each for each in ids if event["request"].startswith(each)}
        most = max(most, len(bound & ids - started))
    assert bound >= ids == started
    return most


async def test_a_queued_prompt_holds_no_decode_blocks(engines: Engines) -> None:
    """Prefill computes one prompt at a time: only those of its next step have decode blocks."""
    pair = engines.one_to_two
    todo = [random_prompt(PROMPT_TOKENS, seed=80 + number) for number in range(PROMPTS)]
    references = [await alone(pair, prompt) for prompt in todo]
    start = len(engines.events())
    ids, prefills, decodes = zip(*(split(pair, prompt) for prompt in todo), strict=True)
    answers = await asyncio.gather(*decodes)
    await asyncio.gather(*prefills)
    assert [difference(r, a) for r, a in zip(references, answers, strict=True)] == [None] * PROMPTS
    assert [event["failure"] for event in engines.events(start, "received")] == [None] * 2 * PROMPTS
    # The prompt in progress may be about to start, and so may the next one.
    assert most_bound_and_not_started(engines.events(start), set(ids)) <= 2
