"""Removes the last token of a request's prompt before vLLM schedules the request.

vLLM has no call for it and keeps the prompt's tokens twice. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/request.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def drop_last_token(request: Request) -> None:
    """Let vLLM compute the prompt without its last token, which the consumer computes. Keep a prompt of one token."""
    if request.num_prompt_tokens < 2 or request.prompt_token_ids is None:
        return
    # A new list: the request may share the old one with its creator.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1]  # noqa: SLF001 - see the module's docstring
    request.num_prompt_tokens -= 1
