"""/metrics is open and calls every engine: frequent requests share one call."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest

from actors.router.peer_routers import RouterReplica
from actors.telemetry.router_metrics import RouterMetrics
from app.http.routes import build_http
from configs.settings.router import RouterLimits

pytestmark = pytest.mark.usefixtures("virtual_time")


class Asked:
    """A router that counts its calls to the engines; each takes a while."""

    limits = RouterLimits()
    models = ()

    def __init__(self) -> None:
        self.metrics = RouterMetrics()
        self.asked = 0

    async def router_metrics(self) -> list[tuple[str, str]]:
        return [("r1", "# TYPE a gauge\na 1\n")]

    async def engine_metrics(self) -> list[tuple[str, str, str]]:
        await self._ask()
        return [("decode", "d1", "# TYPE a gauge\na 2\n")]

    async def _ask(self) -> None:
        self.asked += 1
        await asyncio.sleep(0.05)


def client(router: Asked) -> httpx.AsyncClient:
    app = build_http(cast(RouterReplica, router), [])
    return httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://tandem")


async def test_scrapes_share_an_answer() -> None:
    """Concurrent requests and those soon after share one answer."""
    router = Asked()
    async with client(router) as http:
        replies = await asyncio.gather(*(http.get("/metrics") for _ in range(20)))
        replies.append(await http.get("/metrics"))
    assert {reply.text for reply in replies} == {
        '# TYPE a gauge\na{role="router",replica="r1"} 1\na{role="decode",replica="d1"} 2\n'
    }
    assert router.asked == 1
