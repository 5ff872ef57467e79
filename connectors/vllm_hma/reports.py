"""Reports from the connector's worker side to its scheduler side, at most one per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from connectors.protocol.actions import Due
from connectors.vllm_hma.kv_store.orders import StoreReport


class Kept(NamedTuple):
    """One stay of blocks in quarantine: meanwhile, another request may reuse either id."""

    request_id: str
    transfer_id: str


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Report of one rank or, after ``aggregate``, of several.

    ``begun``, ``ended``  changes of quarantine since each rank's last report, one entry per rank
                          and request
    ``due``               queued requests whose wait has ended; only rank 0 reports them
    ``requested``         as ``Orders.report``
    """

    begun: list[Kept] = field(default_factory=list)
    ended: list[Kept] = field(default_factory=list)
    due: list[Due] = field(default_factory=list)
    store: StoreReport | None = None
    requested: bool = False

    def __bool__(self) -> bool:
        return bool(self.begun or self.ended or self.due or self.store or self.requested)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        store = self.store or other.store
        if self.store and other.store:
            store = self.store.aggregate(other.store)
        begun, ended = self.begun + other.begun, self.ended + other.ended
        return WorkerReport(begun, ended, self.due + other.due, store, self.requested or other.requested)
