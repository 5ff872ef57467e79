"""Blocks of requests in vLLM's KV cache manager, and the scheduler side's references to them: vLLM
counts references, and does not allocate a block again while it has one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Blocks:
    """``lookahead_tokens``: slots that vLLM allocates after a request's tokens for drafts."""

    def __init__(self, lookahead_tokens: int) -> None:
        self._lookahead_tokens = lookahead_tokens
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def take(self, request_id: str, spans: Sequence[slice] | None = None) -> list[KVCacheBlock]:
        """Take a reference to each of a request's blocks except null blocks, and return the blocks,
        in the order in which vLLM frees those of a request.

        ``spans``  a part of each group's block table
        """
        groups = self._bound.get_blocks(request_id).blocks
        parts = groups if spans is None else [group[span] for group, span in zip(groups, spans, strict=True)]
        blocks = [block for part in parts for block in reversed(part) if not block.is_null]
        for block in blocks:
            (block.pool or self._bound.block_pool).touch([block])
        return blocks

    def drop(self, blocks: list[KVCacheBlock]) -> None:
        if blocks:
            self._bound.block_pool.free_blocks(blocks)

    def free(self, request: Request) -> None:
        """Drop vLLM's references. Further calls do nothing until the request has blocks again."""
        self._bound.free(request)

    def zero_edges(self, request_id: str, start_token: int) -> None:
        """Make the step that vLLM is scheduling zero the blocks that a transfer may fill in part: a
        request's first and last new one in each group.

        Attention also reads positions without tokens, with weight 0, and 0 * NaN is NaN. In hybrid
        and mixed-precision caches, stale bytes can be NaN. vLLM zeroes new blocks of such caches,
        except those that a connector loads (``needs_kv_cache_zeroing`` in
        vllm/v1/kv_cache_interface.py, vllm#35219).

        ``start_token``  position after the request's tokens in the prefix cache, whose blocks other
                         requests may share
        """
        for manager in self._bound.coordinator.single_type_managers:
            if manager.records_new_block_ids:
                table = manager.req_to_blocks[request_id][-(-start_token // manager.block_size) :]
                new = [block.block_id for block in table if not block.is_null]
                manager.new_block_ids += dict.fromkeys((*new[:1], *new[-1:]))

    def held(self, without: Set[str]) -> set[int]:
        managers = self._bound.coordinator.single_type_managers
        request_ids = {each for manager in managers for each in manager.req_to_blocks} - without
        tables = (table for each in request_ids for table in self._bound.get_blocks(each).blocks)
        return {block.block_id for table in tables for block in table if not block.is_null}

    @property
    def capacity(self) -> int:
        return self._bound.block_pool.num_gpu_blocks - 1

    def to_compute(self, request: Request) -> int:
        """Return how many free blocks a request without blocks needs to compute all its tokens.

        Blocks that vLLM reuses when a window has passed count once. If as many blocks are free,
        above vLLM's ``watermark``, vLLM can schedule the request's first step (``allocate_slots``
        in vllm/v1/core/kv_cache_manager.py). The blocks of a prefix cache hit count: they may be
        free ones.
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
        assert self._manager is not None, "vLLM has not called bind_kv_cache_manager"
        return self._manager
