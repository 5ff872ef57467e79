"""vLLM's KV events for objects that this engine has stored in a tier or removed from it.

vLLM publishes them with its own events (``kv_events_config``). A block of an event is an object:
the block's hash is the object's key, and the block's size is the object's span in tokens. The
parent of a full-attention object is the object of the span before, so a subscriber can rebuild
prefixes. A prefix's first object, and objects of windows and states, have no parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, generate_block_hash_extra_keys, to_event_extra_keys

from connectors.planning.layout import GroupKind
from connectors.store.planning.prefix import ObjectRef
from connectors.store.planning.spans import StorePlan
from connectors.store.tiers.objects import ObjectName

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_MEDIA = {"memory": MEDIUM_CPU, "disk": MEDIUM_STORAGE}
_KEPT = 4096

Changes = Iterable[tuple[str, ObjectName]]
"""(tier label, object name) of each changed object."""


class StoreEvents:
    def __init__(self, plan: StorePlan) -> None:
        self._plan = plan
        self._described: dict[bytes, BlockStored] = {}

    def describe(self, ref: ObjectRef, names: Mapping[ObjectRef, ObjectName], request: Request) -> None:
        """``names`` also has the object before ``ref``."""
        spans = self._plan.groups[ref.group]
        full = spans.group.kind is GroupKind.FULL
        begin = ref.end_token - spans.span_tokens
        parent = names.get(ObjectRef(begin, ref.group)) if full else None
        lora = request.lora_request
        extra_keys, _ = generate_block_hash_extra_keys(request, begin, ref.end_token, 0)
        self._described[names[ref].key] = BlockStored(
            block_hashes=[names[ref].key],
            parent_block_hash=None if parent is None else parent.key,
            token_ids=list(request.all_token_ids[begin : ref.end_token]),
            block_size=spans.span_tokens,
            lora_id=None,
            medium=None,
            lora_name=None if lora is None else lora.lora_name,
            extra_keys=to_event_extra_keys([extra_keys]),
            group_idx=ref.group,
            kv_cache_spec_sliding_window=spans.group.window_tokens,
        )
        while len(self._described) > _KEPT:
            del self._described[next(iter(self._described))]

    def take(self, stored: Changes, removed: Changes) -> list[KVCacheEvent]:
        """Return the events of these changes, removals last.

        Skips objects that were not described: those that other engines had stored.
        """
        events: list[KVCacheEvent] = []
        for label, name in stored:
            event = self._described.get(name.key)
            if event is not None:
                events.append(msgspec.structs.replace(event, medium=_MEDIA[label]))
        for label in _MEDIA:
            hashes: list[ExternalBlockHash] = [name.key for tier, name in removed if tier == label]
            if hashes:
                events.append(BlockRemoved(block_hashes=hashes, medium=_MEDIA[label]))
        return events


def reports_events(config: VllmConfig) -> bool:
    return config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events
