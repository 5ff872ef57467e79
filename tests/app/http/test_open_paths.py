"""`/health` calls no engine, and frequent scrapes of `/metrics` share one call to each."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from actors.engine_pool.engines import EnginePool
from actors.router.model_router import ModelEngines
from actors.router.router import Router
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings.router import RouterLimits
from tests.actors.behaviours import LIMITS
from tests.actors.fleet import Handle, Replica
from tests.app.http.servers import client_of

pytestmark = pytest.mark.usefixtures("virtual_time")


def router(prefill: str, decode: str) -> Router:

    async def silent(*_: object) -> Any:
        yield

    def role(identities: str) -> EnginePool:
        handle = Handle([Replica(f"r{number}", silent, identity=one) for number, one in enumerate(identities)])
        handle._known = True  # noqa: SLF001 - Serve considers them running, and they answer no call
        return cast(EnginePool, handle)

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
    async with client_of(one) as http:
        reply = await asyncio.wait_for(http.get("/health"), 1)
    assert reply.status_code == status
    answer = reply.json()
    assert str(answer.pop("reason", None)).startswith(str(reason))
    assert answer == {"status": told, "replicas": {"prefill": len(prefill), "decode": len(decode)}}
    assert one.ready == (status == 200)


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


async def test_scrapes_share_an_answer() -> None:
    router = Asked()
    async with client_of(router) as http:
        replies = await asyncio.gather(*(http.get("/metrics") for _ in range(20)))
        replies.append(await http.get("/metrics"))
    assert {reply.text for reply in replies} == {
        '# TYPE a gauge\na{role="router",replica="r1"} 1\na{role="decode",replica="d1"} 2\n'
    }
    assert router.asked == 1
