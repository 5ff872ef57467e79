"""Base class of the Prefill and Decode deployments: one vLLM engine and its RPC servers."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from pydantic import SecretStr
from ray import serve

from actors.adapter_records import AdapterRecords
from actors.engine.node_failures import dead_nodes_now, grace_s, watch_nodes
from actors.engine.pair_warmup import WARM_UP_INTERVAL_S, every, model_suffix
from actors.engine.startup.serve_log import keep_serve_log
from actors.engine.startup.start_progress import StartProgress
from actors.engine.vllm_engine import VllmEngine
from actors.engine_pool.discovery import engine_names, ranked_metadata
from actors.errors import EngineStartError
from actors.process import prepare_process
from actors.request import Accepted, Call, Heartbeat, Moved, PrefillReport, ResponseStart, StreamChunk
from actors.rpc.client import Channels
from actors.rpc.messages import RpcRequest
from actors.rpc.server import RpcServer, replica_metadata
from actors.rpc.server_connection import ServedStream
from actors.telemetry.engine_status import read_status
from actors.tls import ReloadedTls, TlsFiles, rpc_files, server_context
from configs.settings.base import RoleName
from configs.settings.deployment import RoleSettings
from configs.settings.service import ServiceSettings

logger = logging.getLogger(__name__)

CallItem = Accepted | Heartbeat | ResponseStart | StreamChunk | PrefillReport | Moved | bytes


class EngineActor:
    """Actor that hosts one engine. Subclasses set the role.

    Each data-parallel rank has an RPC server, so a router treats it as an engine
    (docs/decisions/0047).
    """

    role: RoleName

    # Serve awaits the constructor if it is asynchronous.
    async def __init__(self, settings: ServiceSettings, fallback_secret: SecretStr) -> None:  # type: ignore[misc]
        """Start the engine; Serve marks the replica ready when this returns.

        Serve may build the application on a node without this role's environment, so a secret in
        the settings or in this process's environment precedes `fallback_secret`. Raises
        SettingsError if that secret is too short, and EngineStartError with the cause.
        """
        keep_serve_log()
        prepare_process(self.role.capitalize())
        settings = settings.with_secret(fallback_secret)
        self._changes_adapters = settings.allow_runtime_lora_updating
        self.replica = serve.get_replica_context().replica_id.unique_id
        logger.info("starting the %s engine of replica %s", self.role, self.replica)
        self._node_ip = ray.util.get_node_ip_address()
        with StartProgress(self.role, self.replica):
            self.engine = await VllmEngine.start(settings, self.role, self._node_ip)
            await self._open_rpc_servers(settings.role(self.role), rpc_files(settings))
            self._describe_ranks()
            await self._prepare(settings)
            if self._changes_adapters:
                context = serve.get_replica_context()
                adapters = self.engine.adapters
                await adapters.follow(AdapterRecords(context.app_name), model_suffix(context.deployment))
                comparing = every(WARM_UP_INTERVAL_S, adapters.compare)
                self._tasks.append(asyncio.create_task(comparing, name="compares-adapters"))

    async def _prepare(self, settings: ServiceSettings) -> None:
        """Prepare the replica for its role; runs before Serve marks the replica ready."""

    async def _watch_nodes(self, settings: ServiceSettings) -> None:
        node_lost_s = grace_s(settings.transfer.node_lost_s)
        lost = watch_nodes(self.engine.lose, node_lost_s, await dead_nodes_now())
        self._tasks = [asyncio.create_task(lost, name="watches-nodes")]

    def _describe_ranks(self) -> None:
        for described, metadata in zip(self.engine.described, self._rank_metadata, strict=True):
            metadata |= {name: described[name] for name in ("identity", "store") if described.get(name)}

    async def _open_rpc_servers(self, settings: RoleSettings, files: TlsFiles | None = None) -> None:
        tls = None if files is None else server_context(files)
        self._channels = Channels(None if files is None else ReloadedTls(files))
        slots = settings.max_ongoing_sequences or self.engine.slots
        host = settings.rpc_host or self._node_ip
        self.engines = engine_names(self.replica, len(self.engine.ranks))
        self._rpc_servers: list[RpcServer] = []
        self._rank_metadata: list[dict[str, Any]] = []
        for rank in self.engine.ranks:
            server = RpcServer(partial(self.serve_request, rank), slots, self._router_methods(rank))
            self._rpc_servers.append(server)
            port = settings.rpc_port + rank if settings.rpc_port else 0
            try:
                address = await server.open(host, port, tls)
            except OSError as error:
                where = f"{self.role}.rpc_host, rpc_port: {host}:{port}"
                raise EngineStartError(
                    f"{where} cannot be used: {error}; set an address of the node and a free port, or leave them unset"
                ) from error
            self._rank_metadata.append(replica_metadata(address, settings.max_queued_requests, slots=slots))

    def _router_methods(self, rank: int) -> dict[str, Callable[..., Awaitable[Any]]]:
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "metrics": self.metrics,
            "status": self.status,
        }
        if not self._changes_adapters:
            return methods
        adapters = self.engine.adapters
        methods["load_adapter"] = adapters.load
        methods["unload_adapter"] = adapters.unload
        return methods

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the replica's metadata for routers; Serve's hook, called after the start."""
        return ranked_metadata(self._rank_metadata)

    def serve_request(self, rank: int, request: RpcRequest, stream: ServedStream) -> AsyncGenerator[CallItem, None]:
        return self.call(rank, request.call)

    def accepted(self, rank: int) -> Accepted:
        return Accepted(self.engines[rank], self._rpc_servers[rank].ongoing)

    async def call(self, rank: int, call: Call) -> AsyncGenerator[CallItem, None]:
        yield self.accepted(rank)
        async with aclosing(self.engine.serve(call, rank)) as answer:
            async for item in answer:
                yield item

    async def metrics(self) -> tuple[str, str]:
        from prometheus_client import REGISTRY, generate_latest

        return self.replica, generate_latest(REGISTRY).decode()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for the autoscaling policy; Serve's hook for autoscaled roles."""
        return self.engine.load() | {
            "ongoing": float(sum(server.ongoing for server in self._rpc_servers)),
            # A router reports the queue length of the whole role to each rank that it calls, so a
            # sum over ranks would count it several times.
            "queued": float(max(server.queued() for server in self._rpc_servers)),
        }

    async def status(self) -> dict[str, Any]:
        from prometheus_client import REGISTRY

        return {
            "role": self.role,
            "replica": self.replica,
            "host": self._node_ip,
            **self.engine.describe(),
            **asdict(read_status(REGISTRY)),
        }

    async def engine_names(self) -> list[str]:
        await self.engine.check_health()
        return self.engines

    async def check_health(self) -> None:
        """Serve's hook: Serve replaces the replica after several failures in a row."""
        await self.engine.check_health()

    async def _drain(self) -> None:
        await asyncio.gather(*(server.drain() for server in getattr(self, "_rpc_servers", ())))

    async def __del__(self) -> None:
        """Drain the calls and end the engine; Serve awaits this hook."""
        # Open calls need the detection of lost nodes and new prefill replicas.
        await self._drain()
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        await asyncio.gather(*(server.close() for server in getattr(self, "_rpc_servers", ())))
        if (channels := getattr(self, "_channels", None)) is not None:
            channels.close()
        if hasattr(self, "engine"):
            await self.engine.close()
