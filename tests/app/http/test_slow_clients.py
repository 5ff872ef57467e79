"""Clients that read slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from actors.request import Call
from actors.router import answer
from app.http import generate
from app.http.routes import build_http
from tests.actors.behaviours import LIMITS, engine, fleet, request, well
from tests.actors.fleet import at_rest
from tests.app.http.test_cancelled_requests import Client

pytestmark = pytest.mark.usefixtures("virtual_time")


class SlowClient(Client):
    """Client that reads a stream's first piece and then one per `piece_s`."""

    def __init__(self, piece_s: float) -> None:
        super().__init__(request(max_tokens=40))
        self._piece_s = piece_s
        self.pieces: list[bytes] = []

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            if self.pieces:
                await asyncio.sleep(self._piece_s)
            self.pieces.append(message["body"])
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
    replica: Any = router
    http: Any = build_http(replica)
    await asyncio.wait_for(http(client.scope, client.receive, client.send), 20)
    await at_rest(prefill, decode)
    assert router.ongoing == 0
    assert (client.ended, client.status) == (ended, 200)
    if ended:
        assert (b"the client read nothing" not in client.pieces[-1]) == whole


async def test_a_failed_send_ends_the_stream() -> None:
    """Serve's `send` may raise; the engine then computes for nobody."""
    router, prefill, decode = fleet([well], [engine(1, [1])])
    client = Client(request(max_tokens=40))
    sent: list[Any] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if len(sent) > 2:
            raise OSError("Serve's proxy is gone")

    replica: Any = router
    http: Any = build_http(replica)
    with pytest.raises(OSError, match="is gone"):
        await asyncio.wait_for(http(client.scope, client.receive, send), 20)
    await at_rest(prefill, decode)
    assert router.ongoing == 0
