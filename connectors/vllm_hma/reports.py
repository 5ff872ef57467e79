"""Reports from the connector's worker side to its scheduler side, at most one per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from connectors.protocol.actions import Due
from connectors.vllm_hma.kv_store.orders import StoreReport


class Kept(NamedTuple):
    """Request and transfer whose blocks are in quarantine.

    Another request may reuse either id alone in the meantime.
    """

    request_id: str
    transfer_id: str


@dataclass(slots=True)
class QuarantineReport:
    """Changes of quarantine since the last report, with one entry per rank.

    ``begun``  requests whose blocks went into quarantine
    ``ended``  requests whose blocks left it
    """

    begun: list[Kept] = field(default_factory=list)
    ended: list[Kept] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.begun or self.ended)

    def __add__(self, other: QuarantineReport) -> QuarantineReport:
        return QuarantineReport(self.begun + other.begun, self.ended + other.ended)


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Report of one or several ranks.

    ``quarantine``  changes of quarantine
    ``due``         queued requests whose wait has ended: prefill starts the prompt, or sends no KV
    ``store``       copies of the KV store; None if there were none
    ``requested``   whether the scheduler side has requested a report even without changes
    """

    quarantine: QuarantineReport = field(default_factory=QuarantineReport)
    due: list[Due] = field(default_factory=list)
    store: StoreReport | None = None
    requested: bool = False

    def __bool__(self) -> bool:
        return bool(self.quarantine or self.due or self.store or self.requested)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        store = self.store or other.store
        if self.store and other.store:
            store = self.store.aggregate(other.store)
        requested = self.requested or other.requested
        return WorkerReport(self.quarantine + other.quarantine, self.due + other.due, store, requested)
