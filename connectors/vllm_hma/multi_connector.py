"""vLLM's MultiConnector with a weighted choice among its children.

    KVTransferConfig(
        kv_connector="TandemMultiConnector",
        kv_connector_module_path="connectors.vllm_hma.multi_connector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [{...}, {...}], "load_weights": [1.0, 2.0]},
    )

A child's score for a request is the product of its matched tokens and its weight. The request's KV
is loaded from the child with the highest score, among those that have answered. vLLM's
MultiConnector instead waits until all children have answered, and selects the first child with a
matched token. Both connectors store KV with all children.

Metrics name a child by its class, and by its position in ``connectors`` (from 0) if the class is
not the only one: ``TandemStoreConnector-1``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorPromMetrics,
    MultiKVConnectorStats,
)

from connectors.errors import ConfigurationError
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.metrics import MetricHooks, TandemPromMetrics, TandemStats
from connectors.vllm_hma.plugin import prepare_process
from connectors.vllm_hma.upstream.vllm_failed_loads import recompute_failed_loads

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

prepare_process()

_CHILDREN = "children"
"""Key of this connector's own statistics among those of its children."""


@dataclass(frozen=True, slots=True)
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """Handshake metadata of all children on one worker, in configured order.

    None stands for a child without metadata. vLLM's MultiConnector keeps the metadata of one child
    only, the first that has any, and passes it to all children.
    """

    children: tuple[KVConnectorHandshakeMetadata | None, ...]


