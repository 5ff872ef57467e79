"""Clients that fill the router, read slowly, or ask for an explanation of their latency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from actors.request import Call
from actors.router import answer
from actors.router.client_request import ClientRequest
from app.http import generate, record
from app.http.auth import digest
from configs.settings.router import MIN_ONGOING_SEQUENCES
from tests.actors.behaviours import LIMITS, counted, engine, fleet, hangs, request, well
from tests.actors.fleet import Handle, Replica, at_rest, router_of
from tests.actors.router.test_delays import DELAY_S, Engines
from tests.app.http.servers import KEY, Client, client_of

pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_sequences_are_counted_and_not_requests() -> None:
    """Requests for seven answers and for one fill a router with a limit of eight."""
    router, prefill, decode = fleet([well], [hangs])
    router.limits = LIMITS.model_copy(update={"max_ongoing_sequences": 8})

    async def ask(wanted: ClientRequest) -> Client:
        client = Client(wanted)
        serving.append(client.serve(router))
        await asyncio.sleep(0.05)
        return client

    serving: list[asyncio.Task[None]] = []

    one, seven = await ask(request()), await ask(request(n=7))
    assert router.ongoing_sequences == 8
    refused = await ask(request())
    assert refused.status == 429
    seven.left.set()
    await asyncio.sleep(0.05)
    assert router.ongoing_sequences == 1
    one.left.set()
    await at_rest(prefill, decode)
    assert (router.ongoing, router.ongoing_sequences) == (0, 0)


async def test_a_body_that_never_ends() -> None:
    """After `body_timeout_s` the request is no longer admitted, and gets an answer."""
    router, prefill, decode = fleet([well], [hangs])
    router.limits = LIMITS.model_copy(update={"body_timeout_s": 0.05})

    async def endless() -> AsyncGenerator[bytes, None]:
        yield b'{"prompt": "and then'
        assert router.ongoing == 1
        await asyncio.sleep(60)

    async with client_of(router) as client:
        reply = await client.post("/v1/completions", content=endless())
    assert (reply.status_code, reply.json()["error"]["message"]) == (408, "the body did not arrive within 0.05 s")
    assert router.ongoing == 0
    await at_rest(prefill, decode)


def test_the_limit_follows_the_engines() -> None:
    """The default limit is four sequences for each slot of decode."""
    few = router_of(LIMITS, Handle([]), Handle([]))
    assert few.max_sequences == MIN_ONGOING_SEQUENCES
    replicas = [Replica(str(n), hangs) for n in range(64)]
    assert router_of(LIMITS, Handle([]), Handle(replicas)).max_sequences == 4 * 6400


class SlowClient(Client):
    """Client that reads a stream's first piece and then one per `piece_s`."""

    def __init__(self, piece_s: float) -> None:
        super().__init__(request(max_tokens=40))
        self._piece_s = piece_s

    async def send(self, message: dict[str, Any]) -> None:
        if self.pieces:
            await asyncio.sleep(self._piece_s)
        await super().send(message)


async def paced(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """An engine's answer longer than the request timeout: available data is sent at once."""
    async for item in engine(1, [1])(call, turn):
        yield item
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("piece_s", "ended", "whole"),
    [(0.1, True, True), (0.8, True, False), (60.0, False, False)],
    ids=["slowly", "too slowly", "nothing"],
)
async def test_a_client_that_reads_nothing_loses_its_slots(
    piece_s: float, ended: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `idle_timeout_s` both legs end, and an error event follows if the client reads again.

    A client that reads slowly receives everything, however long it takes.
    """
    monkeypatch.setattr(generate, "STREAM_END_S", 1.0)
    monkeypatch.setattr(answer, "TICK_S", 0.25)
    router, prefill, decode = fleet([well], [paced])
    router.limits = LIMITS.model_copy(update={"idle_timeout_s": 0.5})
    client = SlowClient(piece_s)
    await asyncio.wait_for(client.serve(router), 20)
    await at_rest(prefill, decode)
    assert router.ongoing == 0
    assert (client.ended, client.status) == (ended, 200)
    if ended:
        assert (b"the client read nothing" not in client.pieces[-1]) == whole


async def test_a_failed_send_ends_the_stream() -> None:
    """Serve's `send` may raise; the engine then computes for nobody."""
    router, prefill, decode = fleet([well], [engine(1, [1])])

    class Gone(Client):
        async def send(self, message: dict[str, Any]) -> None:
            await super().send(message)
            if len(self.pieces) > 1:
                raise OSError("Serve's proxy is gone")

    with pytest.raises(OSError, match="is gone"):
        await asyncio.wait_for(Gone(request(max_tokens=40)).serve(router), 20)
    await at_rest(prefill, decode)
    assert router.ongoing == 0


def asking(stream: bool = True) -> Client:
    return Client(request(stream=stream), x_tandem_explain="1")


def timing(client: Client) -> str:
    return client.headers.get(b"server-timing", b"").decode()


async def ask(engines: Engines, client: Client, **keys: Any) -> dict[str, float]:
    """Return the number of requests with each of these parts in the final records."""
    router: Any = engines.router
    await client.serve(router, **keys)
    assert (client.status, client.ended) == (200, True)
    await at_rest(engines.prefill, engines.decode)
    name, labels = "tandem_latency_breakdown_seconds_count", {"route": "remote"}
    return {part: counted(router, name, part=part, **labels) for part in ("prefill", "unexplained", "first_step")}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_asks_is_told_all(stream: bool) -> None:
    """The router delays the first bytes until it has all parts."""
    client = asking(stream)
    engines = Engines(**{"prefill": 0.05, "prefill's answer": DELAY_S})
    assert await ask(engines, client) == {"prefill": 1, "unexplained": 0, "first_step": 1}
    assert "prefill;" in timing(client)
    assert "unexplained" not in timing(client)


@pytest.mark.parametrize("keys", ["key_digests", "operator_digests"])
async def test_with_keys_only_an_operator_is_told(keys: str) -> None:
    """The decision tells which prefixes of other clients are cached. The answer is the same."""
    client = asking()
    await ask(Engines(), client, **{keys: [digest(KEY)]})
    assert bool(timing(client)) == (keys == "operator_digests")


async def test_a_client_that_asks_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client receives the parts known so far, and the router records these."""
    monkeypatch.setattr(record, "ACCOUNT_S", 0.01)
    client = asking()
    assert await ask(Engines(**{"prefill's answer": 60}), client) == {"prefill": 0, "unexplained": 1, "first_step": 1}
    assert "unexplained;" in timing(client)


@pytest.mark.parametrize(("late_s", "prefill"), [(0.05, 1), (60, 0)])
async def test_what_is_kept_waits_for_the_end_of_the_answer(late_s: float, prefill: int) -> None:
    """A client without the header waits for nothing; its request is recorded once."""
    engines = Engines(**{"prefill": 0.05, "prefill's answer": late_s, "streaming": DELAY_S})
    found = await ask(engines, Client(request()))
    assert found == {"prefill": prefill, "unexplained": 1 - prefill, "first_step": 1}
