"""Messages between the scheduler side and the worker side of the KV store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from connectors.planning.layout import EngineLayout
from connectors.protocol.agent_metadata import ModelIdentity
from connectors.store.planning.prefix import ObjectRef
from connectors.store.tiers.staging import StagingLocation
from connectors.vllm_hma.model.adapters import UNKNOWN, Adapter

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

Tables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Copy verified objects into a request's blocks, before the forward pass.

    ``copy_id``          identifies loads and stores of one scheduler
    ``start_token``      number of tokens in the engine's own cache
    ``offsets``          offset in staging, by object
    ``beside_transfer``  whether to load only full attention, because a transfer supplies the rest
    """

    copy_id: int
    request_id: str
    tables: Tables
    start_token: int
    end_token: int
    offsets: dict[ObjectRef, int]
    beside_transfer: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    copy_id: int
    request_id: str
    tables: Tables
    offsets: dict[ObjectRef, int]


@dataclass(slots=True)
class StoreOrders:
    """Orders of one step, for all ranks.

    ``timed_tokens``          number of tokens of the step if ranks measure its duration, else 0
    ``timed_context_tokens``  mean number of tokens that these tokens attend to
    """

    staging: StagingLocation
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    timed_tokens: int = 0
    timed_context_tokens: float = 0.0


@dataclass(slots=True)
class StoreReport:
    """Report of one or more ranks on their copies since the last report.

    ``attached``, ``detached``  number of ranks that have mapped the staging memory, or have failed
                                to; each rank reports once, with its first step
    ``copied``                  number of ranks that have ended a copy, with or without success, by
                                copy id
    ``failed``                  copy ids of stores that have failed on a rank
    ``broken``                  whether a load without a transfer failed. Later KV of any request
                                that shares blocks with the load may be invalid
    ``timed_s``, ``copied_s``   seconds on the slowest rank for the step with ``timed_tokens``, and
                                for copies of loads; 0: not measured, or a load failed
    """

    attached: int = 0
    detached: int = 0
    copied: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)
    broken: bool = False
    adapters: dict[Adapter, str] = field(default_factory=dict)
    timed_tokens: int = 0
    timed_context_tokens: float = 0.0
    timed_s: float = 0.0
    copied_s: float = 0.0

    def __bool__(self) -> bool:
        return self != StoreReport()

    def aggregate(self, other: StoreReport) -> StoreReport:
        self.copied += other.copied
        self.failed |= other.failed
        self.attached += other.attached
        self.detached += other.detached
        self.broken = self.broken or other.broken
        self.timed_tokens = max(self.timed_tokens, other.timed_tokens)
        self.timed_context_tokens = max(self.timed_context_tokens, other.timed_context_tokens)
        self.timed_s = max(self.timed_s, other.timed_s)
        self.copied_s = max(self.copied_s, other.copied_s)
        for adapter, identity in other.adapters.items():
            if self.adapters.setdefault(adapter, identity) != identity:
                # Ranks on several hosts may have loaded different files.
                self.adapters[adapter] = UNKNOWN
        return self


@dataclass(frozen=True, slots=True)
class RankCache(KVConnectorHandshakeMetadata):
    """Cache layout and model of a rank; workers send it to the scheduler when the engine starts."""

    layout: EngineLayout
    model: ModelIdentity


def scheduled(output: SchedulerOutput) -> list[tuple[str, int]]:
    """Return (request id, tokens computed before this step) of all requests of a step."""
    cached = output.scheduled_cached_reqs
    return [
        *((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs),
        *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
    ]
