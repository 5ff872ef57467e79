"""Scheduler side of the KV store: orders loads before a step and stores after it.

load   ``matched_tokens``, or ``prefix_ready`` for a request with a transfer, starts a fetch:
       objects are read into staging memory and verified. vLLM repeats the call each step until
       the fetch is over. Then workers copy the objects into blocks
store  objects that a step completes, or whose tokens a transfer has supplied, get slots of
       staging, which the ranks fill after the step. Then the objects are written to the tiers
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.store.fetch import Fetch
from connectors.store.keys.names import NAMESPACE_BYTES, Feature, PrefixChain
from connectors.store.planning.moves import object_in_blocks
from connectors.store.planning.prefix import ObjectRef, completed_objects, possible_objects
from connectors.store.service import KVStore
from connectors.store.settings import StoreSettings
from connectors.vllm_hma.kv_store.opening import describe_store, open_store
from connectors.vllm_hma.kv_store.orders import Load, RankCache, Store, StoreOrders, StoreReport, Tables, scheduled
from connectors.vllm_hma.kv_store.requests import StoreRequest, Transferred
from connectors.vllm_hma.metrics import TandemStats
from connectors.vllm_hma.model.adapters import UNKNOWN, Adapter, adapter_of
from connectors.vllm_hma.model.media import named_by_content

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# Minimum tokens of one request in a measured step: generated tokens take longer than prompts.
_TIMED_TOKENS = 64


@dataclass(slots=True)
class _Copy:
    """A load or a store that not all ranks have ended.

    ``stores``  the request of a store
    """

    offsets: dict[ObjectRef, int]
    stores: StoreRequest | None = None
    ranks: int = 0
    failed: bool = False


class StoreScheduler:
    """Scheduler side of one engine's store. Ready after ``publish``.

    ``answers``      whether to store KV of answers; False with speculative decoding, which rejects
                     tokens after it has computed their KV
    ``description``  identity and capacity of the store, for routers; None if unknown
    """

    def __init__(self, settings: StoreSettings, max_model_len: int, answers: bool = True) -> None:
        self.description: dict[str, Any] | None = None
        self._settings = settings
        self._max_model_len = max_model_len
        self._answers = answers
        # Identities of the adapters that the workers have loaded.
        self._adapters: dict[Adapter, str] = {}
        self._store: KVStore | None = None
        self._ranks = self._attached = self._detached = 0
        self._requests: dict[str, StoreRequest] = {}
        self._loads: list[Load] = []
        self._copy_ids = itertools.count()
        self._copies: dict[int, _Copy] = {}
        self._reported: dict[tuple[str, str], float] = {}
        self._reported_pending = 0
        self._unreported = TandemStats()

    @property
    def store(self) -> KVStore:
        assert self._store is not None, "workers register their caches before the first request"
        return self._store

    @property
    def copying(self) -> bool:
        return bool(self._copies)

    @property
    def remembered(self) -> int:
        return len(self._requests) + len(self._copies)

    def publish(self, rank_caches: Sequence[RankCache]) -> None:
        """Open the store. Raises as ``open_store``."""
        store = self._store = open_store(self._settings, self._max_model_len, rank_caches)
        self.description = describe_store(store)
        self._ranks = len(rank_caches)

    def new_request(self, request: Request) -> None:
        """Ignore a request whose KV has no stable name."""
        adapter = adapter_of(request.lora_request)
        identity = "" if adapter is None else self._adapters.get(adapter, UNKNOWN)
        if (
            # Names are digests of token ids, and prompt embeddings have none.
            request.prompt_embeds is not None
            or request.prompt_token_ids is None
            # Sessions of streamed input replace computed tokens (vllm/v1/core/sched/scheduler.py,
            # ``_update_request_as_session``).
            or request.resumable
            # A client may give another image the same name later.
            or not named_by_content(request)
            # Workers have not reported this adapter's load yet, or its content is unclear.
            or (adapter is not None and identity == UNKNOWN)
        ):
            return
        features = [Feature(each.identifier, each.mm_position.offset) for each in request.mm_features]
        chain = PrefixChain(self.store.space, self.store.plan.chunk_tokens, identity, request.cache_salt, features)
        self._requests[request.request_id] = StoreRequest(request, chain)

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Start or continue a fetch; return the number of tokens to load after ``local_tokens``.

        Return None while the fetch runs, until all ranks have mapped staging, and if the next call
        must start another fetch.
        """
        known = self._reading(request)
        if known is None:
            return 0
        if known.fetch is not None and known.fetch.beside_transfer:
            # The transfer has failed before it began.
            known.end_fetch()
        fetch = known.fetch or self._begin_fetch(known, local_tokens, request.num_tokens - 1)
        if fetch is None:
            return 0
        # Not before all ranks have mapped staging: if a load without a transfer fails, vLLM ends an
        # engine with several KV cache groups.
        if not self._poll(known, fetch) or self._attached < self._ranks:
            return None
        if local_tokens < fetch.start_token:
            # The engine's own cache has evicted blocks that the fetch relied on.
            known.end_fetch()
            return None
        return max(0, fetch.end_token - local_tokens)

    def after_alloc(self, request: Request, tables: tuple[list[int], ...], external_tokens: int) -> None:
        known = self._requests.get(request.request_id)
        if known is None:
            return
        if known.fetch is not None and known.fetch.over and external_tokens:
            self._order_load(known, known.fetch, tables, known.fetch.end_token - external_tokens)
        known.end_fetch()

    def prefix_ready(self, request: Request, local_tokens: int, end_token: int, queued: bool) -> bool:
        """Start or continue a fetch of full attention beside a request's transfer; return whether
        the transfer up to ``end_token`` may start.

        ``queued``  whether the transfer cannot start yet, so waiting costs nothing
        """
        known = self._reading(request)
        if known is None:
            return True
        staging, fetch = self.store.staging, known.fetch
        if fetch is None and queued and 2 * staging.used_bytes > staging.size_bytes:
            # A fetched prefix stays in staging until the request runs, which may take long.
            return False
        fetch = fetch or self._begin_fetch(known, local_tokens, end_token - 1, beside_transfer=True)
        return fetch is None or self._poll(known, fetch, queued)

    def load_prefix(self, request: Request, tables: tuple[list[int], ...], start_token: int, end_token: int) -> int:
        """Order the load of the fetched prefix, if it covers ``start_token``; return its end.

        A transfer supplies the rest up to ``end_token``, whose full-attention KV is stored once the
        request runs.
        """
        known = self._requests.get(request.request_id)
        if known is None:
            return start_token
        fetch, stop = known.fetch, start_token
        beside = fetch is not None and fetch.over and fetch.beside_transfer
        if fetch is not None and beside and fetch.start_token <= start_token < fetch.end_token:
            stop = fetch.end_token
            self._order_load(known, fetch, tables, start_token)
        known.end_fetch()
        known.transferred = Transferred(self.store, stop, end_token)
        return stop

    def received(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            known = self._requests.get(request_id)
            if known is not None and known.transferred is not None:
                known.transferred.succeeded()

    def source(self, request_id: str) -> CacheHitSource:
        known = self._requests.get(request_id)
        return CacheHitSource.HOST if known is not None and known.tier == "memory" else CacheHitSource.DISK

    def finished(self, request: Request) -> None:
        # Workers still run the request's load, before vLLM reuses the blocks.
        known = self._requests.pop(request.request_id, None)
        if known is not None:
            known.end_fetch()

    def orders(self, output: SchedulerOutput) -> StoreOrders:
        orders = StoreOrders(self.store.staging.location, self._loads)
        self._loads = []
        steps, tokens = scheduled(output), output.num_scheduled_tokens
        if max(tokens.values(), default=0) >= _TIMED_TOKENS:
            orders.timed_tokens = sum(tokens.values())
            contexts = (tokens[request] * (computed + tokens[request] / 2) for request, computed in steps)
            orders.timed_context_tokens = sum(contexts) / orders.timed_tokens
        for request_id, computed in steps:
            known = self._requests.get(request_id)
            if known is None or known.void or self._detached:
                continue
            if refs := self._to_store(known, computed, computed + tokens[request_id]):
                assert output.kv_connector_block_state is not None
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                assert tables is not None, f"scheduled request {request_id} has no block table"
                if offsets := self._reserve(refs, tables):
                    orders.stores.append(Store(self._begin(offsets, known), request_id, _frozen(tables), offsets))
        return orders

    def take(self, report: StoreReport) -> None:
        # Adapters and failed loads first: KV that they make invalid must not be stored by the rest
        # of this report, or by a step that is already in progress.
        for adapter, identity in report.adapters.items():
            if self._adapters.get(adapter, identity) != identity:
                self._give_up(adapter)
            self._adapters[adapter] = identity
            if identity == UNKNOWN:
                del self._adapters[adapter]
        if report.broken:
            self.spoil()
        store = self.store
        store.costs.computed(report.timed_tokens, report.timed_context_tokens, report.timed_s)
        self._attached += report.attached
        self._detached += report.detached
        loads = [copy for copy_id in report.copied if (copy := self._copies[copy_id]).stores is None]
        store.costs.copied(sum(store.object_bytes(load.offsets) for load in loads), report.copied_s)
        for copy_id, ranks in report.copied.items():
            copy = self._copies[copy_id]
            copy.ranks += ranks
            copy.failed |= copy_id in report.failed
            if copy.ranks == self._ranks:
                del self._copies[copy_id]
                self._end(copy)

    def spoil(self) -> None:
        # Blocks of a failed load may be part of any current request's KV.
        for known in self._known():
            known.void = True

    def reset(self) -> None:
        """End all fetches and change the namespace, which identifies the weights that the engine
        read when it started: those in memory may have been changed. Until a restart, it is random.
        Loads that are ordered still run.
        """
        self._give_up()
        self.store.space = os.urandom(NAMESPACE_BYTES)

    def stats(self) -> TandemStats:
        stats, self._unreported = self._unreported, TandemStats()
        if self._store is None:
            return stats
        totals = self._store.totals()
        for key, number in totals.items():
            if number > self._reported.get(key, 0):
                stats.count(*key, number - self._reported.get(key, 0))
        self._reported = totals
        pending = len(self._store.running)
        if pending != self._reported_pending:
            self._reported_pending = pending
            stats.data["ranks"]["store"] = {"store_loads": pending}
        return stats

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _reading(self, request: Request) -> StoreRequest | None:
        known = self._requests.get(request.request_id)
        return None if request.skip_reading_prefix_cache or self._detached else known

    def _begin_fetch(
        self, known: StoreRequest, local_tokens: int, limit_token: int, beside_transfer: bool = False
    ) -> Fetch | None:
        plan = self.store.plan.full_attention if beside_transfer else self.store.plan
        names = known.names(possible_objects(plan, local_tokens, limit_token))
        if names:
            known.fetch = Fetch(self.store, names, local_tokens, limit_token, beside_transfer)
        return known.fetch

    def _poll(self, known: StoreRequest, fetch: Fetch, queued: bool = False) -> bool:
        if not fetch.over and fetch.poll(queued):
            known.present = fetch.present
            self._unreported.fetched(known.request.request_id, fetch.began_at, fetch.ended_at)
        return fetch.over

    def _order_load(self, known: StoreRequest, fetch: Fetch, tables: tuple[list[int], ...], start_token: int) -> None:
        known.tier = fetch.tier
        # The load owns the slots now: after a preemption, the request may start another fetch.
        offsets, beside = fetch.hand_over(), fetch.beside_transfer
        request_id, end_token = known.request.request_id, fetch.end_token
        load = Load(self._begin(offsets), request_id, _frozen(tables), start_token, end_token, offsets, beside)
        self._loads.append(load)

    def _to_store(self, known: StoreRequest, before: int, after: int) -> list[ObjectRef]:
        refs = [] if known.transferred is None else known.transferred.take_objects(before)
        if not self._answers:
            after = min(after, known.request.num_prompt_tokens)
        if before < after:
            completed = completed_objects(self.store.plan, before, after)
            refs += [ref for ref in completed if known.transferred is None or known.transferred.has_tokens_of(ref)]
        return [ref for ref in refs if ref not in known.present]

    def _reserve(self, refs: Iterable[ObjectRef], tables: Sequence[Sequence[int]]) -> dict[ObjectRef, int]:
        offsets = {}
        for ref in refs:
            if object_in_blocks(self.store.plan.groups[ref.group], tables[ref.group], ref):
                offset = self.store.reserve(ref)
                if offset is not None:
                    offsets[ref] = offset
        return offsets

    def _begin(self, offsets: dict[ObjectRef, int], stores: StoreRequest | None = None) -> int:
        copy_id = next(self._copy_ids)
        self._copies[copy_id] = _Copy(offsets, stores)
        return copy_id

    def _end(self, copy: _Copy) -> None:
        store, known = self.store, copy.stores
        names = {} if known is None or known.void or copy.failed else known.names(copy.offsets)
        for ref, offset in copy.offsets.items():
            if known is None:
                store.staging.give_back(offset)
            elif ref in names:
                store.commit(ref, names[ref], offset)
            else:
                store.drop(offset)

    def _known(self) -> list[StoreRequest]:
        # Also those that have ended while ranks copy their objects.
        stores = (copy.stores for copy in self._copies.values())
        return [*self._requests.values(), *(known for known in stores if known is not None)]

    def _give_up(self, adapter: Adapter | None = None) -> None:
        for known in self._known():
            if adapter is None or adapter_of(known.request.lora_request) == adapter:
                known.void = True
                known.end_fetch()
                if self._requests.get(known.request.request_id) is known:
                    del self._requests[known.request.request_id]


def _frozen(tables: Sequence[Sequence[int]]) -> Tables:
    return tuple(tuple(table) for table in tables)
