"""A leg of a request: its transfer parameters, its output and the time of its first token."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(frozen=True)
class Leg:
    output: RequestOutput
    token_at: list[float]
    """Monotonic time of each token."""

    @property
    def first_token_at(self) -> float:
        return self.token_at[0]


async def leg(
    engine: AsyncLLM,
    prompt: list[int],
    max_tokens: int,
    transfer: dict[str, Any] | None,
    request_id: str | None = None,
    **sampling: Any,
) -> Leg:
    """Send a request, greedy unless ``sampling`` has other parameters."""
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
        **({"temperature": 0.0} | sampling),
    )
    token_at: list[float] = []
    final = None
    async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, request_id or uuid.uuid4().hex):
        token_at += [time.monotonic()] * (len(output.outputs[0].token_ids) - len(token_at))
        final = output
    assert final is not None
    return Leg(final, token_at)
