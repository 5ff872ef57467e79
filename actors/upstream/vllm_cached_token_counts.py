"""What a client is told of its prompt's cached tokens, where another engine has computed the prompt.

To vLLM's scheduler, KV that arrives is like KV that is in the cache. To the client it is not: one engine would have
computed it.
"""

from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.metrics.stats import PrefillStats


class CachedTokenCounts(OutputProcessor):
    """Counts a prompt's tokens that came from another engine as computed and, where they fill blocks, as cached now."""

    block_tokens: int | None
    """Of the prefix cache; None where there is none."""

    @classmethod
    def take_over(cls, processor: OutputProcessor, block_tokens: int | None) -> None:
        """Make a `CachedTokenCounts` of the processor that AsyncLLM has made, which takes none from outside."""
        processor.__class__ = cls
        processor.block_tokens = block_tokens

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **options: Any
    ) -> OutputProcessorOutput:
        for output in engine_core_outputs:
            state, stats = self.request_states.get(output.request_id), output.prefill_stats
            if state is not None and stats is not None and stats.num_external_cached_tokens:
                # vLLM's own field for this; a router that has waited for prefill can fill it from there.
                state.remote_prefill_cached_tokens = stats.num_local_cached_tokens
                stats.num_cache_creation_tokens = newly_cached(stats, self.block_tokens)
        return super().process_outputs(engine_core_outputs, *args, **options)


def newly_cached(stats: PrefillStats, block_tokens: int | None) -> int:
    """Prompt tokens in whole blocks that were not in the cache before."""
    if block_tokens is None:
        return 0
    return max(0, stats.num_prompt_tokens // block_tokens * block_tokens - stats.num_local_cached_tokens)
