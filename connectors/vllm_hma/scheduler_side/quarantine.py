"""Holds blocks that a prefill rank may still write to after their request has released them.

vLLM counts references to blocks. If a transfer was cancelled and its producer does not answer, vLLM
drops its references to the request's blocks and computes the request in other blocks. The scheduler
side takes its own references before that. It drops them when no producer rank can write to the
blocks any more.

    consumer machine of a rank  Received(quarantine) ... Freed
    QuarantineReport            of all ranks, with each step's output, not later than Received
    Quarantine                  the scheduler's references, from the first rank's report to the last

vLLM puts a request whose load has failed at the head of its queue, because it assumes that the
request's blocks are free again. A request too large for the blocks outside quarantine would block
the queue. The scheduler side therefore delays ``finished_recving`` of such a request until the
request fits: vLLM skips requests that wait for KV.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connectors.vllm_hma.reports import Kept, QuarantineReport

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True)
class _Hold:
    """References to one transfer's blocks, and the number of ranks that keep them in quarantine."""

    blocks: list[KVCacheBlock]
    ranks: int = 0


class Quarantine:
    """The scheduler's references to blocks in quarantine, for one engine."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._holds: dict[Kept, _Hold] = {}
        # Number of blocks that each delayed request needs, by request id.
        self._waiting: dict[str, int] = {}

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def __len__(self) -> int:
        """Return the number of transfers with blocks in quarantine."""
        return len(self._holds)

    def take(self, report: QuarantineReport) -> None:
        """Apply a report, before vLLM reads the step's results and frees blocks of requests."""
        for kept in report.begun:
            if kept not in self._holds:
                self._holds[kept] = _Hold(self._take_references(kept.request_id))
            self._holds[kept].ranks += 1
        for kept in report.ended:
            hold = self._holds[kept]
            hold.ranks -= 1
            if not hold.ranks:
                del self._holds[kept]
                self._bound.block_pool.free_blocks(hold.blocks)

    def go_on(self, ended: Set[str]) -> set[str]:
        """Return the requests that no longer wait for KV and fit into the free blocks.

        ``ended``  requests whose wait has ended in this step

        The result includes requests delayed in earlier steps that fit now. Only requests with
        blocks in quarantine are delayed.
        """
        kept = {kept.request_id: len(hold.blocks) for kept, hold in self._holds.items()}
        self._waiting |= {request_id: kept[request_id] for request_id in ended if request_id in kept}
        admitted = set(ended) - self._waiting.keys()
        free_blocks = self._bound.block_pool.get_num_free_blocks()
        for request_id, needed in list(self._waiting.items()):
            if request_id not in kept or needed <= free_blocks:
                free_blocks -= needed
                del self._waiting[request_id]
                admitted.add(request_id)
        return admitted

    def delays(self, request_id: str) -> bool:
        """Return whether the request's transfer has ended but too few blocks are free for it."""
        return request_id in self._waiting

    def left(self, request_id: str) -> None:
        """Record that the request has ended: it needs no blocks."""
        if request_id in self._waiting:
            self._waiting[request_id] = 0

    @property
    def _bound(self) -> KVCacheManager:
        assert self._manager is not None, "vLLM binds its cache manager before the first request"
        return self._manager

    def _take_references(self, request_id: str) -> list[KVCacheBlock]:
        """Take references to all blocks of a request, in the order in which vLLM frees them."""
        groups = self._bound.get_blocks(request_id).blocks
        blocks = [block for group in groups for block in reversed(group) if not block.is_null]
        for block in blocks:
            (block.pool or self._bound.block_pool).touch([block])
        return blocks
