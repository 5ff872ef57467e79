"""What the workers' half of the connector tells the scheduler's half, with each step's output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from connectors.protocol.actions import Due


class Kept(NamedTuple):
    """The blocks of a request for one transfer. Either id alone may come again while they are kept."""

    request_id: str
    transfer_id: str


@dataclass(slots=True)
class QuarantineReport:
    """What has changed on some ranks since their last reports, with an entry for each rank.

    ``lasts`` on some rank: vLLM passes no empty report on, and the scheduler's half is to look for room in each step.
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
    """Of one rank or several: blocks in quarantine, and queued requests whose prompts are about to start."""

    quarantine: QuarantineReport = field(default_factory=QuarantineReport)
    due: list[Due] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.quarantine or self.due)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.quarantine + other.quarantine, self.due + other.due)
