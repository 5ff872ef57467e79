"""Serve stops all roles of a service at once: requests that still arrive are served."""

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

from actors.engine.engine_actor import EngineActor
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


class Engine(EngineActor):
    """A role's actor, complete but for the engine, which answers after 0.1 s."""

    async def __init__(self, role: RoleName) -> None:  # type: ignore[misc]
        self.role = role
        self.replica = serve.get_replica_context().replica_id.unique_id
        self._changes_adapters = False
        self.engine: Any = SimpleNamespace(ranks=[0], slots=100, serve=answer, check_health=nothing, close=nothing)
        await self._open_rpc_servers(RoleSettings(rpc_host="127.0.0.1"))


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
            request_router_config=RequestRouterConfig(request_router_class=DiscoveryRouter),
            graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        )
        settings = RouterSettings(
            http_port=free_port(), leave_s=LEAVE_S, access_log=False, routing=RoutingSettings(policy="never_remote")
        )
        engines = (actor.options(name=role.capitalize()).bind(role) for role in ("prefill", "decode"))
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
