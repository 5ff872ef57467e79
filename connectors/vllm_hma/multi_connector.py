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
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from connectors.errors import ConfigurationError
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.plugin import prepare_process
from connectors.vllm_hma.upstream.vllm_failed_loads import recompute_failed_loads

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

prepare_process()


@dataclass(frozen=True, slots=True)
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """Metadata of each child, in order; vLLM's MultiConnector passes the first child's to all."""

    children: tuple[KVConnectorHandshakeMetadata | None, ...]


class TandemMultiConnector(MultiConnector):
    """Connector that loads from the child with the highest score among those that have answered.

    Raises ConfigurationError if ``connectors`` or ``load_weights`` is invalid, or if a child
    TandemConnector receives KV but this connector is a kv_producer. Raises TypeError if the hybrid
    KV cache manager is on and a child does not support it. Errors of children propagate.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        recompute_failed_loads(transfer)
        _check_children(transfer, not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager)
        self._weights = _parse_weights(transfer)
        self._not_loaded: set[int] = set()
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Select the child that loads the request's KV: the highest score among those that have
        answered. Return its result: (tokens, whether the load is asynchronous).

        Tokens are None, which defers the request to the next step, if no child has answered. They
        are also None if no child has tokens and a TandemConnector or TandemStoreConnector has not
        answered: scheduling the request would end its transfer or its lookup in the KV store.
        Deadlines ensure that these children answer.
        """
        best, chosen, answered, waits = 0.0, None, False, False
        found: tuple[int, bool] = (0, False)
        for number, (child, weight) in enumerate(zip(self._connectors, self._weights, strict=True)):
            tokens, load_async = child.get_num_new_matched_tokens(request, num_computed_tokens)
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
        return (None, False) if not answered or (waits and chosen is None) else found

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        children = tuple(child.get_handshake_metadata() for child in self._connectors)
        return MultiHandshakeMetadata(children) if any(each is not None for each in children) else None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for number, child in enumerate(self._connectors):
            own = {}
            for rank, every in metadata.items():
                assert isinstance(every, MultiHandshakeMetadata)
                if (each := every.children[number]) is not None:
                    own[rank] = each
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

    def _read_load_errors(self) -> None:
        """Collect the block ids of failed loads. If there are any, tell Tandem's children to
        discard the KV of this step and of steps already scheduled. Other connectors have no such
        method, so they may send or store this KV.
        """
        found = super().get_block_ids_with_load_errors()
        if not found:
            return
        self._not_loaded |= found
        for child in self._connectors:
            if isinstance(child, TandemConnector):
                child.spoil()


def _check_children(transfer: KVTransferConfig, hma: bool) -> None:
    """Raise TypeError or ConfigurationError with the name of the first unusable child.

    With ``hma``, each must support the hybrid KV cache manager: vLLM's own assertion does not name
    the child. No TandemConnector may receive KV unless this connector does: vLLM keeps blocks of
    steps in flight out of the pool only if this connector's own role receives KV
    (``defer_block_free`` in vllm/v1/core/sched/scheduler.py).
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
