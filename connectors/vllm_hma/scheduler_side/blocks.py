"""The blocks of requests in vLLM's KV cache manager, of which the scheduler side takes references.

vLLM counts references to blocks. A block with a reference of ours stays allocated after vLLM has
dropped its own, so no other request gets it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Blocks:
    """The KV cache manager of one engine, as the connector uses it."""

    def __init__(self, lookahead_tokens: int) -> None:
        self._lookahead_tokens = lookahead_tokens
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def take(self, request_id: str, spans: Sequence[slice] | None = None) -> list[KVCacheBlock]:
        """Take references to a request's blocks; return them in the order in which vLLM frees them.

        ``spans``  part of each group's block table; all blocks if None
        """
        groups = self._bound.get_blocks(request_id).blocks
        parts = groups if spans is None else [group[span] for group, span in zip(groups, spans, strict=True)]
        blocks = [block for part in parts for block in reversed(part) if not block.is_null]
        for block in blocks:
            (block.pool or self._bound.block_pool).touch([block])
        return blocks

    def drop(self, blocks: list[KVCacheBlock]) -> None:
        """Drop references that ``take`` has returned."""
        if blocks:
            self._bound.block_pool.free_blocks(blocks)

    def free(self, request: Request) -> None:
        """Drop vLLM's references to a request's blocks.

        A later call, also by vLLM, has no effect.
        """
        self._bound.free(request)

    def held(self, without: Set[str]) -> set[int]:
        """Return the ids of the blocks of all requests but those in ``without``."""
        managers = self._bound.coordinator.single_type_managers
        request_ids = {each for manager in managers for each in manager.req_to_blocks} - without
        tables = (table for each in request_ids for table in self._bound.get_blocks(each).blocks)
        return {block.block_id for table in tables for block in table if not block.is_null}

    @property
    def capacity(self) -> int:
        """Number of blocks in the pool. One of vLLM's blocks is the null block."""
        return self._bound.block_pool.num_gpu_blocks - 1

    def to_compute(self, request: Request) -> int:
        """Return the number of blocks for the whole prompt of a request, if it had none.

        vLLM schedules the request's first step if as many are free (``allocate_slots`` in
        vllm/v1/core/kv_cache_manager.py). A prefix cache hit does not reduce the number: its blocks
        may be free ones.
        """
        manager = self._bound
        tokens = min(request.num_tokens + self._lookahead_tokens, manager.max_model_len)
        return manager.coordinator.get_num_blocks_to_allocate(
            request_id="",
            num_tokens=tokens,
            new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=0,
            num_local_computed_tokens=0,
            num_tokens_main_model=min(request.num_tokens, manager.max_model_len),
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )

    @property
    def _bound(self) -> KVCacheManager:
        assert self._manager is not None, "vLLM binds its cache manager before the first request"
        return self._manager
