"""Corrects the cached-token count of a prompt that another engine computed.

vLLM's scheduler counts received KV as cached tokens. Clients expect what one engine would report:
tokens that were computed for this request are not cached. AsyncLLM takes no output processor from
outside, so its class is replaced. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/output_processor.py
"""

from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.metrics.stats import PrefillStats


class CachedTokenCounts(OutputProcessor):
    """Counts prompt tokens received from another engine as computed and, in whole blocks, as newly
    cached."""

    block_tokens: int | None
    """Block size of the prefix cache in tokens; None without a prefix cache."""

    @classmethod
    def take_over(cls, processor: OutputProcessor, block_tokens: int | None) -> None:
        """Change the class of the processor that AsyncLLM made."""
        processor.__class__ = cls
        processor.block_tokens = block_tokens

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **options: Any
    ) -> OutputProcessorOutput:
        for output in engine_core_outputs:
            state, stats = self.request_states.get(output.request_id), output.prefill_stats
            if state is not None and stats is not None and stats.num_external_cached_tokens:
                # vLLM sets this field from `kv_transfer_params` if a proxy sends the legs one after
                # the other (v1/engine/output_processor.py).
                state.remote_prefill_cached_tokens = stats.num_local_cached_tokens
                stats.num_cache_creation_tokens = newly_cached(stats, self.block_tokens)
        return super().process_outputs(engine_core_outputs, *args, **options)


def newly_cached(stats: PrefillStats, block_tokens: int | None) -> int:
    """Return the prompt tokens in whole blocks that were not cached before."""
    if block_tokens is None:
        return 0
    return max(0, stats.num_prompt_tokens // block_tokens * block_tokens - stats.num_local_cached_tokens)
