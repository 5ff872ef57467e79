"""Decode allocates blocks when prefill is about to start the prompt, not when the request arrives."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from testing.engines import Answer, Pair, generate
from testing.identity import MAX_TOKENS, difference, random_prompt
from testing.sequential_proxy import PRODUCE
from tests.e2e.pair.conftest import Engines, alone

pytestmark = pytest.mark.engine

PROMPTS, PROMPT_TOKENS = 8, 900


async def backlog(pair: Pair, todo: list[list[int]]) -> tuple[list[str], list[Answer]]:
    """Send both legs of all prompts at once. Returns the transfer ids and decode's answers."""
    ids = [uuid.uuid4().hex for _ in todo]
    prefill = [
        asyncio.ensure_future(
            generate(pair.prefill, prompt, 1, PRODUCE | {"transfer_id": each}, logprobs=None, request_id=each)
        )
        for each, prompt in zip(ids, todo, strict=True)
    ]
    answers = await asyncio.gather(
        *(
            generate(pair.decode, prompt, MAX_TOKENS, pair.address | {"transfer_id": each})
            for each, prompt in zip(ids, todo, strict=True)
        )
    )
    await asyncio.gather(*prefill)
    return ids, answers


def most_bound_and_not_started(events: list[dict[str, Any]], ids: list[str]) -> int:
    """Return the largest number of transfers at one time whose decode blocks are allocated and whose prompts have no
    chunk computed yet."""
    bound, started, most = set(), set(), 0
    for event in sorted(events, key=lambda each: each["t"]):
        if event["event"] == "receive":
            bound.add(event["transfer"])
        elif event["event"] == "chunk":
            started |= {each for each in ids if event["request"].startswith(each)}
        most = max(most, len(bound & set(ids) - started))
    assert bound >= set(ids)
    assert started == set(ids)
    return most


def test_a_queued_prompt_holds_no_decode_blocks(engines: Engines) -> None:
    """Prefill computes one prompt at a time. Only the prompts of its next step have blocks on decode."""
    pair = engines.one_to_two
    todo = [random_prompt(PROMPT_TOKENS, seed=80 + number) for number in range(PROMPTS)]

    async def run() -> None:
        references = [await alone(pair, prompt) for prompt in todo]
        start = len(engines.events())
        ids, answers = await backlog(pair, todo)
        assert [difference(r, a) for r, a in zip(references, answers, strict=True)] == [None] * PROMPTS
        events = engines.events()[start:]
        assert [event["failure"] for event in events if event["event"] == "received"] == [None] * 2 * PROMPTS
        # The prompt being computed may be about to start, and so may the one after it.
        assert most_bound_and_not_started(events, ids) <= 2
        assert await engines.idle()

    engines.runner.run(run())
