"""The Prefill and Decode deployments: actors with one vLLM engine and its RPC servers.

A prefill engine computes prompts and sends their KV to decode engines. A decode engine generates
tokens from it, or serves whole requests.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from http import HTTPStatus
from typing import Any

import ray
from pydantic import SecretStr
from ray import serve

from actors.adapter_records import AdapterRecords
from actors.engine.arguments import why_no_first_token
from actors.engine.asgi_call import Notices
from actors.engine.moves import LOOK_S, likeness, move_streams
from actors.engine.node_failures import dead_nodes_now, grace_s, watch_nodes
from actors.engine.pair_warmup import (
    CALL_MARGIN_S,
    WARM_UP_INTERVAL_S,
    PeerReplicas,
    ProbeParams,
    every,
    model_suffix,
    probe_timeout_s,
)
from actors.engine.split_call import SplitCall
from actors.engine.startup.serve_log import keep_serve_log
from actors.engine.startup.start_progress import StartProgress
from actors.engine.vllm_engine import PRODUCE, VllmEngine
from actors.engine_pool.engines import engine_names, ranked_metadata
from actors.errors import EngineStartError
from actors.process import prepare_process
from actors.request import Accepted, Call, Item, ResponseStart, StreamChunk
from actors.rpc.client import Channels
from actors.rpc.messages import RpcRequest
from actors.rpc.server import HANDED_BACK, RpcServer, replica_metadata
from actors.rpc.server_connection import ServedStream
from actors.telemetry.engine_status import DRAINED, read_status
from actors.tls import ReloadedTls, TlsFiles, rpc_files, server_context
from configs.settings.base import RoleName
from configs.settings.deployment import RoleSettings
from configs.settings.service import ServiceSettings

logger = logging.getLogger(__name__)

MOST_WARM = 1024


class EngineActor:
    """Actor that hosts one engine. Subclasses set the role.

    Each data-parallel rank has an RPC server, so a router treats it as an engine
    (docs/decisions/0047).
    """

    role: RoleName
    _drained = False

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
        node_lost_s = grace_s(settings.transfer.node_lost_s)
        lost = watch_nodes(self.engine.lose, node_lost_s, await dead_nodes_now())
        self._tasks = [asyncio.create_task(lost, name="watches-nodes")]
        self._tasks += [
            asyncio.create_task(self._empty(rank, server), name="empties-the-engine")
            for rank, server in enumerate(self._rpc_servers)
        ]

    async def _empty(self, rank: int, server: RpcServer) -> None:
        """Move or hand back calls of `rank` while `server` refuses new ones, until cancelled."""

    def _describe_ranks(self) -> None:
        for described, metadata in zip(self.engine.described, self._rank_metadata, strict=True):
            names = ("identity", "frontend", "store", "kv_cache")
            metadata |= {name: described[name] for name in names if described.get(name)}
            metadata["kv_tokens"] = self.engine.kv_tokens

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
            "drain": self.drain,
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

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the metadata that changes at run time; Serve's hook, called every ANNOUNCE_S."""
        return {"drained": True} if self._drained else {}

    async def drain(self, on: bool | None) -> dict[str, Any]:
        """Drain the engine for an operator, or undo that, and return its state.

        A drained engine refuses new calls, and moves or hands back running ones.

        ``on``  None: only return the state
        """
        if on not in (None, self._drained):
            logger.info("an operator %s this engine: %d sequences run", "drains" if on else "undrains", self.ongoing)
            self._drained = bool(on)
            DRAINED.set(self._drained)
            for server in self._rpc_servers:
                server.refuse_calls(self._drained)
        return self._progress()

    def _progress(self) -> dict[str, Any]:
        return {"role": self.role, "replica": self.replica, "drained": self._drained, "ongoing": self.ongoing}

    @property
    def ongoing(self) -> int:
        return sum(server.ongoing for server in self._rpc_servers)

    def serve_request(self, rank: int, request: RpcRequest, stream: ServedStream) -> AsyncGenerator[Item, None]:
        return self.call(rank, request.call)

    def accepted(self, rank: int) -> Accepted:
        return Accepted(self.engines[rank], self._rpc_servers[rank].ongoing)

    async def call(self, rank: int, call: Call, notices: Notices | None = None) -> AsyncGenerator[Any, None]:
        yield self.accepted(rank)
        async with aclosing(self.engine.serve(call, rank, notices)) as answer:
            async for item in answer:
                yield item

    async def metrics(self) -> tuple[str, str]:
        from prometheus_client import REGISTRY, generate_latest

        return self.replica, generate_latest(REGISTRY).decode()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for the autoscaling policy; Serve's hook for autoscaled roles."""
        return self.engine.load() | {
            "ongoing": float(self.ongoing),
            # A router reports the queue length of the whole role to each rank that it calls, so a
            # sum over ranks would count it several times.
            "queued": float(max(server.queued() for server in self._rpc_servers)),
        }

    async def status(self) -> dict[str, Any]:
        from prometheus_client import REGISTRY

        return {
            **self._progress(),
            "host": self._node_ip,
            **self.engine.describe(),
            **read_status(REGISTRY),
        }

    async def engine_names(self) -> list[str]:
        await self.engine.check_health()
        return self.engines

    async def check_health(self) -> None:
        """Serve's hook: Serve replaces the replica after several failures in a row."""
        await self.engine.check_health()

    async def __del__(self) -> None:
        """Drain the calls and end the engine; Serve awaits this hook."""
        # Open calls need the detection of lost nodes and new prefill replicas.
        await asyncio.gather(*(server.drain() for server in getattr(self, "_rpc_servers", ())))
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        await asyncio.gather(*(server.close() for server in getattr(self, "_rpc_servers", ())))
        if (channels := getattr(self, "_channels", None)) is not None:
            channels.close()
        if hasattr(self, "engine"):
            await self.engine.close()


