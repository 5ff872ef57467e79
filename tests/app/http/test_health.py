"""/health answers from Serve's published list, calls no engine, and reports degraded service."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest

from actors.engine_pool.engines import EnginePool
from actors.router.model_router import ModelEngines
from actors.router.peer_routers import RouterReplica
from actors.router.router import Router
from app.http.routes import build_http
from tests.actors.behaviours import LIMITS
from tests.actors.fleet import Handle, Replica

pytestmark = pytest.mark.usefixtures("virtual_time")


class Hung(Handle):
    """Replicas that Serve considers running and that answer no call."""

    def ongoing(self) -> dict[str, int]:
        return {replica.name: 0 for replica in self.replicas}

    @property
    def replica_count(self) -> int:
        return len(self.replicas)

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]:
        await asyncio.Event().wait()
        return []


def router(prefill: int, decode: int) -> Router:
    async def silent(*_: object) -> Any:
        yield

    def role(count: int) -> EnginePool:
        return cast(EnginePool, Hung([Replica(f"r{number}", silent) for number in range(count)]))

    return Router(LIMITS, ModelEngines(role(prefill), role(decode)))


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "told"),
    [
        (2, 1, 200, "ok"),
        (0, 1, 200, "degraded"),
        (1, 0, 503, "unavailable"),
        (0, 0, 503, "unavailable"),
    ],
)
async def test_the_service_is_up_while_decode_is(prefill: int, decode: int, status: int, told: str) -> None:
    """Decode serves alone without prefill, so a load balancer must keep it.

    No hung actor delays the answer.
    """
    one = router(prefill, decode)
    app = build_http(cast(RouterReplica, one))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://tandem") as http:
        reply = await asyncio.wait_for(http.get("/health"), 1)
    assert reply.status_code == status
    assert reply.json() == {"status": told, "replicas": {"prefill": prefill, "decode": decode}}
    assert one.ready == (status == 200)
