"""A decode engine's calls to prefill engines over real connections: each way in which they end."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from actors.engine.asgi_call import Notices
from actors.engine.engine_actor import Prefill
from actors.engine.split_call import SplitCall
from actors.errors import EngineDownError
from actors.request import (
    TRANSFER_FIELD,
    Accepted,
    Call,
    EngineTimings,
    FirstTokenChunk,
    Heartbeat,
    PrefillReport,
    ProducerAddress,
    ResponseStart,
    StreamChunk,
    TokenChunk,
)
from actors.rpc import client, protocol, server, server_connection
from actors.rpc.client import Channels
from actors.rpc.messages import PrefillCandidate, PrefillOrder, RpcFailure, RpcRequest
from actors.rpc.server import HANDED_BACK, RpcServer
from actors.rpc.server_connection import ServedStream
from tests.actors.behaviours import EVENTS, JSON
from tests.actors.rpc.world import WAIT_S, until

ANSWER = json.dumps({"usage": {"prompt_tokens": 9}}).encode()
PROMPT = EngineTimings(0.0, 0.1, 0.2, 0.3)
RECEIVED = EngineTimings(0.0, 0.1, 0.2, 0.3, kv_asked_s=0.0, kv_ended_s=0.2)
FIRST = FirstTokenChunk(b"data: 0\n\n", ((0,),), PROMPT, 9)
CALL = Call("POST", "/v1/completions", body=json.dumps({"prompt": "p", "stream": True}).encode())

Behaviour = Callable[["PrefillEngine"], AsyncGenerator[Any, None]]


class NoEngine:
    def __init__(self) -> None:
        self.discarded: list[str] = []
        self.waiting: deque[int] = deque()

    def take_waiting(self, rank: int) -> int:
        return self.waiting.popleft() if self.waiting else 0

    async def discard(self, transfer_id: str, rank: int) -> None:
        self.discarded.append(transfer_id)


class PrefillEngine(Prefill):
    """A prefill actor without an engine, behind its RPC server."""

    def __init__(self, behaviour: Behaviour, slots: int = 8) -> None:
        self._held = set()
        self._computing = [{}]
        self._behaviour = behaviour
        self.engine: Any = NoEngine()
        self.computed = asyncio.Event()
        self.calls: list[Call] = []
        self.running = 0
        self.server = RpcServer(partial(self.serve_request, 0), slots)

    async def call(self, rank: int, call: Call, notices: Notices | None = None) -> AsyncGenerator[Any, None]:
        self.calls.append(call)
        self.running += 1
        try:
            yield Accepted("p", 3)
            async for item in self._behaviour(self):
                yield item
            while self._behaviour is waits and notices is not None:
                yield await notices.get()
        finally:
            self.running -= 1

    def __del__(self) -> None:  # type: ignore[override]
        """Replace Serve's hook."""


async def waits(_: PrefillEngine) -> AsyncGenerator[Any, None]:
    """Yield the notices only: the prompt waits."""
    for nothing in list[Any]():
        yield nothing


async def computes(engine: PrefillEngine) -> AsyncGenerator[Any, None]:
    engine.computed.set()
    yield ResponseStart(200, JSON, PROMPT)
    yield ANSWER


async def samples(engine: PrefillEngine) -> AsyncGenerator[Any, None]:
    yield ResponseStart(200, EVENTS)
    yield FIRST
    engine.computed.set()


async def dies(_: PrefillEngine) -> AsyncGenerator[Any, None]:
    raise EngineDownError("killed")
    yield


async def breaks(_: PrefillEngine) -> AsyncGenerator[Any, None]:
    raise KeyError("a bug")
    yield


async def hangs(_: PrefillEngine) -> AsyncGenerator[Any, None]:
    await asyncio.sleep(WAIT_S)
    yield


async def lives(_: PrefillEngine) -> AsyncGenerator[Any, None]:
    while True:
        yield Heartbeat()
        await asyncio.sleep(0.01)


async def stops(engine: PrefillEngine) -> AsyncGenerator[Any, None]:
    """Stop before the prompt has begun."""
    engine.server._stop()  # noqa: SLF001 - `drain` waits for the call
    yield HANDED_BACK


async def stops_late(engine: PrefillEngine) -> AsyncGenerator[Any, None]:
    await asyncio.sleep(REFUSED_S)
    async for item in stops(engine):
        yield item


