"""Worker side of the KV store: copies objects between staging and this rank's blocks.

Loads are copied before the step's forward pass reads the blocks, stores between it and the next
one, which may overwrite a state or reuse a block that has left the window. An accelerator runs
these copies later, in this order; a step is reported after them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from connectors.errors import PlanError, StoreError
from connectors.planning.blocks import NULL_BLOCK
from connectors.planning.descriptors import build_runs
from connectors.planning.layout import EngineLayout
from connectors.protocol.agent_metadata import ModelIdentity
from connectors.store.copying import HostCopies
from connectors.store.device_copies import DeviceCopies
from connectors.store.planning.chunks import StorePlan, plan_store
from connectors.store.planning.layout import RankPlans, plan_rank
from connectors.store.planning.moves import load_moves, store_moves
from connectors.store.planning.prefix import ObjectRef
from connectors.store.settings import StoreSettings
from connectors.store.tiers.staging import AttachedStaging
from connectors.vllm_hma.kv_store.orders import RankCache, StoreOrders, StoreReport
from connectors.vllm_hma.model.adapters import AdapterChanges, adapter_loads

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Time after which a device that has not ended a step's copies is taken for hung, in seconds.
_HANGS_S = 120.0


class SpoiledSteps:
    """Number of steps, from the current one on, whose KV a failed load may make invalid; false if
    zero. Any request of these steps may read the load's blocks: vLLM's prefix cache contains them
    once the load is ordered.

    ``batches``  number of steps that vLLM schedules before it reads the first one's output
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._steps = 0

    def __bool__(self) -> bool:
        return self._steps > 0

    def load_failed(self) -> None:
        self._steps = self._batches

    def end_step(self) -> None:
        self._steps = max(0, self._steps - 1)


@dataclass(slots=True)
class _Step:
    """The report is due once ``mark`` has passed; start and end of what is measured."""

    report: StoreReport
    mark: Any = None
    marked_at: float = 0.0
    forward: tuple[Any, Any] | None = None
    loads: tuple[Any, Any] | None = None


