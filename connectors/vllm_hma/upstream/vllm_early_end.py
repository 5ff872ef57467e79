"""End a running request with the next token that vLLM samples for it.

vLLM compares ``max_tokens`` of its scheduler's request after each token. With asynchronous
scheduling, it also schedules no step beyond it, so that a state has not moved on at the end.
Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/core/sched/utils.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request


def end_soon(request: Request) -> bool:
    """Let a request end with its next token; return False if it ends there anyway."""
    # Steps already scheduled sample the placeholders.
    tokens = request.num_output_tokens + max(1, request.num_output_placeholders)
    if tokens >= request.max_tokens or request.resumable:
        return False
    request.max_tokens = tokens
    return True


def ended_early(request: Request) -> bool:
    """Return whether ``max_tokens``, not a stop token, has ended the request."""
    return request.status is RequestStatus.FINISHED_LENGTH_CAPPED


def has_kv(request: Request, tokens: int) -> bool:
    """Return whether exactly the first ``tokens`` tokens have KV; False after a preemption."""
    return request.num_computed_tokens == tokens and not request.num_in_flight_tokens