async def stops_and_aborts(engine: PrefillEngine) -> AsyncGenerator[Any, None]:
    """Fail the transfer of a prompt that is handed back: decode computes the prompt."""
    try:
        async for item in stops(engine):
            yield item
    finally:
        engine.computed.set()
        await asyncio.sleep(ABORT_S)
        engine.computed.clear()


async def is_drained(engine: PrefillEngine) -> AsyncGenerator[Any, None]:
    engine.server.refuse_calls(True)
    yield HANDED_BACK


async def samples_and_dies(engine: PrefillEngine) -> AsyncGenerator[Any, None]:
    yield ResponseStart(200, EVENTS)
    yield FIRST
    raise EngineDownError("killed")


def sends(*items: Any) -> Behaviour:
    async def serve(_: PrefillEngine) -> AsyncGenerator[Any, None]:
        for item in items:
            yield item

    return serve


REJECTS, FAILS = (sends(ResponseStart(status, JSON), b"{}") for status in (400, 500))


@dataclass
class World:
    """Prefill engines, a decode engine that calls them, and a router's connection to it."""

    prefill: list[PrefillEngine]
    order: dict[str, Any]
    channels: Channels = field(default_factory=Channels)
    router: Channels = field(default_factory=Channels)
    calls: list[Call] = field(default_factory=list)
    running: int = 0
    items: list[Any] = field(default_factory=list)
    failure: RpcFailure | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    kv: EngineTimings = RECEIVED

    async def open(self, stack: AsyncExitStack) -> None:
        candidates = []
        for number, engine in enumerate(self.prefill):
            address = await engine.server.open("127.0.0.1", 0)
            stack.push_async_callback(engine.server.close)
            candidates.append(PrefillCandidate(f"p{number}", address, ProducerAddress("e", "h", 1, 1, 16)))
        limits: dict[str, Any] = {
            "router": "r",
            "queued": 0,
            "samples": False,
            "seed": None,
            "attempts": 3,
            "timeout_s": WAIT_S,
            "silence_s": WAIT_S,
            "refused_s": WAIT_S,
            "hold_s": WAIT_S,
        }
        self.request = RpcRequest(CALL, "r", 0, prefill=PrefillOrder(tuple(candidates), **limits | self.order))
        self.server = RpcServer(self._answer, 8)
        self.address = await self.server.open("127.0.0.1", 0)
        stack.push_async_callback(self.server.close)
        stack.callback(self.channels.close)
        stack.callback(self.router.close)

    def _answer(self, request: RpcRequest, _: ServedStream) -> AsyncGenerator[Any, None]:
        assert request.prefill is not None
        split = SplitCall(request.call, request.prefill, self.channels, self._serve, lambda _: nullcontext())
        return split.items(Accepted("d"))

    async def _serve(self, call: Call, notices: Notices, _: float) -> AsyncGenerator[Any, None]:
        """Wait for the KV of the prompt if there is a producer, then stream two tokens."""
        self.calls.append(call)
        self.running += 1
        try:
            split = TRANSFER_FIELD in json.loads(call.body)
            while split and not any(engine.computed.is_set() for engine in self.prefill):
                if (notice := notices.pop()) is None:
                    await asyncio.sleep(0.002)
                else:
                    yield notice
            while (notice := notices.pop()) is not None:
                yield notice
            yield ResponseStart(200, EVENTS)
            yield TokenChunk(b"data: 0\n\n", ((0,),), self.kv if split else PROMPT)
            yield TokenChunk(b"data: 1\n\n", ((1,),))
        finally:
            self.running -= 1

    def send(self) -> int:
        self.channel = self.router.to(self.address)
        return self.channel.call(self.request, self)

    # The router's listener.

    def received(self, item: Any) -> None:
        self.items.append(item)

    def ended(self, lost: str | None, failure: RpcFailure | None = None) -> None:
        self.failure = failure
        self.over.set()

    @property
    def reports(self) -> list[str]:
        return [item.outcome for item in self.items if isinstance(item, PrefillReport)]

    @property
    def discarded(self) -> int:
        return sum(len(engine.engine.discarded) for engine in self.prefill)

    async def at_rest(self) -> None:
        """Wait until no engine runs or holds anything."""
        servers = [self.server, *(engine.server for engine in self.prefill)]
        await until(lambda: not self.running and not any(one.ongoing for one in servers))
        assert not any(engine.running or engine._held for engine in self.prefill)  # noqa: SLF001

    @property
    def groups(self) -> list[Any]:
        """Token groups of the answer, with the number of its sources."""
        starts = sum(isinstance(item, ResponseStart) for item in self.items)
        return [starts, *(group for item in self.items if isinstance(item, StreamChunk) for group in item.groups)]


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine ends no connection attempt and no authentication."""
    monkeypatch.setattr(client, "CONNECT_S", WAIT_S)
    monkeypatch.setattr(server_connection, "HELLO_S", WAIT_S)
    monkeypatch.setattr(server, "SLOT_WAIT_S", 0.0)
    monkeypatch.setattr(server, "KEPT_WITHIN_S", 0.0)
    monkeypatch.setattr(server, "CUT_OFF_S", 1.0)


DONE = ["accepted", "computed"]
REFUSED_S, ABORT_S = 0.2, 0.2


@pytest.mark.parametrize(
    ("behaviours", "order", "reports"),
    [
        pytest.param([computes], {}, DONE, id="computed"),
        pytest.param(["full", computes], {}, ["full", *DONE], id="full, the next one is not"),
        pytest.param(["full"], {"refused_s": 0.1}, ["full", "no_prefill"], id="all are full"),
        pytest.param(["leaving", computes], {}, ["leaving", *DONE], id="leaving"),
        pytest.param(["leaving"], {}, ["leaving", "no_prefill"], id="all leave"),
        pytest.param([is_drained, computes], {}, ["accepted", "full", *DONE], id="drained before it begins"),
        pytest.param([stops, computes], {}, ["accepted", "leaving", *DONE], id="stops before it begins"),
        pytest.param([stops_and_aborts, computes], {}, ["accepted", "leaving", *DONE], id="its abort takes long"),
        pytest.param([stops], {}, ["accepted", "leaving", "no_prefill"], id="stops, alone"),
        pytest.param(
            ["full", stops_late, computes],
            {"refused_s": REFUSED_S},
            ["full", "accepted", "leaving", *DONE],
            id="stops late, after a refusal",
        ),
        pytest.param(
            [REJECTS, computes],
            {},
            ["accepted", "rejected", "prefill_failed"],
            id="rejected",
        ),
        pytest.param([FAILS, computes], {}, ["accepted", "failed", *DONE], id="HTTP 500"),
        pytest.param([dies, computes], {}, ["accepted", "failed", *DONE], id="its engine dies"),
        pytest.param([breaks, computes], {}, ["accepted", "failed", *DONE], id="an internal error"),
        pytest.param(["gone", computes], {}, ["failed", *DONE], id="its process is gone"),
        pytest.param([hangs, computes], {"silence_s": 0.3}, ["accepted", "silent", *DONE], id="silent"),
        pytest.param([lives], {"timeout_s": 0.3}, ["accepted", "late", "prefill_failed"], id="late"),
        pytest.param([dies] * 4, {"attempts": 2}, ["accepted", "failed"] * 2 + ["prefill_failed"], id="too often"),
    ],
)
async def test_an_end_of_a_prefill_call(behaviours: list[Any], order: dict[str, Any], reports: list[str]) -> None:
    """The answer is whole, once, from KV or from decode alone; nothing is left anywhere."""
    engines = [PrefillEngine(hangs if isinstance(one, str) else one, 0 if one == "full" else 8) for one in behaviours]
    async with AsyncExitStack() as stack:
        world = World(engines, order)
        await world.open(stack)
        for behaviour, engine in zip(behaviours, engines, strict=True):
            if behaviour == "leaving":
                await engine.server.drain()
            elif behaviour == "gone":
                await engine.server.close()
        world.send()
        await asyncio.wait_for(world.over.wait(), WAIT_S)
        found = [item for item in world.items if isinstance(item, PrefillReport)]
        said = [report.message if report.outcome == "alone" else report.outcome for report in found]
        seen = [one for number, one in enumerate(said) if one != "full" or "full" not in said[:number]]
        assert (seen, world.failure, world.groups) == (reports, None, [1, (0,), (1,)])
        assert (TRANSFER_FIELD in json.loads(world.calls[-1].body)) == (reports[-1] == "computed")
        transfers = [json.loads(call.body)[TRANSFER_FIELD]["transfer_id"] for one in engines for call in one.calls]
        assert len(set(transfers)) == len(transfers)
        await world.at_rest()
        if reports[-1] == "computed":
            assert engines[-1].engine.discarded == []


async def test_prefills_first_token_is_passed_on_before_decodes_stream() -> None:
    async with AsyncExitStack() as stack:
        world = World([PrefillEngine(samples)], {"samples": True, "seed": 7})
        await world.open(stack)
        world.send()
        await asyncio.wait_for(world.over.wait(), WAIT_S)
        assert world.groups == [2, (0,), (0,), (1,)], "decode's stream first repeats the token"
        bodies = [json.loads(call.body) for call in (*world.prefill[0].calls, *world.calls)]
        assert [body["seed"] for body in bodies] == [7, 7]
        assert [body[TRANSFER_FIELD].get("prompt_multiple") for body in bodies] == [None, 16]
        computed = [item for item in world.items if isinstance(item, PrefillReport)][-1]
        assert (computed.prompt_tokens, computed.timings) == (9, PROMPT)
        await world.at_rest()
        assert world.discarded == 0


async def test_decode_repeats_prefills_token_alone_if_prefill_dies() -> None:
    """The token has been sent: decode computes the prompt and is forced to the same token."""
    async with AsyncExitStack() as stack:
        world = World([PrefillEngine(samples_and_dies), PrefillEngine(computes)], {"samples": True})
        await world.open(stack)
        world.send()
        await asyncio.wait_for(world.over.wait(), WAIT_S)
        assert world.groups == [2, (0,), (0,), (1,)]
        assert world.calls[-1].replay_log == ((0,),)
        assert world.reports[-1] == "alone"
        await world.at_rest()


STAGES: dict[str, tuple[Behaviour, Callable[[World], bool]]] = {
    "before prefill accepts": (hangs, lambda world: bool(world.items)),
    "while prefill computes": (hangs, lambda world: "accepted" in world.reports and world.running > 0),
    "while the KV moves": (computes, lambda world: "computed" in world.reports),
}


@pytest.mark.parametrize("way", ["cancelled", "the router dies", "decode dies"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_call_that_ends_early(stage: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines end the call, and prefill discards the KV that decode does not have."""
    behaviour, reached = STAGES[stage]

    async def receives_nothing(self: World, call: Call, notices: Notices, _: float) -> AsyncGenerator[Any, None]:
        self.running += 1
        try:
            while True:
                yield await notices.get()
        finally:
            self.running -= 1

    monkeypatch.setattr(World, "_serve", receives_nothing)
    async with AsyncExitStack() as stack:
        world = World([PrefillEngine(behaviour)], {})
        await world.open(stack)
        stream = world.send()
        await until(lambda: reached(world))
        called = bool(world.prefill[0].calls)
        if way == "cancelled":
            world.channel.cancel(stream)
        elif way == "the router dies":
            world.router.close()
        else:
            world.channels.close()  # its connection to prefill
            await until(lambda: not world.prefill[0].server.ongoing)
            world.router.close()
        await world.at_rest()
        if called:
            assert world.discarded == len(world.prefill[0].calls)


async def test_kv_that_decode_does_not_have_is_discarded() -> None:
    """After a failed transfer decode has computed the prompt itself."""
    async with AsyncExitStack() as stack:
        world = World([PrefillEngine(computes)], {}, kv=replace(RECEIVED, kv_failed=True))
        await world.open(stack)
        world.send()
        await asyncio.wait_for(world.over.wait(), WAIT_S)
        await world.at_rest()
        assert world.discarded == 1


@pytest.mark.parametrize("version", [1, 2])
async def test_a_router_or_a_prefill_engine_of_version_1(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older caller cancels each call; it discards KV itself, with the method `discard`."""
    monkeypatch.setattr(protocol, "NEWEST_VERSION", version)
    async with AsyncExitStack() as stack:
        world = World([PrefillEngine(computes)], {})
        await world.open(stack)
        channel = world.channels.to(world.request.prefill.candidates[0].address)  # type: ignore[union-attr]
        stream = channel.call(RpcRequest(CALL, "r", 0, "t", WAIT_S), world)
        await until(lambda: ANSWER in world.items)
        channel.cancel(stream)
        await world.at_rest()
        assert world.discarded == version - 1
