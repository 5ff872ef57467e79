"""Hold blocks that a producer rank may still write to after their request's wait has ended.

Its transfer has failed or was cancelled, and a producer rank has not acknowledged that it writes no
more. vLLM drops its references: it computes the request in other blocks, or the request has ended.
The scheduler side takes its own references before that.

A rank's consumer state machine returns Received with ``quarantine``, and later Freed. A
WorkerReport brings both here with a step's output: ``begun`` not later than the request in
``finished_recving``. The references last from the first rank's ``begun`` to the last rank's
``ended``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from connectors.vllm_hma.reports import Kept, WorkerReport
from connectors.vllm_hma.scheduler_side.blocks import Blocks

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True)
class _Hold:
    blocks: list[KVCacheBlock]
    ranks: int = 0


class Quarantine:
    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._holds: dict[Kept, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def keeps(self, request_id: str) -> bool:
        return any(kept.request_id == request_id for kept in self._holds)

    @property
    def block_ids(self) -> set[int]:
        return {block.block_id for hold in self._holds.values() for block in hold.blocks}

    def take(self, report: WorkerReport) -> None:
        """Call it before vLLM handles ``finished_recving`` of the same output and frees blocks."""
        for kept in report.begun:
            if kept not in self._holds:
                self._holds[kept] = _Hold(self._blocks.take(kept.request_id))
            self._holds[kept].ranks += 1
        for kept in report.ended:
            hold = self._holds[kept]
            hold.ranks -= 1
            if not hold.ranks:
                del self._holds[kept]
                self._blocks.drop(hold.blocks)
