"""Slots of staging that the ranks fill with a step's objects, until the writes to the tiers."""

from __future__ import annotations

from collections.abc import Sequence

from connectors.store.planning.moves import object_in_blocks
from connectors.store.planning.prefix import ObjectRef, completed_objects
from connectors.store.service import KVStore
from connectors.vllm_hma.kv_store.events import StoreEvents
from connectors.vllm_hma.kv_store.orders import Store, StoreReport
from connectors.vllm_hma.kv_store.requests import StoreRequest

# Not measured: objects of one model only need to compare by tokens per byte.
_COST_NS_PER_TOKEN = 100_000


class SlotFilling:
    """Slots that ranks are filling.

    ``ranks``    number of the engine's ranks; each fills its part of a slot
    ``answers``  whether to store KV of answers; False with speculative decoding
    ``events``   describes written objects for vLLM's KV events; None: events are not enabled
    """

    def __init__(self, store: KVStore, ranks: int, answers: bool, events: StoreEvents | None) -> None:
        self._store = store
        self._ranks = ranks
        # Speculative decoding rejects tokens after it has computed their KV.
        self._answers = answers
        self._events = events
        # Request, number of ranks that have reported, and whether one failed, by offset of a slot.
        self._slots: dict[int, tuple[StoreRequest, int, bool]] = {}

    def __len__(self) -> int:
        """Return the number of slots that ranks are filling."""
        return len(self._slots)

    def reserve(self, known: StoreRequest, ref: ObjectRef) -> int | None:
        """Reserve a slot for an object; return its offset, or None if there is no room."""
        offset = self._store.writer.reserve(ref)
        if offset is not None:
            known.filling[offset] = ref
            self._slots[offset] = (known, 0, False)
        return offset

    def objects(self, known: StoreRequest, before: int, after: int) -> list[ObjectRef]:
        """Return the objects to store after a step that computes ``[before, after)`` of a request.

        These are objects that the step completes and objects of transferred tokens, without those
        that a tier had.
        """
        refs = [] if known.transferred is None else known.transferred.take_objects(before)
        if not self._answers:
            after = min(after, known.request.num_prompt_tokens)
        if before < after:
            completed = completed_objects(self._store.plan, before, after)
            refs += [ref for ref in completed if known.transferred is None or known.transferred.has_tokens_of(ref)]
        return [ref for ref in refs if ref not in known.present]

    def order(self, known: StoreRequest, refs: Sequence[ObjectRef], tables: Sequence[Sequence[int]]) -> Store | None:
        """Reserve slots for objects whose blocks are allocated; return the order to fill them.

        None if no object gets a slot.

        ``tables``  block table of each KV cache group
        """
        offsets: dict[ObjectRef, int] = {}
        for ref in refs:
            if object_in_blocks(self._store.plan.groups[ref.group], tables[ref.group], ref):
                offset = self.reserve(known, ref)
                if offset is not None:
                    offsets[ref] = offset
        if not offsets:
            return None
        return Store(known.request.request_id, tuple(tuple(table) for table in tables), offsets)

    def take(self, report: StoreReport) -> list[StoreRequest]:
        """Write or drop each object on which all ranks have now reported; return their requests."""
        found = []
        for offset in {**report.filled, **report.failed}:
            known, before, failed = self._slots[offset]
            after = before + report.filled.get(offset, 0) + report.failed.get(offset, 0)
            failed = failed or offset in report.failed
            if after < self._ranks:
                self._slots[offset] = (known, after, failed)
                continue
            del self._slots[offset]
            self._filled(known, offset, failed)
            found.append(known)
        return found

    def _filled(self, known: StoreRequest, offset: int, failed: bool) -> None:
        store, ref = self._store, known.filling.pop(offset)
        name = known.names(store.space, [ref]).get(ref)
        if failed or name is None or known.void:
            store.writer.drop(offset)
            return
        span = store.plan.groups[ref.group].span_tokens
        if self._events is not None:
            before = ObjectRef(ref.end_token - span, ref.group)
            names = known.names(store.space, [ref, before] if before.end_token else [ref])
            self._events.describe(ref, names, known.request)
        # A later object costs slightly less, so a prompt loses its last objects first: without its
        # first object, the others would be of no use.
        store.writer.commit(ref, name, offset, span * _COST_NS_PER_TOKEN - ref.end_token)
