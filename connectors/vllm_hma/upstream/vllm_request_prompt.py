"""Change a prefill request in vLLM, so that its steps compute the KV that the consumer needs.

vLLM has no public call for this and stores the prompt's tokens twice: the scheduler schedules
``_all_token_ids``, and workers receive ``prompt_token_ids``. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/request.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import Request


def drop_last_token(request: Request) -> None:
    """Remove the prompt's last token, which the consumer computes; not a prompt's only one."""
    if request.num_prompt_tokens < 2 or request.prompt_token_ids is None:
        return
    # Create a new list: the caller may share the old one.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1]  # noqa: SLF001 - the module docstring has the source
    request.num_prompt_tokens -= 1


def hide_last_tokens(request: Request, tokens: int) -> None:
    """Hide the prompt's tokens from position ``tokens`` on, so that a step ends before them.

    Workers have the whole prompt: they treat every step up to there as a chunk of an incomplete
    prompt and discard its sample. The scheduler must also treat the last of these steps so: call
    ``show_last_tokens`` while vLLM schedules it, before ``Scheduler._update_after_schedule``.
    """
    del request._all_token_ids[tokens:]  # noqa: SLF001 - the module docstring has the source


def send_whole_prompt(new: NewRequestData) -> None:
    """vLLM fills ``prefill_token_ids``, for its V2 model runner, without the hidden tokens."""
    if new.prefill_token_ids is not None and new.prompt_token_ids is not None:
        new.prefill_token_ids = list(new.prompt_token_ids)


def show_last_tokens(request: Request) -> None:
    assert request.prompt_token_ids is not None, (
        f"request {request.request_id} has prompt embeddings, so it has no hidden tokens"
    )
    request._all_token_ids += request.prompt_token_ids[request.num_tokens :]  # noqa: SLF001 - see module


def sample_last_token(request: Request) -> None:
    """Restrict sampling to the prompt's last token. Call it before ``drop_last_token``.

    EAGLE and MTP compute the drafter's KV of a position from the token after it. For the new last
    position, that is the one which this engine samples; the consumer continues with the dropped
    one.
    """
    if request.num_prompt_tokens < 2 or request.prompt_token_ids is None or request.sampling_params is None:
        return
    if request.use_structured_output:
        # The grammar would reject the prompt's token, and vLLM would end the request with an error.
        return
    # A copy: the caller may share the parameters.
    request.sampling_params = request.sampling_params.clone()
    request.sampling_params.allowed_token_ids = [request.prompt_token_ids[-1]]
