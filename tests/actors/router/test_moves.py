"""Streams of stopping decode engines: the router has another engine continue them with their KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest

from actors.request import Call, Moved, StreamChunk
from connectors.errors import TandemError
from testing.sse import said
from tests.actors.behaviours import ALL, answers, ask, dies, engine, fleet, request, well
from tests.actors.fleet import at_rest

pytestmark = pytest.mark.usefixtures("virtual_time")

TRANSFER = {"transfer_id": "t", "remote_num_tokens": 12}
CUT = 10


class Stops:
    """An engine whose stream moves after CUT tokens; it holds the KV until its call ends, and takes
    no other.
    """

    def __init__(self, transfer: dict[str, Any], cut: int = CUT) -> None:
        self.transfer, self.cut, self.holds, self.stops = transfer, cut, False, False

    async def __call__(self, call: Call, turn: int) -> AsyncGenerator[Any, None]:
        sent = 0
        async for item in engine(1, [1])(call, turn):
            if sent == self.cut:
                break
            yield item
            sent += sum(map(len, item.groups)) if isinstance(item, StreamChunk) else 0
        self.holds = self.stops = True
        yield Moved(self.transfer)
        try:
            await asyncio.sleep(60)
        finally:
            self.holds = False


@pytest.mark.parametrize(
    ("transfer", "cut", "others", "transfers", "outcome"),
    [
        (TRANSFER, CUT, [engine(2, [2])], [TRANSFER], "moved"),
        ({}, CUT, [engine(2, [2])], [None], "moved"),
        (TRANSFER, 1, [engine(2, [2])], [TRANSFER], "moved"),
        (TRANSFER, CUT, [dies, engine(3, [2])], [TRANSFER, None], "moved"),
        (TRANSFER, CUT, [answers(429, {}), engine(3, [2])], [TRANSFER, None], "moved"),
        (TRANSFER, CUT, [], [], "failed"),
    ],
    ids=["with its KV", "without KV", "after one token", "the next engine dies", "the next is full", "no engine"],
)
async def test_a_stream_moves(
    transfer: dict[str, Any], cut: int, others: list[Any], transfers: list[Any], outcome: str
) -> None:
    stops, held = Stops(transfer, cut), []

    def noted(serve: Any) -> Any:
        async def run(call: Call, turn: int) -> AsyncGenerator[Any, None]:
            held.append(stops.holds)
            async for item in serve(call, turn):
                yield item

        return run

    router, p, d = fleet([well], [*map(noted, others[::-1]), stops])
    d.in_order, d.replicas[-1].stops = True, lambda: stops.stops
    ended = ""
    with suppress(TandemError):
        ended = said((await ask(router, request()))[1])["text"]
    await at_rest(p, d)
    assert not stops.holds
    assert ended == (ALL if others else "")
    calls = [call for replica in d.replicas[:-1][::-1] for call in replica.calls]
    assert [call.transfer for call in calls] == transfers
    assert held[:1] == [each is not None for each in transfers[:1]]
    assert router.metrics.value("tandem_resumed_streams_total", outcome=outcome) == 1


class Returns(Stops):
    """An engine that an operator drains, and undrains once its stream has moved."""

    async def __call__(self, call: Call, turn: int) -> AsyncGenerator[Any, None]:
        serve = engine(3, [2]) if call.replay_log else super().__call__
        async for item in serve(call, turn):
            yield item


async def test_a_stream_returns_to_an_engine_from_which_it_moved() -> None:
    """Its drain was undone, and then the other engine was drained."""
    first, second = Returns(TRANSFER), Stops(TRANSFER, 2 * CUT)
    router, p, d = fleet([well], [second, first])
    d.in_order, d.replicas[0].stops = True, lambda: second.stops
    assert said((await ask(router, request()))[1])["text"] == ALL
    await at_rest(p, d)
    assert [len(replica.calls) for replica in d.replicas] == [1, 2]


@pytest.mark.parametrize("frontends", [["own", "other"], ["other", "other"]], ids=["one alike", "none alike"])
async def test_a_stream_goes_to_an_engine_that_makes_the_same_of_its_request(frontends: list[str]) -> None:
    """Another chat template would end it; without an engine alike, the next one may still do."""
    router, p, d = fleet([well], [engine(2, [2]), engine(3, [2]), Stops(TRANSFER)])
    d.in_order = True
    for replica, frontend in zip(d.replicas, (*frontends, "own"), strict=True):
        replica.frontend = frontend
    assert said((await ask(router, request()))[1])["text"] == ALL
    await at_rest(p, d)
    chosen = d.replicas[0 if "own" in frontends else 1]
    assert [call.transfer for call in chosen.calls] == [TRANSFER]


@pytest.mark.parametrize(("more", "movable"), [({}, True), ({"n": 2}, False)])
async def test_an_engine_moves_only_what_the_router_can_continue(more: dict[str, Any], movable: bool) -> None:
    router, p, d = fleet([well], [engine(1, [1])])
    await ask(router, request(**more))
    await at_rest(p, d)
    assert d.replicas[0].calls[0].movable is movable


async def test_the_wait_for_the_next_engine_is_no_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router would learn that steps of decode are slow."""
    began: list[float] = []
    ended: list[float] = []

    async def late(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(30)
        async for item in engine(2, [2])(call, turn):
            yield item

    router, p, d = fleet([well], [late, Stops(TRANSFER)])
    d.in_order = True
    planner = router.models[0].planner
    observe = planner._observe_steps  # noqa: SLF001

    def observed(inflight: Any, load: Any, tokens: int, now: float) -> None:
        ended.append(now)
        observe(inflight, load, tokens, now)

    monkeypatch.setattr(planner, "_observe_steps", observed)
    await ask(router, request())
    await at_rest(p, d)
    assert len(ended) == 2
    assert ended[0] - began[0] < 1
