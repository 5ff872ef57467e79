"""Tandem's service with instant engines, until Ctrl-C: the router of `app.main` and real actors.

    python -m benchmarks.router.service ROUTERS PROXY_PORT PORT

Only vLLM is missing: the deployments, the router and the HTTP server are those of the product.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from actors.engine.asgi_call import AsgiApp
from actors.engine.engine_actor import Decode, Prefill
from actors.engine.vllm_engine import StopFlag, VllmEngine
from actors.engine_pool.serve_discovery import DiscoveryRouter
from actors.request import Item, ProducerAddress
from actors.rpc.messages import RpcRequest
from actors.rpc.server_connection import ServedStream
from app.main import DeployedModel, router_deployment
from benchmarks.router.engine import WHERE, freeze_gc, instant
from configs.settings.base import RoleName
from configs.settings.deployment import RoleSettings
from configs.settings.router import RouterSettings, RoutingSettings
from testing.signals import interrupt_on_signals

SLOTS = 512
"""Slots of an engine, more than any arm needs."""


class NoLLM:
    """Interface of vLLM's engine that `actors.engine.vllm_engine` uses besides its application."""

    errored = False

    async def ping_rank(self, rank: int) -> None:
        """Answer as an engine core that runs."""

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        """Do nothing: this engine holds no KV."""


class Instant(Prefill, Decode):
    """Either role's actor, complete but for the engine: a decode actor calls prefill."""

    async def __init__(self, role: RoleName, slots: int = SLOTS) -> None:  # type: ignore[misc]
        await self.open(role, serve.get_replica_context().replica_id.unique_id, instant(), "nothing to replay", slots)

    async def open(
        self, role: RoleName, replica: str, app: AsgiApp, cannot_resume: str | None, slots: int = SLOTS
    ) -> None:
        """Set the state of an actor whose engine is this application, and listen for routers."""
        self.role, self.replica, self.running = role, replica, 0
        self._held = set()
        self._computing = [{}]
        self._changes_adapters = False
        self._producers = [msgspec.convert(WHERE, ProducerAddress)]
        llm: Any = NoLLM()
        self.engine = VllmEngine(llm, app, StopFlag(), AsyncExitStack(), cannot_resume, None, "nobody")
        await self._open_rpc_servers(RoleSettings(max_ongoing_sequences=slots, rpc_host="127.0.0.1"))
        freeze_gc()

    def serve_request(self, rank: int, request: RpcRequest, stream: ServedStream) -> AsyncGenerator[Item, None]:
        """Serve a call, which `running` counts until it ends."""
        return self._counted(super().serve_request(rank, request, stream))

    async def _counted(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        self.running += 1
        try:
            async with aclosing(items) as answer:
                async for item in answer:
                    yield item
        finally:
            self.running -= 1

    async def status(self) -> dict[str, Any]:
        """Return the leftovers: running calls, taken slots, and held transfers.

        Also returns the protocol version of each connection.
        """
        server = self._rpc_servers[0]
        left: dict[str, Any] = {"running": self.running, "ongoing": server.ongoing, "held": len(self._held)}
        connections = [connection._protocol.version for connection in server._connections]
        left["versions"] = sorted(filter(None, connections))
        return {"role": self.role, "replica": self.replica, "host": "127.0.0.1", **left}


def application(
    port: int,
    slots: int = SLOTS,
    replicas: int = 1,
    router_env: dict[str, str] | None = None,
    engine_env: dict[str, str] | None = None,
    routers: int | None = None,
) -> serve.Application:
    """Return the application; its routers answer on `port`.

    ``slots``       number of ongoing sequences of each engine; a router admits four times as many
    ``replicas``    number of engines of each role
    ``router_env``  additional environment variables of the routers
    ``engine_env``  additional environment variables of the engines
    ``routers``     number of routers, which share `port`; None: `replicas`
    """
    actor = serve.deployment(Instant).options(
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": engine_env or {}}},
        request_router_config=RequestRouterConfig(request_router_class=DiscoveryRouter),
        max_ongoing_requests=slots,
        num_replicas=replicas,
    )
    routing = RoutingSettings(policy="always_remote")
    routers = replicas if routers is None else routers
    settings = RouterSettings(http_port=port, leave_s=0.1, access_log=False, routing=routing, replicas=routers)
    prefill, decode = actor.options(name="Prefill"), actor.options(name="Decode")
    router = router_deployment(settings)
    if router_env:
        options = router.ray_actor_options or {}
        runtime_env = {"env_vars": {**options["runtime_env"]["env_vars"], **router_env}}
        router = router.options(ray_actor_options={**options, "runtime_env": runtime_env})
    more = () if slots == SLOTS else (slots,)  # an older revision's actor has no argument for it
    model = DeployedModel(prefill.bind("prefill", *more), decode.bind("decode", *more))
    return router.bind(settings, [model])


def deploy(app: serve.Application) -> None:
    """Run the application on this process's Ray cluster, or replace the one that runs."""
    serve.run(app, name="tandem")


@contextmanager
def running(port: int, proxy_port: int | None, app: serve.Application | None = None) -> Iterator[None]:
    """Run the service, or `app`, on a Ray cluster of this process.

    Also runs Ray Serve's HTTP proxy if `proxy_port` is set.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", namespace="serve", include_dashboard=False, num_cpus=4, log_to_driver=False)
    try:
        options = {"host": "127.0.0.1", "port": proxy_port or 0}
        serve.start(proxy_location="HeadOnly" if proxy_port else "Disabled", http_options=options)
        deploy(application(port) if app is None else app)
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    routers, proxy_port, port = map(int, sys.argv[1:])
    with suppress(KeyboardInterrupt), running(port, proxy_port, application(port, routers=routers)):
        interrupt_on_signals()
        signal.pause()
