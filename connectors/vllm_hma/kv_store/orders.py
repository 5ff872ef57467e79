"""Messages between the store's scheduler and worker sides, one per step and direction."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from connectors.planning.layout import EngineLayout
from connectors.store.keys.names import ModelFingerprint
from connectors.store.planning.prefix import ObjectRef

Tables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Copy objects, which are verified, into a request's blocks before the step's forward."""

    load_id: int
    request_id: str
    tables: Tables
    start_token: int
    end_token: int
    offsets: dict[ObjectRef, int]


@dataclass(frozen=True, slots=True)
class Store:
    """Copy objects out of a request's blocks after the step's forward, into staging."""

    request_id: str
    tables: Tables
    offsets: dict[ObjectRef, int]


@dataclass(slots=True)
class StoreOrders(KVConnectorMetadata):
    """Orders of one step. ``staging`` is the path of the engine's staging memory."""

    staging: str = ""
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)


@dataclass(slots=True)
class StoreReport(KVConnectorWorkerMetadata):
    """Number of ranks that have finished each load, and filled or not filled each slot of staging.

    ``broken`` are requests whose load failed on a rank: KV that they have computed since then is invalid.
    """

    loaded: dict[int, int] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.loaded or self.filled or self.failed)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoreReport:
        assert isinstance(other, StoreReport)
        pairs = ((self.loaded, other.loaded), (self.filled, other.filled), (self.failed, other.failed))
        for mine, theirs in pairs:
            for key, ranks in theirs.items():
                mine[key] = mine.get(key, 0) + ranks
        self.broken |= other.broken
        return self


@dataclass(frozen=True, slots=True)
class StoreCard(KVConnectorHandshakeMetadata):
    """One rank's cache layout and model, sent to the scheduler's process when the engine starts."""

    layout: EngineLayout
    model: ModelFingerprint
