"""KV connector for prefill/decode disaggregation. Forwards vLLM's calls to its two sides.

vLLM creates one instance in the scheduler, which calls ``scheduler_side/``, and one in each worker,
which calls ``worker_side/``. With ``store``, calls also go to the KV store's two (``kv_store/``).

    KVTransferConfig(
        kv_connector="TandemConnector",
        kv_connector_module_path="connectors.vllm_hma.connector",
        kv_role="kv_producer" | "kv_consumer" | "kv_both",
        kv_connector_extra_config={...},  # connectors/vllm_hma/config.py
    )
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.errors import ConfigurationError
from connectors.store.settings import parse_settings
from connectors.vllm_hma.config import ConnectorConfig, parse_config, with_port_of_rank
from connectors.vllm_hma.handshake.processes import process_start_s
from connectors.vllm_hma.kv_store.orders import RankCache
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.kv_store.worker import SpoiledSteps, StoreWorker
from connectors.vllm_hma.metrics import MetricHooks, TandemStats
from connectors.vllm_hma.model.drafts import check_method, check_store, reads_next_token
from connectors.vllm_hma.model.identity import model_identity
from connectors.vllm_hma.model.kv_cache_layout import requested_layout
from connectors.vllm_hma.model.media import check_media, reads_whole_images
from connectors.vllm_hma.model.translate import check_stored_states, engine_layout, group_shapes, only_states_can_lag
from connectors.vllm_hma.orders import EncodedAgentMetadata, Orders
from connectors.vllm_hma.plugin import prepare_process
from connectors.vllm_hma.reports import WorkerReport
from connectors.vllm_hma.scheduler_side.scheduler import SchedulerConnector
from connectors.vllm_hma.upstream.parent_watchdog import end_with_parent
from connectors.vllm_hma.upstream.vllm_coordinator import end_coordinator_with_parent
from connectors.vllm_hma.upstream.vllm_emitted_tokens import prepare_v1_runner, restore_output
from connectors.vllm_hma.upstream.vllm_failed_loads import recompute_failed_loads
from connectors.vllm_hma.worker_side.worker import WorkerConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# For installations without entry points, or with a VLLM_PLUGINS without ``tandem`` (plugin.py).
prepare_process()
end_coordinator_with_parent()


class TandemConnector(MetricHooks, KVConnectorBase_V1, SupportsHMA):
    """vLLM connector that sends a prompt's KV from a prefill engine to a decode engine while
    prefill computes it. Both engines use this class.

    The constructor raises ConfigurationError for invalid settings, and ConfigurationError or
    UnsupportedCacheError for an engine that the connector does not support.
    """

    _cache_hit_source = CacheHitSource.P2P

    transfers = True
    """Whether this class exchanges KV with other engines; False: it has the store only."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        recompute_failed_loads(transfer)
        if self.transfers:
            _check_transfers(vllm_config)
            config = parse_config(transfer.kv_connector_extra_config)
        else:
            config = ConnectorConfig(store=parse_settings(transfer.kv_connector_extra_config))
        check_media(vllm_config)
        parallel = vllm_config.parallel_config
        if config.store is not None:
            check_store(vllm_config)
            check_stored_states(kv_cache_config)
            # vLLM gives each rank of a model without experts a size of 1, but its own index.
            if self.transfers and (parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0):
                raise ConfigurationError(
                    "kv_connector_extra_config: store is not tested with several data-parallel ranks; remove store, or "
                    "use one rank"
                )
        self._only_states_can_lag = only_states_can_lag(kv_cache_config)
        # An engine id may be configured; the instance id makes the incarnation new at every start.
        incarnation = f"{transfer.engine_id}.{vllm_config.instance_id}"
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        self._store_scheduler: StoreScheduler | None = None
        self._store_worker: StoreWorker | None = None
        # Failed loads of this connector's store, or of another child of TandemMultiConnector,
        # spoil steps.
        self._spoiled = SpoiledSteps(vllm_config.max_concurrent_batches)
        max_model_len = vllm_config.model_config.max_model_len
        if role is KVConnectorRole.SCHEDULER:
            if self.transfers:
                end_with_parent()
            tp_size = parallel.tensor_parallel_size
            # Data-parallel ranks may share a host and have the same configuration, so each needs a
            # port of its own.
            config = with_port_of_rank(config, parallel.data_parallel_index)
            shapes = group_shapes(vllm_config, kv_cache_config)
            step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self._scheduler = SchedulerConnector(
                config,
                incarnation,
                tp_size,
                shapes,
                step_tokens,
                drafts_read_next_token=reads_next_token(vllm_config),
                speculates=vllm_config.speculative_config is not None,
                lookahead_tokens=vllm_config.num_lookahead_tokens,
                whole_images=reads_whole_images(vllm_config),
                receives=transfer.is_kv_consumer,
            )
            self._scheduler.described["kv_cache"] = {
                "blocks": kv_cache_config.num_blocks,
                "groups": [(group.block_tokens, group.kept_tokens) for group in shapes],
            }
            if config.store is not None:
                answers = vllm_config.speculative_config is None
                self._store_scheduler = StoreScheduler(config.store, max_model_len, answers)
        else:
            # Refuse unsupported caches before vLLM allocates memory.
            group_shapes(vllm_config, kv_cache_config)
            if not vllm_config.use_v2_model_runner:
                prepare_v1_runner()
            if self.transfers:
                self._worker = WorkerConnector(config, incarnation, vllm_config, kv_cache_config)
            if config.store is not None:
                self._store_worker = StoreWorker(config.store, max_model_len, self._spoiled)

    @property
    def scheduler(self) -> SchedulerConnector:
        assert self._scheduler is not None, "this instance has the worker role, so it has no scheduler side"
        return self._scheduler

    @property
    def worker(self) -> WorkerConnector:
        assert self._worker is not None, "this instance has the scheduler role, or no transfers"
        return self._worker

    @property
    def store(self) -> StoreScheduler:
        assert self._store_scheduler is not None, "this instance has the worker role, or no store"
        return self._store_scheduler

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True if vLLM may use a cached full-attention prefix without the states at its end, which
        a transfer then supplies. False without states, or if blocks of other layers can also be
        missing.
        """
        return self.transfers and self._only_states_can_lag

    @property
    def requires_kv_delivery(self) -> bool:
        """False without transfers: a lost store is a miss; True drops outputs of preemptions."""
        return self.transfers and super().requires_kv_delivery

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return requested_layout(vllm_config)

    # Scheduler side.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.blocks.bind(kv_cache_manager)

    def has_pending_push_work(self) -> bool:
        """Return whether an idle engine must step: workers report ends of quarantine and copies."""
        store = self._store_scheduler
        return bool(self.scheduler.quarantine) or (store is not None and store.copying)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if not self.transfers:
            self.store.publish([each for _, each in sorted(metadata.items()) if isinstance(each, RankCache)])
            return
        encoded = {rank: each for rank, each in metadata.items() if isinstance(each, EncodedAgentMetadata)}
        engine = self.scheduler.publish(encoded)
        if self._store_scheduler is not None:
            self._store_scheduler.publish([RankCache(worker.layout, worker.identity) for worker in engine.workers])
            if self._store_scheduler.description is not None:
                self.scheduler.described["store"] = self._store_scheduler.description

    def on_new_request(self, request: Request) -> None:
        # Call the transfer's scheduler side first: it may remove the last token of a prefill
        # prompt.
        if self.transfers:
            self.scheduler.new_request(request)
        restore_output(request)
        if self._store_scheduler is not None:
            self._store_scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return (tokens to receive or load, whether the load is asynchronous).

        The tokens follow the first ``num_computed_tokens``. None tokens defer the request to the
        next step, while it waits for a shared transfer (``shared_transfers.py``), for the start of
        its prompt on the producer, or for the KV store: for a fetch, which the first call starts,
        or until all ranks have mapped staging.

        A request waits for a fetch only while that can save time (``store/load_costs.py``). One
        with a transfer may also load a stored prefix. Others load stored tokens within the step.
        """
        if self.scheduler.consumptions.awaits_prefix(request.request_id):
            return None, False
        store = self._store_scheduler
        if store is not None and not self.scheduler.consumptions.consumes(request.request_id):
            return store.matched_tokens(request, num_computed_tokens), False
        tokens = self.scheduler.consumptions.matched_tokens(request, num_computed_tokens)
        if store is not None and tokens != 0:
            end_token = self.scheduler.consumptions.end_token(request)
            if not store.prefix_ready(request, num_computed_tokens, end_token, queued=tokens is None):
                return None, False
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return all groups: vLLM zeroes only the blocks that ``Blocks.zero_edges`` adds."""
        return (
            self._kv_cache_config.transfer_group_ids
            if self.transfers
            else super().get_loaded_kv_cache_group_ids(request)
        )

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        tables, store, loaded_token = blocks.get_block_ids(), self._store_scheduler, 0
        if store is not None and num_external_tokens and self.scheduler.consumptions.consumes(request.request_id):
            end_token = self.scheduler.consumptions.end_token(request)
            loaded_token = store.load_prefix(request, tables, end_token - num_external_tokens, end_token)
        received = self.scheduler.consumptions.after_alloc(request, tables, num_external_tokens, loaded_token)
        if received is not None and self._kv_cache_config.needs_kv_cache_zeroing:
            self.scheduler.blocks.zero_edges(request.request_id, received.start_token)
        if store is not None and received is None:
            store.after_alloc(request, tables, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if (
            self._store_scheduler is None
            or not num_external_tokens
            or self.scheduler.consumptions.receives(request.request_id)
        ):
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        return {self._store_scheduler.source(request.request_id): num_external_tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        orders = self.scheduler.orders(scheduler_output)
        if self._store_scheduler is not None:
            orders.store = self._store_scheduler.orders(scheduler_output)
        return orders

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # Spoil before the report is applied: it may complete objects computed from blocks whose
        # load has failed. A MultiConnector reports the failed loads of all its children. After an
        # asynchronous load this costs stores for nothing, but its blocks cannot be told apart.
        if self._store_scheduler is not None and connector_output.invalid_block_ids:
            self._store_scheduler.spoil()
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.scheduler.quarantine.take(report)
            self.scheduler.consumptions.due(report.due)
            if self._store_scheduler is not None and report.store is not None:
                self._store_scheduler.take(report.store)
        if not self.transfers:
            return
        if self._store_scheduler is not None:
            self._store_scheduler.received(
                (connector_output.finished_recving or set()) - connector_output.failed_recving
            )
        self.scheduler.productions.sent(connector_output.finished_sending or set())
        # vLLM has already read failed_recving, and reads finished_recving after this call
        # (vllm/v1/core/sched/scheduler.py, ``_update_from_kv_xfer_finished``).
        connector_output.finished_recving = self.scheduler.consumptions.received(
            connector_output.finished_recving or set(), connector_output.failed_recving
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._store_scheduler is not None:
            self._store_scheduler.finished(request)
        return self.scheduler.finished(request, block_ids) if self.transfers else (False, None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Accept one group, for a MultiConnector of which another child lacks HMA support."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Stop sharing KV with other engines until this engine restarts. Return True.

        Transfers of finished prefill requests continue, and so do those that this engine is
        receiving. The KV store uses a random namespace. Called by
        ``reset_prefix_cache(reset_connector=True)``.
        """
        if self.transfers:
            self.scheduler.reset()
        if self._store_scheduler is not None:
            self._store_scheduler.reset()
        return True

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)
        if self._store_worker is not None:
            if self._worker is not None:
                layout = self._worker.runtime.agent_metadata.layout
            else:
                rank = get_tensor_model_parallel_rank()
                layout = engine_layout(self._vllm_config, self._kv_cache_config, kv_caches, rank)
            self._store_worker.register(layout, list(kv_caches.values()))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._worker is not None:
            return EncodedAgentMetadata(self._worker.agent_metadata)
        assert self._store_worker is not None
        identity = model_identity(self._vllm_config, stored=True, unchanged_since_s=process_start_s())
        return self._store_worker.rank_cache(identity)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Orders)
        if self._worker is not None:
            self._worker.before_forward(kv_connector_metadata)
        self._spoil(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._store_worker is not None:
            self._store_worker.begin_step()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Copy stored KV into blocks. Transfers are asynchronous: ``wait_for_save`` starts them."""
        orders = self._orders()
        if self._store_worker is not None and orders.store is not None:
            broken = self._store_worker.load(orders.store)
            # This rank's transfer fills the blocks that the store did not fill.
            orders.receives = [
                replace(each, loaded_token=0) if each.request_id in broken else each for each in orders.receives
            ]
            self._spoil(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after all its KV has arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """The step has computed a layer or, on an accelerator, queued its kernels."""
        if self._worker is not None:
            self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        orders = self._orders()
        if self._worker is not None:
            self._worker.after_forward(orders)
        if self._store_worker is not None and orders.store is not None:
            self._store_worker.store(orders.store)
        self._spoiled.end_step()

    def spoil(self) -> None:
        """Neither send nor store KV of this step and scheduled ones: a child's load has failed."""
        self._spoiled.load_failed()
        if self._store_worker is not None:
            self._store_worker.spoil()
        self._spoil(self._orders())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._store_worker is None else self._store_worker.not_loaded()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults() if self._worker is None else self._worker.runtime.results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = None if self._worker is None else self._worker.runtime.report()
        copies = None if self._store_worker is None else self._store_worker.report()
        requested = self._orders().report
        if report is None and (copies is not None or requested):
            report = WorkerReport()
        if report is not None:
            report.store, report.requested = copies, requested
        return report

    # Metrics, on both sides.

    def get_kv_connector_stats(self) -> TandemStats | None:
        stats = TandemStats()
        for side in (self._worker, self._scheduler, self._store_scheduler):
            if side is not None and (changes := side.stats()) is not None:
                stats.aggregate(changes)
        # Children of a MultiConnector share their metrics: no numbers may replace another child's.
        stats.data["ranks"] = {f"{rank} {id(self)}": counts for rank, counts in stats.data["ranks"].items()}
        return None if stats.is_empty() else stats

    # Scheduler and worker side.

    def shutdown(self) -> None:
        for side in (self._scheduler, self._store_scheduler, self._worker, self._store_worker):
            if side is not None:
                side.close()

    def _spoil(self, orders: Orders) -> None:
        if self._spoiled and self._worker is not None:
            requests = {chunk.request_id for chunk in orders.chunks}
            self._worker.runtime.spoil(requests, "a load of KV failed in this step or a recent one")

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders


def _check_transfers(vllm_config: VllmConfig) -> None:
    # On CUDA and ROCm, vLLM turns the allocator on for sleep mode (vllm/config/model.py).
    for option in ("enable_sleep_mode", "enable_cumem_allocator"):
        if getattr(vllm_config.model_config, option):
            raise ConfigurationError(
                f"{option}: turn it off; with it, vLLM may release the KV cache while NIXL has it registered and "
                "peers may write to it"
            )
    if current_platform.is_cpu() and vllm_config.use_v2_model_runner:
        raise ConfigurationError(
            "VLLM_USE_V2_MODEL_RUNNER: set it to 0; on CPUs, vLLM's V2 model runner zeroes reallocated blocks "
            "before it calls the connector, which may still be sending them"
        )
    check_method(vllm_config)
