"""Scheduler side of the KV store: orders loads before a step and stores after it.

    load   the first call of ``matched_tokens``, or of ``prefix_ready`` for a request with a
           transfer, may start a fetch: objects are read into staging memory and verified. vLLM
           repeats the call each step until the fetch has ended. Then workers copy the objects into
           blocks
    store  objects that a step completes, or whose tokens a transfer has supplied, get slots of
           staging, which the ranks fill after the step. Once all ranks have filled a slot, its
           object is written to the tiers

``requests.py`` names objects, ``bounded_fetch.py`` decides how long a request waits for a fetch,
and ``filling.py`` chooses the objects to store.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.errors import ConfigurationError
from connectors.store.fetches import Fetched
from connectors.store.keys.names import NAMESPACE_BYTES, Feature, PrefixChain, namespace
from connectors.store.load_costs import LoadCosts
from connectors.store.planning.layout import object_bytes, prove_store, stored_groups
from connectors.store.planning.prefix import possible_objects
from connectors.store.planning.spans import plan_store
from connectors.store.service import KVStore
from connectors.store.settings import StoreSettings
from connectors.store.tier_threads import StoreLimits
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.staging import Staging
from connectors.vllm_hma.kv_store.beside_transfer import TransferredTokens
from connectors.vllm_hma.kv_store.bounded_fetch import BoundedFetch
from connectors.vllm_hma.kv_store.capacity import check_sizes
from connectors.vllm_hma.kv_store.description import describe_store
from connectors.vllm_hma.kv_store.events import StoreEvents
from connectors.vllm_hma.kv_store.filling import SlotFilling
from connectors.vllm_hma.kv_store.orders import Load, RankCache, StoreOrders, StoreReport
from connectors.vllm_hma.kv_store.requests import StoreRequest
from connectors.vllm_hma.metrics import TandemStats
from connectors.vllm_hma.model.adapters import UNKNOWN, Adapter, adapter_of
from connectors.vllm_hma.model.media import named_by_content

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_TIMED_TOKENS = 64
"""Minimum number of tokens of one request in a step whose duration is measured.

