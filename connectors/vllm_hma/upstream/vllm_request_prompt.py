"""Removes the last token of a request's prompt before vLLM schedules the request.

vLLM has no public call for it and stores the prompt's tokens twice. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/request.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def drop_last_token(request: Request) -> None:
    """Remove the prompt's last token, which the consumer computes.

    A prompt of one token is kept.
    """
    if request.num_prompt_tokens < 2 or request.prompt_token_ids is None:
        return
    # Create a new list: the caller may share the old one.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1]  # noqa: SLF001 - the module docstring has the source
    request.num_prompt_tokens -= 1
