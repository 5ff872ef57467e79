"""Blocks that a request has let go of while a prefill rank may still write to them: nobody gets them.

vLLM counts references to blocks. A request whose transfer has been given up, and whose producer does not answer, is to
be computed in other blocks; vLLM drops its references to the first ones. The scheduler's half takes one of its own
before that, and drops it once no rank of this engine has a producer rank that may still write.

    a rank's consumer machine    Received(quarantine) ... Freed
    QuarantineReport             of all ranks, with each step's output, not later than the rank's own Received
    Quarantine                   the scheduler's references, from the first rank's word to the last one's

vLLM puts a request whose load has failed in front of all others that wait, for it takes the blocks that it needs to be
free again. One that does not fit into what quarantine leaves would stand in everybody's way, also of those that must
run to their end before it fits: it stays among those that wait for KV, which others pass, until there is room.
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
    blocks: list[KVCacheBlock]
    ranks: int = 0


class Quarantine:
    """References to blocks, of one engine."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._holds: dict[Kept, _Hold] = {}
        # Requests that would go on if there were room, and for how many blocks.
        self._waiting: dict[str, int] = {}

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def __len__(self) -> int:
        """How many transfers keep blocks here."""
        return len(self._holds)

    def take(self, report: QuarantineReport) -> None:
        """Before vLLM hears of this step's transfer results: until then the requests have their blocks."""
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
        """Of the requests that need not wait for KV any more, now or since an earlier call: those with room to go on.

        Only such as have blocks in quarantine are ever held back.
        """
        kept = {kept.request_id: len(hold.blocks) for kept, hold in self._holds.items()}
        self._waiting |= {request_id: kept[request_id] for request_id in ended if request_id in kept}
        passing = set(ended) - self._waiting.keys()
        room = self._bound.block_pool.get_num_free_blocks()
        for request_id, needed in list(self._waiting.items()):
            if request_id not in kept or needed <= room:
                room -= needed
                del self._waiting[request_id]
                passing.add(request_id)
        return passing

    def left(self, request_id: str) -> None:
        """The request has ended otherwise: it needs no room."""
        if request_id in self._waiting:
            self._waiting[request_id] = 0

    @property
    def _bound(self) -> KVCacheManager:
        assert self._manager is not None, "vLLM binds its cache manager before the first request"
        return self._manager

    def _take_references(self, request_id: str) -> list[KVCacheBlock]:
        """To all of a request's blocks, those of a cached prefix included, in the order in which vLLM frees them."""
        groups = self._bound.get_blocks(request_id).blocks
        blocks = [block for group in groups for block in reversed(group) if not block.is_null]
        for block in blocks:
            (block.pool or self._bound.block_pool).touch([block])
        return blocks
