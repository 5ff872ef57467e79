"""What the workers' half of the connector tells the scheduler's half, with each step's output."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from connectors.protocol.actions import Due
from connectors.vllm_hma.quarantine import QuarantineReport


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Of one rank or several: blocks in quarantine, and queued requests whose prompts are about to start."""

    quarantine: QuarantineReport = field(default_factory=QuarantineReport)
    due: list[Due] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.quarantine or self.due)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.quarantine + other.quarantine, self.due + other.due)