class Prefill(EngineActor):
    """Actor of an engine whose connector is a KV producer."""

    role: RoleName = "prefill"

    async def _prepare(self, settings: ServiceSettings) -> None:
        await super()._prepare(settings)
        self._held: set[str] = set()
        self._computing: list[dict[str, Notices]] = [{} for _ in self.engine.ranks]
        self._probe_s = probe_timeout_s(settings.transfer)
        self._producers = [self.engine.producer(rank) for rank in self.engine.ranks]
        if problem := why_no_first_token(settings):
            logger.info("this engine samples no first tokens: %s", problem)
            self._producers = [replace(producer, first_token_multiple=0) for producer in self._producers]
        await self._warm_up_pairs()

    def _router_methods(self, rank: int) -> dict[str, Callable[..., Awaitable[Any]]]:
        return super()._router_methods(rank) | {"discard": partial(self.discard, rank)}

    def record_replica_metadata(self) -> dict[str, Any]:
        ranks = zip(self._rank_metadata, self._producers, strict=True)
        return ranked_metadata([metadata | {"producer": asdict(producer)} for metadata, producer in ranks])

    def serve_request(self, rank: int, request: RpcRequest, stream: ServedStream) -> AsyncGenerator[Any, None]:
        """Serve a call alone, or compute a prompt for decode if it has a transfer id."""
        if request.transfer_id is None:
            return super().serve_request(rank, request, stream)
        return self.call_and_hold(rank, request, request.transfer_id, stream)

    async def call_and_hold(
        self, rank: int, request: RpcRequest, transfer_id: str, stream: ServedStream
    ) -> AsyncGenerator[Any, None]:
        """Serve a call, then keep it ongoing until decode cancels it, for at most `hold_s`.

        The engine answers before decode has received the KV. The ongoing call makes a stopping
        replica wait for the handover, and the autoscaler counts it. A call that ends with an error
        status, or with a stream without tokens, has no KV and ends at once. Unless decode has the
        KV, discards the transfer: decode's connector may have asked for it.
        """
        self._held.add(transfer_id)
        notices = self._computing[rank][transfer_id] = Notices()
        computed = False
        try:
            async with aclosing(self.call(rank, request.call, notices)) as answer:
                async for item in answer:
                    if item is HANDED_BACK:
                        if computed:
                            continue
                        yield item
                        return
                    if isinstance(item, ResponseStart):
                        computed = item.status < HTTPStatus.BAD_REQUEST and not item.streams
                    computed = computed or isinstance(item, StreamChunk)
                    if computed:
                        self._computing[rank].pop(transfer_id, None)
                    yield item
            if computed:
                await asyncio.sleep(request.hold_s)
        finally:
            self._held.discard(transfer_id)
            self._computing[rank].pop(transfer_id, None)
            if not stream.done:
                await self.engine.discard(transfer_id, rank)

    async def _empty(self, rank: int, server: RpcServer) -> None:
        """Hand back the latest prompts, as many as vLLM has not begun: the oldest begin first.

        Looks again only after a step without the requests that were handed back.
        """
        told: set[str] = set()
        while True:
            await server.refuses.wait()
            computing, waiting = self._computing[rank], self.engine.take_waiting(rank)
            if told:
                told &= computing.keys()
            elif waiting and computing:
                told = set(list(computing)[-waiting:])
                logger.info("rank %d hands back %d of %d prompts", rank, len(told), len(computing))
                for transfer_id in told:
                    computing[transfer_id].put(HANDED_BACK)
            await asyncio.sleep(LOOK_S)

    async def probes_for(self, known: Collection[str]) -> list[dict[str, Any]]:
        """Return the `ProbeParams` of a probe on each rank whose engine id is not in `known`."""
        ranks = [
            rank
            for rank, producer in zip(self.engine.ranks, self._producers, strict=True)
            if producer.remote_engine_id not in known
        ]
        computing = (self.engine.probe(PRODUCE, self._probe_s, rank) for rank in ranks)
        probes = await asyncio.gather(*computing, return_exceptions=True)
        for rank, probe in zip(ranks, probes, strict=True):
            if isinstance(probe, TimeoutError):
                logger.warning("rank %d has computed no probe in %g s; decode requests it again", rank, self._probe_s)
            elif isinstance(probe, BaseException):
                raise probe
        return [probe for probe in probes if not isinstance(probe, BaseException)]

    async def _warm_up_pairs(self) -> None:
        decode = PeerReplicas("decode", self._probe_s)
        replicas = await decode.ask("engine_names")
        names = [name for names in replicas for name in names]
        probes = await asyncio.gather(*(self.probes_for(()) for _ in names))
        if names:
            await decode.ask("fetch_probes", dict(zip(names, probes, strict=True)))

    async def discard(self, rank: int, transfer_id: str) -> None:
        """Tell the connector of `rank` to free the KV of a transfer; for routers of version 1.

        Ignores transfers without an open call on this replica.
        """
        if transfer_id in self._held:
            await self.engine.discard(transfer_id, rank)


