"""The KV store as a KV connector of its own, for an engine without prefill/decode disaggregation.

KVTransferConfig(
    kv_connector="TandemStoreConnector",
    kv_connector_module_path="connectors.vllm_hma.store_connector",
    kv_role="kv_both",
    kv_load_failure_policy="recompute",
    kv_connector_extra_config={"store": {"path": "/mnt/nvme/tandem"}},  # store/settings.py
)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.errors import ConfigurationError
from connectors.store.settings import parse_settings
from connectors.vllm_hma.handshake.processes import process_start_s
from connectors.vllm_hma.kv_store.events import reports_events
from connectors.vllm_hma.kv_store.orders import RankCache, StoreOrders, StoreReport
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.kv_store.spoiled_steps import SpoiledSteps
from connectors.vllm_hma.kv_store.worker import StoreWorker
from connectors.vllm_hma.metrics import MetricHooks, TandemStats
from connectors.vllm_hma.model.drafts import check_store
from connectors.vllm_hma.model.identity import model_identity, store_fingerprint
from connectors.vllm_hma.model.kv_cache_layout import requested_layout
from connectors.vllm_hma.model.media import check_media
from connectors.vllm_hma.model.translate import check_stored_states, engine_layout, group_shapes
from connectors.vllm_hma.plugin import prepare_process

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# For installations without entry points, or with a VLLM_PLUGINS without ``tandem`` (plugin.py).
prepare_process()


class TandemStoreConnector(MetricHooks, KVConnectorBase_V1, SupportsHMA):
    """vLLM connector that stores KV of requests in chunks, and loads stored chunks instead of
    computing them.

    ``StoreScheduler.new_request`` excludes requests whose KV has no stable name. The constructor
    raises ConfigurationError for invalid settings, and ConfigurationError or UnsupportedCacheError
    for an engine that the store does not support. ``register_kv_caches`` raises as
    ``engine_layout`` and ``StoreWorker.register``.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigurationError(
                "kv_transfer_config: set kv_load_failure_policy='recompute'; with vLLM's default, 'fail', a failed "
                "load fails the request"
            )
        settings = parse_settings(transfer.kv_connector_extra_config)
        check_store(vllm_config)
        check_stored_states(kv_cache_config)
        check_media(vllm_config)
        self._scheduler: StoreScheduler | None = None
        self._worker: StoreWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            answers = vllm_config.speculative_config is None
            max_model_len, events = vllm_config.model_config.max_model_len, reports_events(vllm_config)
            self._scheduler = StoreScheduler(settings, max_model_len, answers, events)
        else:
            # Refuse unsupported caches before vLLM allocates memory.
            group_shapes(vllm_config, kv_cache_config)
            self._spoiled = SpoiledSteps(vllm_config.max_concurrent_batches)
            self._worker = StoreWorker(settings, vllm_config.model_config.max_model_len, self._spoiled)

    @property
    def scheduler(self) -> StoreScheduler:
        assert self._scheduler is not None, (
            "this instance of TandemStoreConnector has the worker role, so it has no scheduler side"
        )
        return self._scheduler

    @property
    def worker(self) -> StoreWorker:
        assert self._worker is not None, (
            "this instance of TandemStoreConnector has the scheduler role, so it has no worker side"
        )
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """False: KV that is not stored only causes a miss later.

        With True, vLLM would discard the outputs in flight of each request that it preempts, and
        compute them again.
        """
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout with the fewest runs: one per token of each head is slow to plan."""
        return requested_layout(vllm_config)

    # Scheduler side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler.publish([each for _, each in sorted(metadata.items()) if isinstance(each, RankCache)])

    def has_pending_push_work(self) -> bool:
        """Keep vLLM stepping an idle engine while a device copies: ranks report with a step."""
        return self.scheduler.copying

    def on_new_request(self, request: Request) -> None:
        self.scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return {self.scheduler.source(request.request_id): num_external_tokens} if num_external_tokens else {}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # Spoil before the report is applied: it may complete objects computed from blocks whose
        # load has failed. A MultiConnector reports the failed loads of all its children. After an
        # asynchronous load this costs stores for nothing, but its blocks cannot be told apart.
        if connector_output.invalid_block_ids:
            self.scheduler.spoil()
        if isinstance(connector_output.kv_connector_worker_meta, StoreReport):
            self.scheduler.take(connector_output.kv_connector_worker_meta)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request)
        return False, None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler.take_events()

    def reset_cache(self) -> bool | None:
        """Discard all fetches, and use a random namespace until the engine restarts. Return True.

        Current requests load and store no further KV; loads that are already ordered still run.
        Called by ``reset_prefix_cache(reset_connector=True)``.
        """
        self.scheduler.reset()
        return True

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = get_tensor_model_parallel_rank()
        layout = engine_layout(self._vllm_config, self._kv_cache_config, kv_caches, rank)
        self.worker.register(layout, list(kv_caches.values()))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        identity = model_identity(self._vllm_config, stored=True, unchanged_since_s=process_start_s())
        return self.worker.rank_cache(store_fingerprint(identity))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker.begin_step()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are copied before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: all layers are copied after the forward pass."""

    def wait_for_save(self) -> None:
        self.worker.store(self._orders())
        self._spoiled.end_step()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.not_loaded()

    def spoil(self) -> None:
        """Store no KV of this step and of steps already scheduled.

        TandemMultiConnector calls this on the worker side after a child's load has failed.
        """
        self.worker.spoil()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.report()

    # Metrics, on both sides.

    def get_kv_connector_stats(self) -> TandemStats | None:
        stats = None if self._scheduler is None else self._scheduler.stats()
        return stats if stats is not None and not stats.is_empty() else None

    # Scheduler and worker side.

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    def _orders(self) -> StoreOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StoreOrders)
        return orders
