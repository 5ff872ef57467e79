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

    def accepting(self) -> set[str]:
        return {replica.identity for replica in self.replicas}

    @property
    def replica_count(self) -> int:
        return len(self.replicas)

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]:
        await asyncio.Event().wait()
        return []


def router(prefill: str, decode: str) -> Router:
    """Return a router with a replica of each identity."""

    async def silent(*_: object) -> Any:
        yield

    def role(identities: str) -> EnginePool:
        replicas = [Replica(f"r{number}", silent, identity=one) for number, one in enumerate(identities)]
        return cast(EnginePool, Hung(replicas))

    return Router(LIMITS, ModelEngines(role(prefill), role(decode)))


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "told", "reason"),
    [
        ("aa", "a", 200, "ok", None),
        ("ab", "bc", 200, "ok", None),
        ("aa", "b", 200, "degraded", "no prefill engine has the identity"),
        ("", "a", 200, "degraded", "no prefill engine accepts calls"),
        ("a", "", 503, "unavailable", None),
        ("", "", 503, "unavailable", None),
    ],
)
async def test_the_service_is_up_while_decode_is(
    prefill: str, decode: str, status: int, told: str, reason: str | None
) -> None:
    """Decode serves alone without prefill, so a load balancer must keep it.

    No hung actor delays the answer.
    """
    one = router(prefill, decode)
    app = build_http(cast(RouterReplica, one))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://tandem") as http:
        reply = await asyncio.wait_for(http.get("/health"), 1)
    assert reply.status_code == status
    answer = reply.json()
    assert str(answer.pop("reason", None)).startswith(str(reason))
    assert answer == {"status": told, "replicas": {"prefill": len(prefill), "decode": len(decode)}}
    assert one.ready == (status == 200)
