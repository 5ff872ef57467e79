"""Removes the last token of a request's prompt before vLLM schedules it, or samples that token.

vLLM has no public call for the former and stores the prompt's tokens twice. Source:
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


def sample_last_token(request: Request) -> None:
    """Let the request sample its prompt's last token, and no other.

    Call it before ``drop_last_token``. EAGLE and MTP compute KV of a position from the next token.
    At the end of a prompt that is the sampled one, which would be a guess here: the consumer
    continues with the prompt's own last token.
    """
    if request.num_prompt_tokens < 2 or request.prompt_token_ids is None or request.sampling_params is None:
        return
    # A copy: the caller may share the parameters.
    request.sampling_params = request.sampling_params.clone()
    request.sampling_params.allowed_token_ids = [request.prompt_token_ids[-1]]
