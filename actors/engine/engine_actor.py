"""Base class of the Prefill and Decode deployments: one engine behind an RPC server."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import ray
from pydantic import SecretStr
from ray import serve

from actors.engine.start_progress import StartProgress
from actors.engine.vllm_engine import VllmEngine
from actors.errors import EngineStartError
from actors.request import Accepted, Call, Heartbeat, ResponseStart, StreamChunk
from actors.rpc.messages import RpcRequest
from actors.rpc.server import RpcServer, replica_metadata
from actors.telemetry.engine_status import read_status
from configs.settings import RoleName, RoleSettings, ServiceSettings

logger = logging.getLogger(__name__)

CallItem = Accepted | Heartbeat | ResponseStart | StreamChunk | bytes

FIRST_REQUEST_TIMEOUT_S = 120.0
"""Timeout of an engine's first request, during which vLLM may compile kernels."""


class EngineActor:
    """Hosts one engine. Subclasses set the role."""

    role: RoleName

    # Serve awaits the constructor if it is asynchronous.
    async def __init__(self, settings: ServiceSettings, fallback_secret: SecretStr) -> None:  # type: ignore[misc]
        """Start the engine; Serve marks the replica ready when this returns.

        Serve may build the application on a node without this role's environment variables. So a
        secret in this process's environment takes precedence over `fallback_secret`.
        """
        settings = settings.with_secret(fallback_secret)
        self.replica = serve.get_replica_context().replica_id.unique_id
        logger.info("starting the %s engine of replica %s", self.role, self.replica)
        self._node_ip = ray.util.get_node_ip_address()
        with StartProgress(self.role, self.replica):
            self.engine = await VllmEngine.start(settings, self.role, self._node_ip)
            await self._open_rpc_server(settings.role(self.role))
            await self._prepare(settings)

    async def _prepare(self, settings: ServiceSettings) -> None:
        """Prepare the replica for its role; runs before Serve marks the replica ready."""

    async def _open_rpc_server(self, settings: RoleSettings) -> None:
        slots = settings.max_ongoing_sequences or self.engine.slots
        self._rpc_server = RpcServer(self.serve_request, slots, self._router_methods())
        host = settings.rpc_host or self._node_ip
        try:
            address = await self._rpc_server.open(host, settings.rpc_port)
        except OSError as error:
            where = f"{self.role}.rpc_host, rpc_port: {host}:{settings.rpc_port}"
            raise EngineStartError(f"{where} cannot be used: {error}") from error
        self._replica_metadata = replica_metadata(address, settings.max_queued_requests, slots=slots)

    def _router_methods(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """Return the methods available to routers, by name."""
        return {"ping": self.ping, "metrics": self.metrics, "status": self.status}

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the replica's metadata for routers; Serve's hook, called after the start."""
        return self._replica_metadata

    async def serve_request(self, request: RpcRequest) -> AsyncGenerator[CallItem, None]:
        """Answer a request of the RPC server."""
        async with aclosing(self.call(request.call)) as answer:
            async for item in answer:
                yield item

    async def call(self, call: Call) -> AsyncGenerator[CallItem, None]:
        """Serve `call` with this engine; closing the generator aborts the request in the engine."""
        yield Accepted(self.replica, self._rpc_server.ongoing)
        async with aclosing(self.engine.serve(call)) as answer:
            async for item in answer:
                yield item

    async def metrics(self) -> tuple[str, str]:
        """Return the replica id and the Prometheus exposition of actor, vLLM and connector."""
        from prometheus_client import REGISTRY, generate_latest

        return self.replica, generate_latest(REGISTRY).decode()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for the autoscaling policy; Serve's hook for autoscaled roles."""
        return self.engine.load() | {
            "ongoing": float(self._rpc_server.ongoing),
            "queued": float(self._rpc_server.queued()),
        }

    async def status(self) -> dict[str, Any]:
        """Return this replica's part of the status page."""
        from prometheus_client import REGISTRY

        return {
            "role": self.role,
            "replica": self.replica,
            "host": self._node_ip,
            **self.engine.describe(),
            **asdict(read_status(REGISTRY)),
        }

    async def ping(self) -> str:
        """Return the replica id. Raises EngineDownError if the engine has died."""
        await self.engine.check_health()
        return self.replica

    async def check_health(self) -> None:
        """Raise EngineDownError if the engine has died; Serve then replaces the replica."""
        await self.engine.check_health()

    async def __del__(self) -> None:
        """Drain the calls and end the engine; Serve awaits this hook."""
        if hasattr(self, "_rpc_server"):  # not set if the start failed
            await self._rpc_server.drain()
            await self._rpc_server.close()
        if hasattr(self, "engine"):
            await self.engine.close()