class Decode(EngineActor):
    """Actor of an engine whose connector is a KV consumer."""

    role: RoleName = "decode"

    async def _prepare(self, settings: ServiceSettings) -> None:
        self._peers = PeerReplicas("decode", CALL_MARGIN_S)
        self._peers.engines()
        await super()._prepare(settings)
        self._probe_s = probe_timeout_s(settings.transfer)
        self._prefill = PeerReplicas("prefill", self._probe_s)
        for metadata in self._rank_metadata:
            metadata["resumes"] = self.engine.can_resume
        # The latest MOST_WARM prefill engines with which a rank has run a probe, failed or not.
        self._warm: list[dict[str, None]] = [{} for _ in self.engine.ranks]
        await self.warm_up_new_pairs()
        looking = every(WARM_UP_INTERVAL_S, self.warm_up_new_pairs)
        self._tasks.append(asyncio.create_task(looking, name="meets-prefill-replicas"))

    def serve_request(self, rank: int, request: RpcRequest, stream: ServedStream) -> AsyncGenerator[Item, None]:
        if request.prefill is None:
            return super().serve_request(rank, request, stream)
        heartbeats = partial(self.engine.heartbeats, rank)

        def serve(call: Call, notices: Notices, began_at: float) -> AsyncGenerator[Any, None]:
            return self.engine.serve(call, rank, notices, began_at)

        return SplitCall(request.call, request.prefill, self._channels, serve, heartbeats).items(self.accepted(rank))

    async def _empty(self, rank: int, server: RpcServer) -> None:
        await move_streams(self.engine, rank, server, self._others)

    def _others(self) -> set[str]:
        """Return the `likeness` of each other replica's engines that can continue streams."""
        engines = self._peers.engines().values()
        return {
            likeness(one.metadata)
            for one in engines
            if one.replica != self.replica and not one.drained and one.metadata.get("resumes")
        }

    async def fetch_probes(self, probes: Mapping[str, list[ProbeParams]]) -> None:
        """Fetch the probes, by rank id, of a starting prefill replica."""
        ranks = enumerate(self.engines)
        await self._fetch_all([(rank, probe) for rank, name in ranks for probe in probes.get(name, ())])

    async def warm_up_new_pairs(self) -> None:
        await asyncio.gather(*(self._warm_up_new_pairs(rank) for rank in range(len(self._warm))))

    async def _warm_up_new_pairs(self, rank: int) -> None:
        replies = await self._prefill.ask("probes_for", frozenset(self._warm[rank]))
        await self._fetch_all([(rank, probe) for reply in replies for probe in reply])

    async def _fetch_all(self, probes: Sequence[tuple[int, ProbeParams]]) -> None:
        """Fetch probes in parallel: an unreachable engine takes the whole timeout."""
        fetches = await asyncio.gather(*(self._fetch(rank, probe) for rank, probe in probes), return_exceptions=True)
        for (_, probe), problem in zip(probes, fetches, strict=True):
            if isinstance(problem, TimeoutError):
                # Not fatal: after a failed transfer the decode engine computes the prompt.
                logger.warning(
                    "warm-up with prefill engine %s timed out; it is repeated, and requests use the engine meanwhile",
                    probe.get("remote_engine_id"),
                )
            elif problem is not None:
                raise problem

    async def _fetch(self, rank: int, probe: ProbeParams) -> None:
        await self.engine.probe(probe, self._probe_s, rank)
        warm = self._warm[rank]
        warm[probe["remote_engine_id"]] = None
        if len(warm) > MOST_WARM:
            del warm[next(iter(warm))]
        logger.info("warm-up with prefill engine %s is complete: its probe has run", probe["remote_engine_id"])
