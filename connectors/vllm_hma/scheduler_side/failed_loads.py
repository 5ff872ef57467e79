"""Delay requests with a failed transfer until this engine can compute their prompts.

vLLM keeps such a request in its queue of requests with blocks (``kv_holding_waiting`` in
vllm/v1/core/sched/scheduler.py). After ``finished_recving``, it frees the request's blocks and
schedules no waiting request behind it until it fits. Requests in that queue that have received
their KV, through any connector, keep their blocks meanwhile, and blocks in quarantine are not free.
If the failed request does not fit beside both, the queue never moves: computing a prompt needs more
blocks of a window than receiving it. vLLM skips requests that wait for KV, so ``finished_recving``
of the failed request is delayed.

Blocks of running requests do not count: a running request ends, or is preempted and loses its
blocks. The scheduler side frees the blocks of a delayed request, unless they are in quarantine.
vLLM reserves the blocks that it needs before it admits another load
(``_inflight_prefill_reserved_blocks``).
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from connectors.vllm_hma.scheduler_side.blocks import Blocks
from connectors.vllm_hma.scheduler_side.quarantine import Quarantine

if TYPE_CHECKING:
    from vllm.v1.request import Request


class FailedLoads:
    """Requests whose transfer failed on a rank; vLLM still treats them as waiting for KV."""

    def __init__(self, blocks: Blocks, quarantine: Quarantine) -> None:
        self._blocks = blocks
        self._quarantine = quarantine
        # Each request and the number of blocks that it needs, by request id.
        self._delayed: dict[str, tuple[Request, int]] = {}

    def __len__(self) -> int:
        return len(self._delayed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._delayed

    def add(self, request: Request) -> None:
        self._delayed[request.request_id] = request, self._blocks.to_compute(request)

    def left(self, request_id: str) -> None:
        """Let the next ``take_fitting`` return an ended request."""
        if request_id in self._delayed:
            self._delayed[request_id] = self._delayed[request_id][0], 0

    def take_fitting(self, running: Set[str]) -> set[str]:
        """Free blocks of delayed requests; remove and return each request that fits into the pool
        beside the blocks in quarantine and those of requests that are not ``running``: these load
        KV, wait for a step, or have ended while a connector uses their blocks.

        Requests that fit are not added up: vLLM schedules them one after another.
        """
        if not self._delayed:
            return set()
        for request_id, (request, _) in self._delayed.items():
            if not self._quarantine.keeps(request_id):
                self._blocks.free(request)
        left = self._blocks.capacity - len(self._blocks.held(without=running) | self._quarantine.block_ids)
        fitting = {request_id for request_id, (_, needed) in self._delayed.items() if needed <= left}
        for request_id in fitting:
            del self._delayed[request_id]
        return fitting
