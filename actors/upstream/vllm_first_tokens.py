"""Leaves a request open in vLLM's frontend after its first token, which another engine continues.

The engine core ends the request after one token (`max_tokens` is 1). Of the end, the frontend would
report a finish reason and release text that it holds back for stop strings; the engine that
continues does neither. AsyncLLM takes no output processor from outside, so its class is replaced.
Source: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/output_processor.py
"""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

from actors.request import TRANSFER_FIELD
from actors.upstream.vllm_cached_token_counts import CachedTokenCounts


class FirstTokenOutputs(CachedTokenCounts):
    """Hides the end of `unfinished` requests that only `max_tokens` has ended."""

    unfinished: set[str]
    """Ids of requests that another engine continues."""

    @classmethod
    def take_over(cls, processor: OutputProcessor, block_tokens: int | None) -> None:
        super().take_over(processor, block_tokens)
        assert isinstance(processor, cls)
        processor.unfinished = set()

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **options: Any
    ) -> OutputProcessorOutput:
        for output in engine_core_outputs:
            if output.finish_reason is FinishReason.LENGTH and output.request_id in self.unfinished:
                output.finish_reason = None
        return super().process_outputs(engine_core_outputs, *args, **options)


def samples_first_token(params: SamplingParams) -> bool:
    """Return whether the request is a prefill leg that samples the first token of an answer."""
    transfer = (params.extra_args or {}).get(TRANSFER_FIELD)
    return isinstance(transfer, dict) and bool(transfer.get("do_remote_decode") and transfer.get("first_token"))


def one_token(params: SamplingParams) -> SamplingParams:
    """Return the parameters limited to one token."""
    params = params.clone()
    params.max_tokens = 1
    # vLLM refuses a minimum above the maximum. For the first token, 1 has the effect of any other.
    params.min_tokens = min(params.min_tokens, 1)
    return params
