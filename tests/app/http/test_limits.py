"""Limit of the sequences in one router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from actors.router.client_request import ClientRequest
from app.http.routes import build_http
from configs.settings.router import MIN_ONGOING_SEQUENCES
from tests.actors.behaviours import LIMITS, fleet, hangs, request, well
from tests.actors.fleet import Handle, Replica, at_rest, router_of
from tests.app.http.test_cancelled_requests import Client

pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_sequences_are_counted_and_not_requests() -> None:
    """Requests for seven answers and for one fill a router with a limit of eight."""
    router, prefill, decode = fleet([well], [hangs])
    router.limits = LIMITS.model_copy(update={"max_ongoing_sequences": 8})
    surface: Any = build_http(router)  # type: ignore[arg-type]

    async def ask(wanted: ClientRequest) -> Client:
        client = Client(wanted)
        client.serving = asyncio.create_task(surface(client.scope, client.receive, client.send))  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        return client

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

    surface: Any = build_http(router)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(surface), base_url="http://tandem") as client:
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
