"""Reports from the connector's worker side to its scheduler side, one per step."""

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
    ``lasts``  whether a rank still has blocks in quarantine. True keeps the report non-empty, so
               vLLM delivers it and the scheduler side checks for free blocks in each step
    """

    begun: list[Kept] = field(default_factory=list)
    ended: list[Kept] = field(default_factory=list)
    lasts: bool = False

    def __bool__(self) -> bool:
        return bool(self.begun or self.ended or self.lasts)

    def __add__(self, other: QuarantineReport) -> QuarantineReport:
        return QuarantineReport(self.begun + other.begun, self.ended + other.ended, self.lasts or other.lasts)


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Report of one or several ranks.

    ``quarantine``  changes of quarantine
    ``due``         queued requests whose prompts are about to start or whose transfers failed
    ``store``       copies of the KV store; None if there were none
    """

    quarantine: QuarantineReport = field(default_factory=QuarantineReport)
    due: list[Due] = field(default_factory=list)
    store: StoreReport | None = None

    def __bool__(self) -> bool:
        return bool(self.quarantine or self.due or self.store)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        store = self.store or other.store
        if self.store and other.store:
            store = self.store.aggregate(other.store)
        return WorkerReport(self.quarantine + other.quarantine, self.due + other.due, store)