class StoreWorker:
    """Worker side of one rank's store. Ready after ``register``; the connector ends ``spoiled``."""

    # Mark after the last copy from or to blocks of all stores of this process; they share a stream.
    _touched: ClassVar[tuple[Any, ...]] = ()

    def __init__(self, settings: StoreSettings, max_model_len: int, spoiled: SpoiledSteps) -> None:
        self._settings = settings
        self._max_model_len = max_model_len
        self._spoiled = spoiled
        self._layout: EngineLayout | None = None
        self._planned: tuple[StorePlan, RankPlans]
        self._staging: AttachedStaging | None = None
        self._tried = False
        self._report = StoreReport()
        self._copies: HostCopies | DeviceCopies = HostCopies()
        self._began: Any = None
        self._step = _Step(StoreReport())
        self._steps: deque[_Step] = deque()
        self._not_loaded: set[int] = set()
        self._adapters = AdapterChanges(adapter_loads())

    def register(self, layout: EngineLayout, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Raises ConfigurationError, and PlanError and CoverError as ``plan_rank``."""
        if layout.memory_kind.memory != "DRAM":
            self._copies = DeviceCopies(tensors)
        plan = plan_store(layout.groups, self._settings.chunk_tokens, self._max_model_len)
        self._layout, self._planned = layout, (plan, plan_rank(plan, layout))

    def rank_cache(self, model: ModelIdentity) -> RankCache:
        assert self._layout is not None, "vLLM registers the cache before it reads the metadata"
        return RankCache(self._layout, model)

    def spoil(self) -> None:
        self._report.broken = True
        self._spoiled.load_failed()

    def begin_step(self) -> None:
        """Start to measure a step. vLLM calls ``load`` before the forward pass only in some steps
        (``has_sync_kv_loads`` in vllm/v1/worker/kv_connector_model_runner_mixin.py).
        """
        self._began = self._copies.now()

    def load(self, orders: StoreOrders) -> set[str]:
        """Return the ids of requests whose load beside a transfer failed: the caller makes the
        transfer fill all their blocks. After another failed load, the scheduler has already counted
        the tokens as computed, so steps are spoiled.
        """
        broken: set[str] = set()
        step, loads_began, all_copied = self._step, self._copies.now(), bool(orders.loads)
        self._attach_once(orders)
        for load in orders.loads:
            try:
                plan, tables = self._planned[1].load, load.tables
                start, end, full_only = load.start_token, load.end_token, load.beside_transfer
                addresses = self._addresses(load.offsets)
                moves = load_moves(self._planned[0], plan, tables, start, end, addresses, full_only)
                self._copies.load(build_runs(plan, moves))
            except (PlanError, StoreError) as error:
                all_copied = False
                remedy = (
                    "the transfer sends all KV"
                    if load.beside_transfer
                    else "vLLM computes its prompt, or ends if there are several KV cache groups"
                )
                logger.error(
                    "Tandem: the load of stored KV for request %s failed, so %s: %s", load.request_id, remedy, error
                )
                if load.beside_transfer:
                    broken.add(load.request_id)
                else:
                    # vLLM finds the request by these blocks (``not_loaded``).
                    self._not_loaded.update(block for table in load.tables for block in table if block != NULL_BLOCK)
                    self.spoil()
            step.report.copied[load.copy_id] = 1
        if all_copied:
            step.loads = loads_began, self._copies.now()
        if orders.loads:
            StoreWorker._touched = self._copies.mark()[:1]
        return broken

    def store(self, orders: StoreOrders) -> None:
        step = self._step
        if orders.timed_tokens and self._began is not None:
            step.report.timed_tokens = orders.timed_tokens
            step.report.timed_context_tokens = orders.timed_context_tokens
            step.forward = self._began, self._copies.now()
        for store in orders.stores:
            step.report.copied[store.copy_id] = 1
            try:
                if self._spoiled:
                    raise StoreError("a load failed in this or a preceding step, so KV of this step may be invalid")
                plan, addresses = self._planned[1].store, self._addresses(store.offsets)
                self._copies.store(build_runs(plan, store_moves(self._planned[0], plan, store.tables, addresses)))
            except (PlanError, StoreError) as error:
                logger.warning("Tandem: some KV of request %s is not stored: %s", store.request_id, error)
                step.report.failed.add(store.copy_id)
        if orders.stores:
            StoreWorker._touched = self._copies.mark()[:1]

    @classmethod
    def touching(cls) -> torch.Event | None:
        """Event before which no peer may write to blocks, freed or not; None if it has passed."""
        return next((event for event in cls._touched if not event.query()), None)

    def close(self) -> None:
        self._copies.close()

    def not_loaded(self) -> set[int]:
        """Return the blocks of requests whose load without a transfer has failed. vLLM computes
        their prompts, or ends an engine with several KV cache groups
        (vllm/v1/core/sched/scheduler.py, ``_handle_invalid_blocks``).
        """
        found, self._not_loaded = self._not_loaded, set()
        return found

    def report(self) -> StoreReport | None:
        """Raises StoreError, which ends the engine, if the device hangs."""
        report, self._report = self._report, StoreReport()
        if self._step.report:
            # Until the mark, copies may also use the slots of loads and stores that have failed.
            self._step.mark, self._step.marked_at = self._copies.mark(), time.monotonic()
            self._steps.append(self._step)
            self._step = _Step(StoreReport())
        while self._steps and self._copies.passed(self._steps[0].mark):
            step = self._steps.popleft()
            step.report.copied_s = self._copies.seconds(*step.loads) if step.loads else 0.0
            if step.forward:
                step.report.timed_s = self._copies.seconds(*step.forward) - step.report.copied_s
            report.aggregate(step.report)
            if step.forward or step.loads:
                break  # durations of two steps cannot be added
        first = self._steps[0] if self._steps else None  # it may have passed, while the engine was idle
        if first and time.monotonic() > first.marked_at + _HANGS_S and not self._copies.passed(first.mark):
            # It may still write to slots of staging, so they cannot be given back.
            raise StoreError(f"the device has not ended copies of the KV store within {_HANGS_S:g} s")
        report.adapters = self._adapters.take()
        return report or None

    def _attach_once(self, orders: StoreOrders) -> None:
        if self._tried:
            return
        self._tried = True
        try:
            staging = AttachedStaging(orders.staging)
            self._copies.attach(staging)
        except StoreError as error:
            logger.error(
                "Tandem: this rank cannot map staging memory, so this engine's KV store is off until a restart: %s",
                error,
            )
            self._report.detached = 1
        else:
            self._staging = staging
            self._report.attached = 1

    def _addresses(self, offsets: Mapping[ObjectRef, int]) -> dict[ObjectRef, int]:
        if self._staging is None:
            raise StoreError("this rank has not mapped staging memory")
        return {ref: self._staging.address + offset for ref, offset in offsets.items()}
