"""Engines that stop or are drained, under Serve: requests that still arrive are served."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from actors.engine.engine_actor import Decode
from actors.engine.pair_warmup import PeerReplicas
from actors.engine_pool.serve_discovery import DiscoveryRouter
from actors.request import Call, ResponseStart
from app.http.http_server import SERVICE_PATH
from app.main import DRAIN_POLL_S, DeployedModel, router_deployment
from configs.settings.base import RoleName
from configs.settings.deployment import RoleSettings
from configs.settings.router import RouterSettings, RoutingSettings
from testing.ports import free_port

APPLICATION = "tandem"
LEAVE_S = 3.0
WAIT_S = 120.0


class Engine(Decode):
    """A role's actor, complete but for the engine, which answers after 0.1 s."""

    async def __init__(self, role: RoleName) -> None:  # type: ignore[misc]
        self.role = role
        self.replica = serve.get_replica_context().replica_id.unique_id
        self._changes_adapters = False
        self.engine: Any = SimpleNamespace(
            ranks=[0], slots=100, kv_tokens=0, serve=answer, check_health=nothing, close=nothing
        )
        await self._open_rpc_servers(RoleSettings(rpc_host="127.0.0.1"))
        self._rank_metadata[0] |= {"identity": "a", "frontend": "f", "resumes": True}
        self._peers = PeerReplicas("decode", 5.0)
        self._peers.engines()

    async def status(self) -> dict[str, Any]:
        return self._progress() | {"others": sorted(self._others())}


async def answer(_: Call, *__: Any) -> AsyncGenerator[Any, None]:
    await asyncio.sleep(0.1)
    yield ResponseStart(200, ((b"content-type", b"application/json"),))
    yield b"{}"


async def nothing() -> None:
    """Do nothing: there is no engine to end or to check."""


@pytest.fixture
def port() -> Iterator[int]:
    """Run the service; yield the router's port."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", namespace="serve", include_dashboard=False, num_cpus=4, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        actor = serve.deployment(Engine).options(
            ray_actor_options={"num_cpus": 0.1},
            request_router_config=RequestRouterConfig(
                request_router_class=DiscoveryRouter, request_routing_stats_period_s=0.2
            ),
            graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        )
        settings = RouterSettings(
            http_port=free_port(), leave_s=LEAVE_S, access_log=False, routing=RoutingSettings(policy="never_remote")
        )
        engines = (
            actor.options(name=role.capitalize(), num_replicas=replicas).bind(role)
            for role, replicas in (("prefill", 1), ("decode", 2))
        )
        serve.run(router_deployment(settings).bind(settings, [DeployedModel(*engines)]), name=APPLICATION)
        assert settings.http_port is not None
        yield settings.http_port
    finally:
        serve.shutdown()
        ray.shutdown()


async def test_a_deleted_service_serves_what_its_router_receives(port: int) -> None:
    """Clients send requests until a load balancer would have taken the router out."""
    url, refused = f"http://127.0.0.1:{port}", asyncio.Event()
    sent: list[asyncio.Task[httpx.Response]] = []

    async def refuses() -> None:
        """Wait until the router is unready, and as long as a readiness probe may take to notice."""
        while (await http.get(SERVICE_PATH)).status_code == 200:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)
        await asyncio.sleep(LEAVE_S / 2)
        refused.set()

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while (await http.get(SERVICE_PATH)).status_code != 200:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)
        deleting = asyncio.create_task(asyncio.to_thread(serve.delete, APPLICATION))
        noticing = asyncio.create_task(refuses())
        while not refused.is_set():
            sent.append(asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"})))
            await asyncio.sleep(0.05)
        replies = await asyncio.gather(*sent)
        await asyncio.gather(noticing, deleting)
    assert {(reply.status_code, reply.text) for reply in replies} == {(200, "{}")}


async def test_all_learn_that_an_engine_is_drained(port: int) -> None:
    """Routers leave it out and streams of other engines do not move to it, until it is undone."""

    async def settles(drained: str, *, all_accept: bool) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                found = {one["replica"]: one for one in (await http.get("/tandem/status")).json()["engines"]}
                others = {name: one["others"] for name, one in found.items() if one["role"] == "decode"}
                replicas = (await http.get("/health")).json()["replicas"]
                expected = {name: ["a f"] if all_accept or name == drained else [] for name in others}
                if replicas == {"prefill": 1, "decode": 1 + all_accept} and len(others) == 2 and others == expected:
                    return
                await asyncio.sleep(0.1)

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        await settles("", all_accept=True)
        first, second = (
            one["replica"] for one in (await http.get("/tandem/status")).json()["engines"] if one["role"] == "decode"
        )
        told = (await http.post(f"/tandem/drain/{first}")).json()
        assert told == {"role": "decode", "replica": first, "drained": True, "ongoing": 0}
        await settles(first, all_accept=False)
        assert (await http.post(f"/tandem/drain/{second}")).status_code == 409
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert (await http.delete(f"/tandem/drain/{first}")).json()["drained"] is False
        await settles(first, all_accept=True)
