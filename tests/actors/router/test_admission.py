"""What the router asks of decode's slots for a request, and what a refusal becomes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from actors.engine_pool.slots import Slot, SlotRequest
from actors.errors import OverloadedError
from actors.policy.admission import CROWDING_SHARE, SAFE_SHARE
from actors.request import Headers
from tests.actors.behaviours import LIMITS, answers, ask, fleet, request, well
from tests.actors.fleet import Handle, Replica, at_rest, router_of

ASSUMED = LIMITS.routing.assumed_answer_tokens
PROMPT = 2
"""Tokens of the prompt of `request`."""


class Full(Handle):
    """Decode without a free slot, and no time left in its queue."""

    async def take(self, wanted: SlotRequest) -> Slot:
        self.wanted = wanted
        raise OverloadedError("too long", 12.3)


@pytest.mark.parametrize(
    ("body", "headers", "crowds", "tokens", "priority", "share"),
    [
        ({}, (), False, PROMPT + ASSUMED, 0, 1.0),
        ({"max_tokens": 10}, (), False, PROMPT + 10, 0, 1.0),
        ({"max_tokens": 10, "n": 3}, (), False, PROMPT + 30, 0, 1.0),
        ({"priority": 5}, (), True, PROMPT + ASSUMED, 5, CROWDING_SHARE),
        ({"priority": 5}, ((b"x-vllm-priority", b"-9"),), False, PROMPT + ASSUMED, -9, 1.0),
        ({"priority": 5, "set": False}, ((b"x-vllm-priority", b"-9"),), False, PROMPT + ASSUMED, 0, 1.0),
        ({"priority": "5"}, ((b"x-vllm-priority", b"high"),), False, PROMPT + ASSUMED, 0, 1.0),
    ],
)
async def test_what_a_request_commits(
    body: dict[str, Any], headers: Headers, crowds: bool, tokens: int, priority: int, share: float
) -> None:
    prefill, decode = Handle([]), Full([Replica("d", answers(200, {}))])
    router = router_of(LIMITS, prefill, decode)
    allowed = body.pop("set", True)
    one = replace(request(**body), headers=headers, crowds=crowds, sets_priority=allowed)
    with pytest.raises(OverloadedError) as refused:
        async with router.answer(one):
            pass
    assert refused.value.retry_after_s == 12.3
    assert (decode.wanted.tokens, decode.wanted.priority) == (tokens, priority)
    longest_s = SAFE_SHARE * share * LIMITS.first_token_timeout_s
    assert decode.wanted.wait_s == pytest.approx(longest_s, abs=1)
    await at_rest(prefill, decode)


async def test_a_prompt_that_would_wait_too_long() -> None:
    """Prefill's queue alone can exceed the deadline, while decode has slots."""
    router, prefill, decode = fleet([well], [answers(200, {})])
    assert (await ask(router, request()))[0].start.status == 200, "now the engines are known"
    router.limits = LIMITS.model_copy(update={"first_token_timeout_s": 1.0})
    planner, long = router.models[0].planner, request(prompt="a" * 80_000).prompt
    queued = [planner.begin(long, "d0", "p0", 0.0) for _ in range(5)]
    with pytest.raises(OverloadedError, match="the prompt would wait") as refused:
        async with router.answer(request()):
            pass
    assert refused.value.retry_after_s > 1
    queued += [planner.begin(long, "d0", None, 0.0) for _ in range(5)]
    tokenize = replace(request(stream=False), endpoint="/tokenize")
    assert (await ask(router, tokenize))[0].start.status == 200, "it computes no prompt"
    for one in queued:
        planner.ended(one, 0.0)
    assert (await ask(router, request()))[0].start.status == 200
    await at_rest(prefill, decode)


class Busy(Handle):
    """Engines without a free slot."""

    def __init__(self, replicas: list[Replica]) -> None:
        super().__init__(replicas)
        self.committed: asyncio.Queue[int] = asyncio.Queue()
        self.free = asyncio.Event()

    async def take(self, wanted: SlotRequest) -> Slot:
        self.committed.put_nowait(wanted.tokens)
        await self.free.wait()
        return await super().take(wanted)


async def test_prompts_that_wait_share_no_kv_yet() -> None:
    """Each commits its whole prompt: another engine may get them, and until then none has it."""
    prefill, decode = Handle([]), Busy([Replica("d", answers(200, {}))])
    router = router_of(LIMITS, prefill, decode)
    for pool in (prefill, decode):
        pool.take_now(SlotRequest())  # now the engines are known
    prompt, asking = list(range(640)), list[asyncio.Task[Any]]()
    for _ in range(3):
        asking.append(asyncio.create_task(ask(router, request(prompt=prompt, max_tokens=1))))
        assert await decode.committed.get() == 641
    decode.free.set()
    await asyncio.gather(*asking)
    await at_rest(prefill, decode)


async def test_a_prompt_that_waits_for_prefill_shares_its_kv() -> None:
    """It has its slot on decode, so a later request with the same prefix adds only the rest."""
    prefill, decode = Busy([Replica("p", answers(200, {}))]), Busy([Replica("d", answers(200, {}))])
    router = router_of(LIMITS, prefill, decode)
    decode.free.set()
    prompt, asking = list(range(640)), list[asyncio.Task[Any]]()
    for committed in (641, 2):
        asking.append(asyncio.create_task(ask(router, request(prompt=prompt, max_tokens=1))))
        assert await decode.committed.get() == committed
        assert await prefill.committed.get() == 0
    prefill.free.set()
    await asyncio.gather(*asking)
    await at_rest(prefill, decode)