class ChildTally:
    """Counts which child has answered and serves each request, on the scheduler side.

    ``labels``  names of the children in metrics, in configured order
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._stats = TandemStats()
        # By id of each request that is not scheduled yet: the answers of all children, and whether
        # the load would be asynchronous.
        self._answers: dict[str, tuple[list[int | None], bool]] = {}
        # Child by id of each request that waits for its asynchronous load.
        self._loading: dict[str, str] = {}
        self._pending = dict.fromkeys(labels, 0)

    def answered(self, request_id: str, answers: list[int | None], load_async: bool) -> None:
        self._answers[request_id] = answers, load_async

    def scheduled(self, request_id: str, chosen: int | None, tokens: int) -> None:
        # A request is scheduled twice, and asked once, if its load is asynchronous.
        answers, load_async = self._answers.pop(request_id, ([], False))
        for number, answer in enumerate(answers):
            label = self._labels[number]
            self._stats.count("child_queries", label)
            if number == chosen and tokens:
                self._stats.count("child_hits", label)
                self._stats.count("child_hit_tokens", label, tokens)
                if load_async:
                    self._loading[request_id] = label
            elif not answer:
                self._stats.count("child_misses", label)

    def arrived(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._loading.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        """Forget a request. One that was never scheduled is not counted."""
        self._answers.pop(request_id, None)
        self._loading.pop(request_id, None)

    def take(self) -> TandemStats | None:
        waits = Counter(self._loading.values())
        for answers, _ in self._answers.values():
            waits.update(label for label, answer in zip(self._labels, answers, strict=True) if answer is None)
        pending = {label: waits[label] for label in self._labels}
        self._stats.data["pending"] = dict(pending.items() - self._pending.items())
        self._pending = pending
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, TandemStats()
        return taken


class ChildPromMetrics(MultiKVConnectorPromMetrics):
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for label, stats in transfer_stats_data.items():
            kind = _kind_of(label)
            if isinstance(self._prom_metrics.get(kind), TandemPromMetrics):
                # Children share the metrics: a rank of one child must not replace that of another.
                stats = stats | {"ranks": {f"{label} {rank}": counts for rank, counts in stats["ranks"].items()}}
            super().observe({kind: stats}, engine_idx)


class TandemMultiConnector(MultiConnector):
    """MultiConnector that loads from the child with the highest score among the children that have
    answered.

    Raises ConfigurationError if ``connectors`` or ``load_weights`` is invalid or a TandemConnector
    receives KV although this connector's role is kv_producer, and TypeError if the hybrid KV cache
    manager is on and a child does not support it. Also raises what the constructors of the children
    raise.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        recompute_failed_loads(transfer)
        _check_children(transfer, not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager)
        self._weights = _parse_weights(transfer)
        self._not_loaded: set[int] = set()
        super().__init__(vllm_config, role, kv_cache_config)
        kinds = [type(child).__name__ for child in self._connectors]
        self._labels = [kind if kinds.count(kind) == 1 else f"{kind}-{number}" for number, kind in enumerate(kinds)]
        self._tally = ChildTally(self._labels)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Select the child with the highest score that has answered, and return its result.

        The request's KV is then loaded from this child. The result is (tokens, whether the load is
        asynchronous); (0, False) if no child has tokens. None tokens defer the request to the next
        step. This happens if no child has answered. It also happens if no child has tokens and a
        TandemConnector or TandemStoreConnector has not answered: scheduling the request now would
        end the child's transfer, or its lookup in the KV store, which normally takes more than one
        step. Both connectors answer in the end: deadlines end their waits for silent peers and for
        files.
        """
        best, chosen, answered, waits = 0.0, None, False, False
        found: tuple[int, bool] = (0, False)
        answers: list[int | None] = []
        for number, (child, weight) in enumerate(zip(self._connectors, self._weights, strict=True)):
            tokens, load_async = child.get_num_new_matched_tokens(request, num_computed_tokens)
            answers.append(tokens)
            if tokens is None:
                waits = waits or isinstance(child, TandemConnector)
                continue
            answered = True
            if tokens * weight > best:
                best, chosen, found = tokens * weight, number, (tokens, load_async)
        # Remove the choice of an earlier step, in which the request was not scheduled.
        self._requests_to_connector.pop(request.request_id, None)
        if chosen is not None:
            self._requests_to_connector[request.request_id] = chosen
        self._tally.answered(request.request_id, answers, found[1])
        return (None, False) if not answered or (waits and chosen is None) else found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        chosen = self._requests_to_connector.get(request.request_id)
        self._tally.scheduled(request.request_id, chosen, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._tally.arrived(connector_output.finished_recving or ())
        super().update_connector_output(connector_output)

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._tally.finished(request.request_id)
        return super().request_finished(request, blocks)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._tally.finished(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        children = tuple(child.get_handshake_metadata() for child in self._connectors)
        return MultiHandshakeMetadata(children) if any(each is not None for each in children) else None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for number, child in enumerate(self._connectors):
            own = {rank: each for rank, all_of in metadata.items() if (each := _of_child(all_of, number)) is not None}
            if own:
                child.set_xfer_handshake_metadata_pp_aware(own)

    # Worker side. A failed load within a step makes the KV that this step computes invalid, so
    # errors are read before each call in which a child may send or store this KV. vLLM reads them
    # once, after all these calls (vllm/v1/worker/kv_connector_model_runner_mixin.py).

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._read_load_errors()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self._read_load_errors()
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self._read_load_errors()
        super().wait_for_save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Errors that were not reported before are those of asynchronous loads, whose requests are
        # not running (for example vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py,
        # ``get_transfer_results``).
        found, self._not_loaded = self._not_loaded | super().get_block_ids_with_load_errors(), set()
        return found

    # Metrics. vLLM's MultiConnector adds up the statistics of children of one class.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        found = MultiKVConnectorStats()
        for label, child in zip(self._labels, self._connectors, strict=True):
            if (stats := child.get_kv_connector_stats()) is not None:
                found[label] = stats
        if (own := self._tally.take()) is not None:
            found[_CHILDREN] = own
        return found if found.data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        found = MultiKVConnectorStats()
        for label, stats in (data or {}).items():
            if isinstance(stats, KVConnectorStats):  # not serialized, within one process
                found[label] = stats
                continue
            kind = _kind_of(label)
            if kind == _CHILDREN:
                found[label] = MetricHooks.build_kv_connector_stats(stats)
                continue
            built = super().build_kv_connector_stats({kind: stats})
            if built is not None and kind in built.data:
                found[label] = built.data[kind]
        return found

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        arguments = (vllm_config, metric_types, labelnames, per_engine_labelvalues)
        built = super().build_prom_metrics(*arguments)
        assert isinstance(built, MultiKVConnectorPromMetrics)
        own = {_CHILDREN: MetricHooks.build_prom_metrics(*arguments)}
        return ChildPromMetrics(*arguments, built._prom_metrics | own)  # noqa: SLF001 - a subclass

    def _read_load_errors(self) -> None:
        """Collect the block ids of failed loads; if there are any, spoil the step.

        Tandem's children then discard the KV of this step and of steps already scheduled. Other
        connectors have no such method, so they may send or store this KV.
        """
        found = super().get_block_ids_with_load_errors()
        if not found:
            return
        self._not_loaded |= found
        for child in self._connectors:
            if isinstance(child, TandemConnector):
                child.spoil()


def _kind_of(label: str) -> str:
    return label.partition("-")[0]


def _of_child(metadata: KVConnectorHandshakeMetadata, number: int) -> KVConnectorHandshakeMetadata | None:
    assert isinstance(metadata, MultiHandshakeMetadata)
    return metadata.children[number]


def _check_children(transfer: KVTransferConfig, hma: bool) -> None:
    """Raise TypeError or ConfigurationError that names the first child that cannot be used.

    With ``hma``, each child must support the hybrid KV cache manager: vLLM's MultiConnector checks
    this with an assertion that does not name the child. No TandemConnector may receive KV unless
    this connector does: vLLM keeps blocks of steps in flight out of the pool only if this
    connector's own role receives KV (``defer_block_free`` in vllm/v1/core/sched/scheduler.py).
    """
    for child in _children(transfer):
        config = KVTransferConfig(**{"engine_id": transfer.engine_id, **child})
        kind = KVConnectorFactory.get_connector_class(config)
        if hma and not supports_hma(kind):
            raise TypeError(
                f"TandemMultiConnector: {config.kv_connector} does not support the hybrid KV cache manager "
                "(SupportsHMA); remove it, or set disable_hybrid_kv_cache_manager"
            )
        receives = config.is_kv_consumer and issubclass(kind, TandemConnector) and kind.transfers
        if receives and not transfer.is_kv_consumer:
            raise ConfigurationError(
                f"TandemMultiConnector has kv_role {transfer.kv_role}, but its {config.kv_connector} has "
                f"{config.kv_role}; set TandemMultiConnector's to kv_both, or the child's to kv_producer"
            )


def _parse_weights(transfer: KVTransferConfig) -> list[float]:
    number = len(_children(transfer))
    given = transfer.kv_connector_extra_config.get("load_weights", [1.0] * number)
    if not isinstance(given, list) or len(given) != number or not all(map(_is_weight, given)):
        raise ConfigurationError(
            f"kv_connector_extra_config: load_weights must be {number} positive numbers, one per entry of connectors, "
            f"not {given!r}"
        )
    return [float(weight) for weight in given]


def _is_weight(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def _children(transfer: KVTransferConfig) -> list[dict[str, Any]]:
    children = transfer.kv_connector_extra_config.get("connectors")
    if not isinstance(children, list) or not children:
        raise ConfigurationError(
            "kv_connector_extra_config: connectors must be a list of KV transfer configurations, one for each child"
        )
    return children