Steps of generated tokens take longer per token than prompts.
"""


class StoreScheduler:
    """Scheduler side of one engine's store. Ready after ``publish``.

    ``answers``  whether to store KV of answers; False with speculative decoding
    ``events``   whether ``take_events`` reports stored and removed objects
    """

    def __init__(self, settings: StoreSettings, max_model_len: int, answers: bool = True, events: bool = False) -> None:
        self._settings = settings
        self._max_model_len = max_model_len
        self._answers = answers
        self._reports_events = events
        self._events: StoreEvents | None = None
        # Identities of the adapters that the workers have loaded.
        self._adapters: dict[Adapter, str] = {}
        self._store: KVStore | None = None
        self._filling: SlotFilling | None = None
        self.description: dict[str, Any] | None = None
        """Identity and capacity of the store, for routers (``describe_store``); None if unknown."""
        self.costs = LoadCosts()
        self._ranks = self._attached = self._detached = 0
        self._requests: dict[str, StoreRequest] = {}
        self._loads: list[Load] = []
        self._load_ids = itertools.count()
        # Slots and bytes of unfinished loads, and the number of ranks that have reported, by id.
        self._loading: dict[int, tuple[list[int], int, int]] = {}
        self._reported: dict[str, dict[str, float]] = {}
        self._reported_pending = 0
        self._unreported = TandemStats()

    @property
    def store(self) -> KVStore:
        assert self._store is not None, "workers register their caches before the first request"
        return self._store

    @property
    def filling(self) -> SlotFilling:
        assert self._filling is not None, "workers register their caches before the first request"
        return self._filling

    @property
    def copying(self) -> bool:
        """Return whether a rank has not reported an ordered load or the filling of a slot yet."""
        return bool(self._loading or self._filling)

    @property
    def remembered(self) -> int:
        """Number of known requests, unfinished loads, and slots that ranks are filling."""
        return len(self._requests) + len(self._loading) + len(self._filling or ())

    def publish(self, rank_caches: Sequence[RankCache]) -> None:
        """Open the store with the layouts of all ranks.

        Raises ConfigurationError if ranks have different models, if settings do not fit the cache,
        or if folders or staging memory cannot be used. Raises PlanError and CoverError if the cache
        cannot be mapped to objects (``prove_store``), and OSError if the staging file cannot be
        created.
        """
        if len({rank_cache.model for rank_cache in rank_caches}) > 1:
            raise ConfigurationError(
                "store: the engine's ranks report different models (weights, configuration, image processor files, "
                "dtype or vLLM version); make the model's files equal on all hosts, and restart the engine"
            )
        settings = self._settings
        plan = plan_store(rank_caches[0].layout.groups, settings.chunk_tokens, self._max_model_len)
        for warning in plan.warnings:
            logger.warning("Tandem: %s", warning)
        layout = prove_store(plan, [rank_cache.layout for rank_cache in rank_caches])
        space = namespace(rank_caches[0].model, plan, layout)
        indices = [spans.index for spans in stored_groups(plan)]
        sizes = dict(zip(indices, object_bytes(layout), strict=True))
        tiers = [
            FolderTier(folder, budget, durable=label == "disk", label=label) for label, folder, budget in settings.tiers
        ]
        check_sizes(sizes.values(), settings)
        self.description = describe_store(tiers[-1], space, plan, sizes)
        limits = StoreLimits(settings.lookup_s, settings.load_s, settings.store_s)
        self._ranks = len(rank_caches)
        self._store = KVStore(plan, space, sizes, tiers, Staging(settings.staging_mib << 20), limits)
        if self._reports_events:
            self._store.record_changes()
            self._events = StoreEvents(plan)
        self._filling = SlotFilling(self._store, self._ranks, self._answers, self._events)
        logger.info(
            "Tandem: KV store with namespace %s and chunks of %d tokens in %s",
            space.hex(),
            plan.chunk_tokens,
            ", ".join(str(folder) for _, folder, _ in settings.tiers),
        )

    # Requests.

    def new_request(self, request: Request) -> None:
        """Start to name a request's objects.

        Ignores a request whose KV has no stable name; the store neither loads nor stores its KV.
        """
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            # Names are digests of token ids, and prompt embeddings have none.
            return
        if request.resumable:
            # Sessions of streamed input replace computed tokens (vllm/v1/core/sched/scheduler.py,
            # ``_update_request_as_session``).
            return
        if not named_by_content(request):
            # A client may give another image the same name later.
            return
        adapter = adapter_of(request.lora_request)
        identity = "" if adapter is None else self._adapters.get(adapter, UNKNOWN)
        if adapter is not None and identity == UNKNOWN:
            # Workers have not reported this adapter's load yet, or its content is unclear.
            return
        features = [Feature(each.identifier, each.mm_position.offset) for each in request.mm_features]
        chain = PrefixChain(self.store.space, self.store.plan.spans, identity, request.cache_salt, features)
        self._requests[request.request_id] = StoreRequest(request, chain)

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Start or continue a fetch; return the number of tokens to load after ``local_tokens``.

        Return 0 if the store has nothing to load, or loads no KV for this request. Return None
        while the fetch runs, until all ranks have mapped staging, and if the engine's own cache has
        lost tokens during the fetch, so that the next call must start another fetch.
        """
        known = self._requests.get(request.request_id)
        if known is None or request.skip_reading_prefix_cache or self._detached:
            return 0
        if known.fetch is not None and known.fetch.beside_transfer:
            # The transfer has failed before it began.
            self._end_fetch(known)
        if known.fetched is not None and local_tokens < known.fetched.start_token:
            # The engine's own cache has evicted blocks that the fetch relied on.
            self._end_fetch(known)
        if known.fetched is None:
            if known.fetch is None and not self._begin_fetch(known, local_tokens, request.num_tokens - 1):
                return 0
            assert known.fetch is not None
            fetched = known.fetch.poll()
            # If a load without a transfer fails, vLLM ends an engine with several KV cache groups.
            # So no such load is ordered before all ranks have reported, with the first step, that
            # they have mapped staging.
            if fetched is None or self._attached < self._ranks:
                return None
            if local_tokens < fetched.start_token:
                self._end_fetch(known)
                return None
            known.fetched = fetched
            self._fetch_ended(known, fetched)
        return max(0, known.fetched.end_token - local_tokens)

    def after_alloc(self, request: Request, tables: tuple[list[int], ...], external_tokens: int) -> None:
        """Order the load of the fetched objects into the request's blocks, and end the fetch.

        ``external_tokens``  number of tokens to load; 0: no load
        """
        known = self._requests.get(request.request_id)
        if known is None:
            return
        if known.fetched is not None and external_tokens:
            self._order_load(known, known.fetched, tables, known.fetched.end_token - external_tokens)
        self._end_fetch(known)

    def prefix_ready(self, request: Request, local_tokens: int, end_token: int, queued: bool) -> bool:
        """Start or continue a fetch beside a request's transfer up to ``end_token``.

        Return whether the transfer may start.

        The first call starts a fetch of full attention beyond ``local_tokens``, unless no object
        can exist there. While more than half of staging is used, a queued request starts none. The
        fetch ends when all needed objects are verified, after ``load_s``, when none of its reads
        has progressed for ``lookup_s``, or when a transfer that could start has waited for
        ``LoadCosts.patience_s``, which is 0 if the transfer would be as fast.

        ``queued``  whether the transfer cannot start yet, so waiting costs nothing
        """
        known = self._requests.get(request.request_id)
        if known is None or request.skip_reading_prefix_cache or self._detached:
            return True
        if known.fetched is not None:
            return True
        staging = self.store.staging
        if known.fetch is None and queued and 2 * staging.used_bytes > staging.size_bytes:
            # A fetched prefix stays in staging until the request runs, which may take long: leave
            # the rest to stores and to requests that can run.
            return False
        if known.fetch is None and not self._begin_fetch(known, local_tokens, end_token - 1, beside_transfer=True):
            return True
        assert known.fetch is not None
        fetched = known.fetch.poll(queued)
        if fetched is None:
            return False
        known.fetched = fetched
        self._fetch_ended(known, fetched)
        return True

    def load_prefix(self, request: Request, tables: tuple[list[int], ...], start_token: int, end_token: int) -> int:
        """Order the load of the fetched prefix, if it covers ``start_token``.

        A transfer supplies the rest up to ``end_token``. Return the end of the tokens whose
        full-attention KV the store loads; ``start_token`` without a load. Full-attention KV from
        the transfer is stored once the request runs.
        """
        known = self._requests.get(request.request_id)
        if known is None:
            return start_token
        fetched, stop = known.fetched, start_token
        beside = known.fetch is not None and known.fetch.beside_transfer
        if beside and fetched is not None and fetched.start_token <= start_token < fetched.end_token:
            stop = fetched.end_token
            self._order_load(known, fetched, tables, start_token)
        self._end_fetch(known)
        known.transferred = TransferredTokens(self.store, stop, end_token)
        return stop

    def received(self, request_ids: Iterable[str]) -> None:
        """Record the durations of transfers that have ended without a failure, in ``costs``."""
        for request_id in request_ids:
            known = self._requests.get(request_id)
            if known is not None and known.transferred is not None:
                known.transferred.succeeded(self.costs)

    def source(self, request_id: str) -> CacheHitSource:
        """Return the medium of the slowest tier from which the request's last load was read.

        DISK for a request without a load.
        """
        known = self._requests.get(request_id)
        return CacheHitSource.HOST if known is not None and known.tier == "memory" else CacheHitSource.DISK

    def finished(self, request: Request) -> None:
        """End the fetch of a request that vLLM has finished, and forget the request.

        Workers still run its ordered load, before vLLM reuses the blocks. A request with slots that
        ranks are filling is forgotten after their reports.
        """
        known = self._requests.get(request.request_id)
        if known is None:
            return
        known.ended = True
        self.store.fetches.end(request.request_id)
        self._forget(known)

    # Steps.

    def orders(self, output: SchedulerOutput) -> StoreOrders:
        """Return a step's orders: pending loads before it, and objects to store after it.

        Loads are returned once. Each object to store gets a slot of staging.
        """
        orders = StoreOrders(self.store.staging.location, self._loads)
        self._loads = []
        scheduled, tokens = _scheduled(output), output.num_scheduled_tokens
        if max(tokens.values(), default=0) >= _TIMED_TOKENS:
            orders.timed_tokens = sum(tokens.values())
            contexts = (tokens[request] * (computed + tokens[request] / 2) for request, computed in scheduled)
            orders.timed_context_tokens = sum(contexts) / orders.timed_tokens
        for request_id, computed in scheduled:
            known = self._requests.get(request_id)
            if known is None or known.void or self._detached:
                continue
            if refs := self.filling.objects(known, computed, computed + tokens[request_id]):
                assert output.kv_connector_block_state is not None
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                assert tables is not None, f"scheduled request {request_id} has no block table"
                store = self.filling.order(known, refs, tables)
                orders.stores += [store] if store is not None else []
        return orders

    def take(self, report: StoreReport) -> None:
        """Apply a report of ranks on their copies and adapters."""
        # Adapters and failed loads first: KV that they make invalid must not be stored by the rest
        # of this report, or by a step that is already in progress.
        for adapter, identity in report.adapters.items():
            if self._adapters.get(adapter, identity) != identity:
                self._give_up(
                    [each for each in self._requests.values() if adapter_of(each.request.lora_request) == adapter]
                )
            self._adapters[adapter] = identity
            if identity == UNKNOWN:
                del self._adapters[adapter]
        if report.broken:
            self.spoil()
        self.costs.computed(report.timed_tokens, report.timed_context_tokens, report.timed_s)
        self._attached += report.attached
        self._detached += report.detached
        self.costs.copied(sum(self._loading[load_id][1] for load_id in report.loaded), report.copied_s)
        for load_id, ranks in report.loaded.items():
            slots, size_bytes, before = self._loading[load_id]
            self._loading[load_id] = (slots, size_bytes, before + ranks)
            if before + ranks == self._ranks:
                del self._loading[load_id]
                for offset in slots:
                    self.store.staging.give_back(offset)
        for known in self.filling.take(report):
            self._forget(known)

    def spoil(self) -> None:
        """Store no further KV of current requests: blocks of a failed load may be part of it."""
        for known in self._requests.values():
            known.void = True

    def reset(self) -> None:
        """End all fetches and change the namespace: the weights in memory may have been changed.

        The namespace identifies the weights that the engine read when it started. Until it
        restarts, this engine therefore uses a random namespace. The store loads and stores no
        further KV of current requests; only loads that are already ordered still run.
        """
        self._give_up(list(self._requests.values()))
        self.store.space = os.urandom(NAMESPACE_BYTES)

    def stats(self) -> TandemStats:
        """Return counts and fetches since the last call.

        Also the number of fetches in progress, if it has changed.
        """
        stats, self._unreported = self._unreported, TandemStats()
        if self._store is None:
            return stats
        totals = self._store.totals()
        for counter, labels in totals.items():
            for label, number in labels.items():
                before = self._reported.get(counter, {}).get(label, 0)
                if number > before:
                    stats.count(counter, label, number - before)
        self._reported = totals
        pending = self._store.fetches.pending
        if pending != self._reported_pending:
            self._reported_pending = pending
            stats.data["ranks"]["store"] = {"store_loads": pending}
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """Return vLLM's KV events for objects stored and removed since the last call.

        Empty if events are not enabled.
        """
        if self._events is None:
            return []
        return self._events.take(*self.store.take_changes())

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    # Helpers.

    def _give_up(self, requests: Iterable[StoreRequest]) -> None:
        """Load and store no further KV of these requests. Loads that are ordered still run."""
        for known in requests:
            self.store.fetches.end(known.request.request_id)
            known.void = True
            self._requests.pop(known.request.request_id, None)

    def _order_load(
        self, known: StoreRequest, fetched: Fetched, tables: tuple[list[int], ...], start_token: int
    ) -> None:
        known.tier = fetched.tier
        # The load owns the slots now: after a preemption, the request may start another fetch.
        load_id = next(self._load_ids)
        slots = self.store.fetches.hand_over(known.request.request_id)
        self._loading[load_id] = (slots, self.store.object_bytes(fetched.offsets), 0)
        self._loads.append(
            Load(
                load_id,
                known.request.request_id,
                tuple(tuple(table) for table in tables),
                start_token,
                fetched.end_token,
                dict(fetched.offsets),
                known.fetch is not None and known.fetch.beside_transfer,
            )
        )

    def _fetch_ended(self, known: StoreRequest, fetched: Fetched) -> None:
        known.present = fetched.present
        self._unreported.fetched(known.request.request_id, fetched.ended_at - fetched.seconds, fetched.ended_at)
        for tier, (size_bytes, seconds) in fetched.reads.items():
            # A read that ended because the transfer became due is no measurement.
            if size_bytes or (known.fetch is not None and known.fetch.waits):
                self.costs.read(tier, size_bytes, seconds)

    def _begin_fetch(
        self, known: StoreRequest, local_tokens: int, limit_token: int, beside_transfer: bool = False
    ) -> bool:
        """Start a fetch beyond ``local_tokens``; return False if no object can exist there."""
        plan, request_id = self.store.plan, known.request.request_id
        possible = possible_objects(plan.full_attention if beside_transfer else plan, local_tokens, limit_token)
        names = known.names(self.store.space, possible)
        if names:
            known.fetch = BoundedFetch(self.store, self.costs, self._settings, request_id, beside_transfer)
            known.fetch.begin(names, local_tokens, limit_token)
        return bool(names)

    def _end_fetch(self, known: StoreRequest) -> None:
        known.fetched = known.fetch = None
        self.store.fetches.end(known.request.request_id)

    def _forget(self, known: StoreRequest) -> None:
        if known.ended and not known.filling and self._requests.get(known.request.request_id) is known:
            del self._requests[known.request.request_id]


def _scheduled(output: SchedulerOutput) -> list[tuple[str, int]]:
    """Return (request id, tokens computed before this step) of all requests in this step."""
    cached = output.scheduled_cached_reqs
    return [
        *((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs),
        *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
    ]
