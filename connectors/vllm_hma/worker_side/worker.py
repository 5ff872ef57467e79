"""Worker side of one rank: created before vLLM allocates the KV cache, started after that."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from connectors.codec import encode_agent_metadata
from connectors.protocol.agent_metadata import AgentMetadata, ModelIdentity
from connectors.protocol.wire import Peer
from connectors.transport.nixl import NixlTransport
from connectors.vllm_hma.config import ConnectorConfig
from connectors.vllm_hma.handshake.message_sender import agent_name
from connectors.vllm_hma.handshake.processes import own_process, process_start_s
from connectors.vllm_hma.kv_store.worker import StoreWorker
from connectors.vllm_hma.metrics import TandemStats
from connectors.vllm_hma.model.adapters import AdapterChanges, adapter_loads
from connectors.vllm_hma.model.drafts import draft_identity, drafting
from connectors.vllm_hma.model.identity import model_identity
from connectors.vllm_hma.model.translate import engine_layout, group_shapes
from connectors.vllm_hma.orders import Orders
from connectors.vllm_hma.worker_side.accelerator import check_integrity, compute_capability
from connectors.vllm_hma.worker_side.adapter_claims import AdapterClaims
from connectors.vllm_hma.worker_side.runtime import WorkerRuntime
from connectors.vllm_hma.worker_side.steps import StepFence

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class WorkerConnector:
    """Worker side of one rank. Raises UnsupportedCacheError. ``register`` starts the runtime."""

    def __init__(
        self, config: ConnectorConfig, incarnation: str, vllm_config: VllmConfig, cache: KVCacheConfig
    ) -> None:
        group_shapes(vllm_config, cache)
        if vllm_config.parallel_config.use_ubatching or drafting(vllm_config) is not None:
            # With ubatching, vLLM calls each layer once per part of the batch, so one call does not
            # complete the layer. A draft's layers run once per speculated token.
            config = config.model_copy(update={"streaming": "chunk"})
        self._config = config
        self._incarnation = incarnation
        self._vllm_config = vllm_config
        self._cache = cache
        self._runtime: WorkerRuntime | None = None
        self._adapters = AdapterClaims(adapter_loads())
        self._adapter_changes = AdapterChanges(adapter_loads())

    def register(self, views: Mapping[str, torch.Tensor]) -> None:
        """Describe the allocated cache, register its memory with NIXL, and start the runtime.

        ``views``  tensors of the cache by layer, as in ``engine_layout``

        Raises a TandemError if the cache, the weights, a network device or a backend cannot be
        used, OSError if a weight file or the trace file cannot be opened, NotImplementedError as
        ``engine_layout``, and RuntimeError if no thread can start.
        """
        tensors = list(views.values())
        fence = StepFence(tensors[0].device)
        if fence.device.type != "cpu":
            check_integrity(self._config.integrity, compute_capability(fence.device))
        rank = get_tensor_model_parallel_rank()
        layout = engine_layout(self._vllm_config, self._cache, views, rank)
        name = agent_name(Peer(self._incarnation, rank))
        devices = self._config.net_devices
        if devices:
            logger.info("Tandem: UCX uses only the network devices %s", ", ".join(devices))
        transport = NixlTransport(name, self._config.backends, devices)
        transport.register(layout.regions)
        agent_metadata = AgentMetadata(
            self._incarnation,
            self.identity(),
            layout,
            transport.kind,
            transport.metadata(),
            own_process(),
        )
        self._runtime = WorkerRuntime(
            self._config,
            agent_metadata,
            transport,
            fence,
            tensors,
            zeroes_blocks=self._cache.needs_kv_cache_zeroing,
            late_orders=self._vllm_config.use_v2_model_runner,
        )
        logger.info(
            "Tandem: rank %d registered %d regions, %d bytes, for %d groups",
            rank,
            len(layout.regions),
            sum(region.length_bytes for region in layout.regions),
            len(layout.groups),
        )

    def identity(self) -> ModelIdentity:
        started_s = process_start_s()
        draft = draft_identity(self._vllm_config, started_s)
        return model_identity(self._vllm_config, draft, self._config.store is not None, started_s)

    @property
    def runtime(self) -> WorkerRuntime:
        assert self._runtime is not None, "vLLM registers the cache before it runs a step"
        return self._runtime

    @property
    def agent_metadata(self) -> bytes:
        return encode_agent_metadata(self.runtime.agent_metadata)

    def before_forward(self, orders: Orders) -> None:
        orders.expects = [self._adapters.expect(each) for each in orders.expects]
        for finished in orders.finished:
            self._adapters.finished(finished.request_id)
        self.runtime.before_forward(orders)
        self._check_adapters()

    def _check_adapters(self) -> None:
        """Abort the deliveries of prompts whose adapter's identity has changed since ``expect``.

        vLLM's V2 model runner loads the adapters of a step before it calls the connector, the V1
        runner between ``before_forward`` and the first layer.
        """
        outdated = self._adapters.take_outdated()
        if outdated:
            self.runtime.spoil(outdated, "its adapter has been replaced")

    def layer_computed(self, layer: str) -> None:
        self._check_adapters()
        self.runtime.layer_computed(layer)

    def after_forward(self, orders: Orders) -> None:
        self._check_adapters()
        orders.receives = [self._adapters.receive(each) for each in orders.receives]
        self.runtime.after_forward(orders, StoreWorker.touching())

    def stats(self) -> TandemStats | None:
        stats = self.runtime.stats()
        for adapter, identity in self._adapter_changes.take().items():
            stats = stats or TandemStats()
            stats.adapter(f"{adapter.number} {adapter.path}", identity)
        return stats

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.close()
