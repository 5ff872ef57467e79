"""Corrects what vLLM's frontend reports of requests that two engines share.

*Cached tokens*: vLLM's scheduler counts received KV as cached tokens. Clients expect what one
engine would report: tokens that were computed for this request are not cached.

*First tokens*: a prefill engine that samples the first token ends the request after it
(`max_tokens` is 1). For this end, the frontend would report a finish reason and release text that
it holds back for stop strings; decode, which continues the answer, does neither.

AsyncLLM takes no output processor from outside, so its class is replaced. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/output_processor.py
"""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from actors.request import TRANSFER_FIELD


class SharedRequestOutputs(OutputProcessor):
    """Counts prompt tokens received from another engine as computed and, in whole blocks, as newly
    cached. Hides the end of `unfinished` requests if only `max_tokens` has ended them."""

    block_tokens: int | None
    """Block size of the prefix cache in tokens; None without a prefix cache."""
    unfinished: set[str]
    """Ids of requests that another engine continues."""

    @classmethod
    def take_over(cls, processor: OutputProcessor, block_tokens: int | None) -> None:
        """Change the class of the processor that AsyncLLM made."""
        processor.__class__ = cls
        processor.block_tokens = block_tokens
        processor.unfinished = set()

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        *args: Any,
        **options: Any,
    ) -> OutputProcessorOutput:
        ended: list[EngineCoreOutput] = []
        for output in engine_core_outputs:
            state, stats = self.request_states.get(output.request_id), output.prefill_stats
            if state is not None and stats is not None and stats.num_external_cached_tokens:
                # vLLM's own field for this, which a router that waits for prefill would fill.
                state.remote_prefill_cached_tokens = stats.num_local_cached_tokens
                stats.num_cache_creation_tokens = newly_cached(stats, self.block_tokens)
            if output.finish_reason is FinishReason.LENGTH and output.request_id in self.unfinished:
                output.finish_reason = None
                ended.append(output)
        processed = super().process_outputs(
            engine_core_outputs, engine_core_timestamp, iteration_stats, *args, **options
        )
        for output in ended:
            # As vLLM at a request's end, for metrics, spans and the autoscaler.
            state = self.request_states.get(output.request_id)
            if state is not None:
                self._update_stats_from_finished(state, FinishReason.LENGTH, iteration_stats)
                if self.tracing_enabled:
                    self.do_tracing(output, state, iteration_stats)
        return processed


def newly_cached(stats: PrefillStats, block_tokens: int | None) -> int:
    """Return the prompt tokens in whole blocks that were not cached before."""
    if block_tokens is None:
        return 0
    return max(0, stats.num_prompt_tokens // block_tokens * block_tokens - stats.num_local_cached_tokens)


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
