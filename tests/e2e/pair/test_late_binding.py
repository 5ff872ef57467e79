"""Decode allocates blocks when prefill is about to start the prompt, not at the request's
arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass
from typing import Any

import pytest

from testing.engines import Answer, Pair, generate
from testing.identity import MAX_TOKENS, difference, random_prompt
from testing.sequential_proxy import PRODUCE
from tests.e2e.pair.conftest import Engines, alone

pytestmark = pytest.mark.engine

PROMPTS, PROMPT_TOKENS = 8, 900
BOUND_S = 60.0


@dataclass(frozen=True)
class Split:
    """Send both legs of a request at once."""

    transfer_id: str
    prefill: asyncio.Future[Answer]
    decode: asyncio.Future[Answer]


def split(pair: Pair, prompt: list[int]) -> Split:
    each = uuid.uuid4().hex
    leg = PRODUCE | {"transfer_id": each}
    return Split(
        each,
        asyncio.ensure_future(generate(pair.prefill, prompt, 1, leg, logprobs=None, request_id=each)),
        asyncio.ensure_future(generate(pair.decode, prompt, MAX_TOKENS, pair.address | {"transfer_id": each})),
    )


def most_bound_and_not_started(events: list[dict[str, Any]], ids: list[str]) -> int:
    """Return the peak number of transfers with decode blocks but without a computed chunk."""
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
    """Prefill computes one prompt at a time, so only the prompts of its next step have decode
    blocks.
    """
    pair = engines.one_to_two
    todo = [random_prompt(PROMPT_TOKENS, seed=80 + number) for number in range(PROMPTS)]

    async def run() -> None:
        references = [await alone(pair, prompt) for prompt in todo]
        start = len(engines.events())
        sent = [split(pair, prompt) for prompt in todo]
        answers = await asyncio.gather(*(each.decode for each in sent))
        await asyncio.gather(*(each.prefill for each in sent))
        assert [difference(r, a) for r, a in zip(references, answers, strict=True)] == [None] * PROMPTS
        events = engines.events()[start:]
        assert [event["failure"] for event in events if event["event"] == "received"] == [None] * 2 * PROMPTS
        # The prompt in progress may be about to start, and so may the next one.
        assert most_bound_and_not_started(events, [each.transfer_id for each in sent]) <= 2
        assert await engines.idle()

    engines.runner.run(run())


def test_cancelled_in_the_queue(engines: Engines) -> None:
    """A cancelled request with a queued prompt leaves nothing on either engine; others get their
    KV.

    Repeats if the last prompt started before the cancellation, after a pause of the machine.
    """
    pair = engines.one_to_two

    async def run(seed: int) -> bool:
        """Return whether the cancelled request had no decode blocks."""
        todo = [random_prompt(PROMPT_TOKENS, seed=seed + number) for number in range(4)]
        references = [await alone(pair, prompt) for prompt in todo]
        start = len(engines.events())
        sent = [split(pair, prompt) for prompt in todo]
        leaves = sent.pop()
        give_up_at = asyncio.get_running_loop().time() + BOUND_S
        while not any(event["event"] == "chunk" for event in engines.events()[start:]):
            assert asyncio.get_running_loop().time() < give_up_at
            await asyncio.sleep(0.002)
        leaves.decode.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaves.decode
        answers = await asyncio.gather(*(each.decode for each in sent))
        assert [difference(r, a) for r, a in zip(references, answers, strict=False)] == [None] * 3
        await asyncio.gather(leaves.prefill, *(each.prefill for each in sent))
        received = {event.get("transfer") for event in engines.events()[start:] if event["event"] == "receive"}
        assert received >= {each.transfer_id for each in sent}
        assert await engines.idle()
        return leaves.transfer_id not in received

    assert any(engines.runner.run(run(90 + 10 * attempt)) for attempt in range(5))


def test_legs_one_after_the_other_wait_for_no_start(engines: Engines) -> None:
    """With sequential legs, as from a public proxy, decode allocates blocks at once.

    Prefill has already computed the prompt.
    """
    pair = engines.two_to_one
    prompt = random_prompt(300, seed=95)

    async def run() -> None:
        reference = await alone(pair, prompt)
        start = len(engines.events())
        assert difference(reference, await pair.in_turn(prompt, MAX_TOKENS)) is None
        names = [event["event"] for event in engines.events()[start:]]
        assert "receive" in names
        assert "due" not in names
        assert await engines.idle()

    engines.runner.run(run())
