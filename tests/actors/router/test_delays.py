"""A delay in one stage appears in that stage: the real router, and engines of sleeps."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.errors import EngineDownError
from actors.replay_log import KvTimes, ServedCall
from actors.request import TRANSFER_FIELD, Call, ResponseStart, TokenChunk
from actors.router.client_request import ClientRequest
from actors.telemetry.latency_breakdown import LatencyBreakdown
from configs.settings.router import RouterLimits
from testing.answers import body_of
from tests.actors.behaviours import EVENTS, JSON, event, request
from tests.actors.fleet import Handle, Replica, at_rest, router_of

pytestmark = pytest.mark.usefixtures("virtual_time")

DELAY_S = 0.25
"""Delay far above all other durations in `virtual_time`."""


class Engines:
    """Both roles' replicas, whose stages take no time except `delays`, in seconds by stage."""

    def __init__(self, **delays: float) -> None:
        self._delays = delays
        self._computed = asyncio.Event()
        self.prefill = Handle([Replica("p0", self._prefill), Replica("p1", self._prefill)])
        self.decode = Handle([Replica("d", self._decode)])
        self.router = router_of(RouterLimits(), self.prefill, self.decode)

    async def stage(self, name: str) -> float:
        """Pass a stage; return its end on this host's clock."""
        await asyncio.sleep(self._delays.get(name, 0.0))
        return time.monotonic()

    async def _prefill(self, call: Call, _: int) -> AsyncGenerator[Any, None]:
        if "retries" in self._delays and len(self.prefill.calls) == 1:
            await self.stage("retries")
            raise EngineDownError("dead")
        await self.stage("hop to prefill")
        watch, stats = ServedCall(), SimpleNamespace()
        stats.queued_ts = await self.stage("prefill's tokenizer")
        stats.scheduled_ts = await self.stage("prefill's queue")
        stats.first_token_ts = await self.stage("prefill")
        self._computed.set()
        watch.computed(stats, KvTimes())
        await self.stage("prefill's answer")
        yield ResponseStart(200, JSON, watch.take_timings())
        yield b"{}"
        await asyncio.sleep(60)

    async def _decode(self, call: Call, _: int) -> AsyncGenerator[Any, None]:
        body = json.loads(call.body)
        watch, stats = ServedCall(), SimpleNamespace()
        stats.queued_ts = await self.stage("decode's tokenizer")
        arrival = None
        if TRANSFER_FIELD in body:
            asked_at = await self.stage("decode's room")
            await self._computed.wait()
            arrival = (asked_at, await self.stage("transfer"), "recompute" in self._delays)
        stats.scheduled_ts = await self.stage("decode's queue")
        await self.stage("recompute")
        stats.first_token_ts = await self.stage("first step")
        watch.computed(stats, KvTimes(arrival))
        if not body.get("stream"):
            await self.stage("generation")
            yield ResponseStart(200, JSON, watch.take_timings())
            yield b"{}"
            return
        yield ResponseStart(200, EVENTS)
        await self.stage("detokenizer")
        timings = watch.take_timings()
        await self.stage("hop from decode")
        yield TokenChunk(event(1, index=0, text="a", finish_reason=None), ((1,),), timings)
        await self.stage("streaming")
        yield TokenChunk(event(1, index=0, text="b", finish_reason="length") + b"data: [DONE]\n\n", ((2,),))


async def _is_over(role: Handle) -> None:
    while True:
        if not (role.taken or role.running):
            return
        await asyncio.sleep(0.001)


async def breakdown_of(engines: Engines, wanted: ClientRequest) -> LatencyBreakdown:
    async with engines.router.answer(wanted) as answer:
        breakdown = answer.breakdown
    await at_rest(engines.prefill, engines.decode)
    return breakdown


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        ("retries", "retries"),
        ("hop to prefill", "hops"),
        ("prefill's tokenizer", "frontend"),
        ("prefill's queue", "prefill_queue"),
        ("prefill", "prefill"),
        ("decode's tokenizer", "frontend"),
        ("decode's room", "decode_queue"),
        ("transfer", "transfer"),
        ("decode's queue", "decode_queue"),
        ("first step", "first_step"),
        ("recompute", "recompute"),
        ("detokenizer", "frontend"),
        ("hop from decode", "hops"),
        ("generation", "generation"),
    ],
)
async def test_a_delay_of_a_remote_request_is_in_its_part(stage, part):
    """The delayed part is the largest and has the delay, and the parts sum to the total."""
    engines = Engines(**{stage: DELAY_S})
    breakdown = await breakdown_of(engines, request(stream=stage != "generation"))
    parts = breakdown.parts
    assert max(parts, key=parts.__getitem__) == part, parts
    # A delay of one direction only: half of it counts for the other direction.
    assert parts[part] >= (DELAY_S / 2 if part == "hops" else DELAY_S) * 0.99
    assert sum(parts.values()) == pytest.approx(breakdown.total_s, abs=1e-6)
    assert breakdown.total_s >= DELAY_S


async def test_waiting_for_a_slot_is_in_its_part(monkeypatch):
    """The router waits for a slot before it sends any call."""
    engines = Engines()
    take = engines.decode.take

    async def late(*options: Any) -> Any:
        await asyncio.sleep(DELAY_S)
        return await take(*options)

    monkeypatch.setattr(engines.decode, "take", late)
    parts = (await breakdown_of(engines, request())).parts
    assert max(parts, key=parts.__getitem__) == "slot_wait", parts


@pytest.mark.parametrize(
    "delays",
    [
        {},
        # decode had to compute the prompt: prefill's time does not count
        {"recompute": 0.01, "prefill's answer": 60},
    ],
    ids=["answered", "needless"],
)
async def test_prefill_is_free_when_the_router_has_the_first_token(delays):
    """Prefill's slot is free with the first token, and its call ends long before the stream."""
    engines = Engines(**delays, streaming=8 * DELAY_S)
    async with engines.router.answer(request()) as answer:
        body = body_of(answer)
        await anext(body)
        assert engines.prefill.taken == 0
        rest = asyncio.create_task(anext(body))
        await asyncio.wait_for(_is_over(engines.prefill), 20)
        assert not rest.done()
        await rest
        await body.aclose()
    await at_rest(engines.prefill, engines.decode)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_accounted_for_with_its_first_token(stream: bool) -> None:
    """Prefill's timings arrive first in most requests; the client does not wait for others."""
    engines = Engines(streaming=5.0)
    async with engines.router.answer(request(stream=stream)) as answer:
        await answer.begin()
        assert answer.accounted
    await at_rest(engines.prefill, engines.decode)


@pytest.mark.parametrize(
    ("delays", "received"),
    [({}, True), ({"retries": 0.01}, True), ({"recompute": 0.01}, False), ({"no statistics": 0.0}, None)],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_explanation_says_which_engines_served_and_whether_kv_arrived(
    delays: dict[str, float], received: bool | None, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision's own engines may have failed or been full."""
    engines = Engines(**delays)
    if received is None:
        monkeypatch.setattr(ServedCall, "computed", lambda *_: None)
    async with engines.router.answer(replace(request(stream=stream), explain=True)) as answer:
        await answer.begin()
        assert answer.explanation is not None
        served = json.loads(answer.explanation)["served"]
    await at_rest(engines.prefill, engines.decode)
    assert served == {"prefill": answer.pair.prefill, "decode": "d", "received_kv": received}
    assert served["prefill"] in ("p0", "p1")
