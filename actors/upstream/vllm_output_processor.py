"""Correct cached tokens and first tokens in vLLM's frontend when two engines share a request.

*Cached tokens*: vLLM's scheduler counts KV that the connector loads as cached tokens. Clients
expect the number of one engine, which excludes tokens computed for this request.

*First tokens*: a prefill engine ends the request after its first token (`max_tokens` is 1). The
frontend would report a finish reason and release text held back for stop strings, although decode
continues the answer. So does a decode engine with a request that moves to another one.

*Reports of first tokens*: AsyncLLM yields nothing before the end of an answer that is not streamed.
The router needs to know earlier that decode has the KV.

AsyncLLM has no parameter for an output processor, so `take_over` replaces the class of AsyncLLM's
own. Source: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/output_processor.py
"""

import asyncio
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from actors.replay_log import SERVED_CALL, KvArrivals, ServedCall
from actors.request import TRANSFER_FIELD

BURST = 32
"""Number of emitted tokens to process before other tasks run."""


class SharedRequestOutputs(OutputProcessor):
    """Output processor for requests that two engines share (see the module).

    Connects the first engine request of each `ServedCall` to the call's timings.
    """

    block_tokens: int | None
    unfinished: set[str]
    """Ids of requests whose answer another engine continues, unless the first token ends it."""
    arrivals: KvArrivals | None = None
    """Receives the ids of requests whose KV times are needed; `ReplayingLLM.start` sets it."""

    @classmethod
    def take_over(cls, processor: OutputProcessor, block_tokens: int | None) -> None:
        """Replace the class of AsyncLLM's processor.

        ``block_tokens``  block size of the prefix cache in tokens; None without a prefix cache
        """
        processor.__class__ = cls
        processor.block_tokens = block_tokens
        processor.unfinished = set()

    def add_request(self, request: EngineCoreRequest, *args: Any, **options: Any) -> None:
        """Register a request. The first of several choices (`n`) receives the KV."""
        served = SERVED_CALL.get()
        first = served is not None and served.request_id is None
        if served is not None and first:
            served.sent_to_engine(request.request_id)
            # Only `generate` takes the times: the entry of a pooling request would stay.
            if self.arrivals is not None and request.sampling_params is not None:
                self.arrivals.expect(request.request_id)
        super().add_request(request, *args, **options)
        if first:
            state: Any = self.request_states[request.request_id]
            state.served = served  # vLLM removes the state at any end of the request

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        *args: Any,
        **options: Any,
    ) -> OutputProcessorOutput:
        ended: list[EngineCoreOutput] = []
        aborted: list[str] = []
        for output in engine_core_outputs:
            state, stats = self.request_states.get(output.request_id), output.prefill_stats
            served: ServedCall | None = getattr(state, "served", None)
            if state is not None and state.is_prefilling and served is not None:
                aborted += self._process_emitted(state, served, len(served.emitted))
                if state.output_kind is RequestOutputKind.FINAL_ONLY and output.finish_reason is None:
                    served.sampled_first()
            if state is not None and stats is not None and stats.num_external_cached_tokens:
                # vLLM's own field for this number. With vLLM's connectors, a router copies it from
                # prefill's answer into the request to decode.
                state.remote_prefill_cached_tokens = stats.num_local_cached_tokens
                stats.num_cache_creation_tokens = newly_cached(stats, self.block_tokens)
            moves = bool(output.kv_transfer_params and output.kv_transfer_params.get("moved"))
            if output.finish_reason is FinishReason.LENGTH and (moves or output.request_id in self.unfinished):
                output.finish_reason = None
                ended.append(output)
        processed = super().process_outputs(
            engine_core_outputs, engine_core_timestamp, iteration_stats, *args, **options
        )
        for output in ended:
            # vLLM makes these calls at the end that this method hides; metrics, spans and the
            # autoscaler need them.
            state = self.request_states.get(output.request_id)
            if state is not None:
                self._update_stats_from_finished(state, FinishReason.LENGTH, iteration_stats)
                if self.tracing_enabled:
                    self.do_tracing(output, state, iteration_stats)
        processed.reqs_to_abort.extend(aborted)
        return processed

    async def restore(self, request_id: str) -> list[str]:
        """Process the emitted tokens of a resumed call while its engine computes them.

        Tokens of an adapter whose identity is not known yet wait for the engine's first output.
        Returns the requests to abort, as vLLM's ``process_outputs``.
        """
        state: Any = self.request_states.get(request_id)
        served: ServedCall | None = getattr(state, "served", None)
        aborted: list[str] = []
        while served is not None and served.emitted and served.source() and request_id in self.request_states:
            aborted += self._process_emitted(state, served, BURST)
            await asyncio.sleep(0)
        return aborted

    def _process_emitted(self, state: Any, served: ServedCall, most: int) -> list[str]:
        aborted: list[str] = []
        for _ in range(min(most, len(served.emitted))):
            output = EngineCoreOutput(state.request_id, [served.emitted.popleft()])
            aborted += super().process_outputs([output]).reqs_to_abort
        # vLLM's statistics begin with the engine's own first output.
        state.is_prefilling = True
        return aborted


def newly_cached(stats: PrefillStats, block_tokens: int | None) -> int:
    """Return the prompt tokens in whole blocks that were not cached; 0 without a prefix cache."""
    if block_tokens is None:
        return 0
    return max(0, stats.num_prompt_tokens // block_tokens * block_tokens - stats.num_local_cached_tokens)


def samples_first_token(params: SamplingParams) -> bool:
    transfer = (params.extra_args or {}).get(TRANSFER_FIELD)
    return isinstance(transfer, dict) and bool(transfer.get("do_remote_decode") and transfer.get("first_token"))


def one_token(params: SamplingParams) -> SamplingParams:
    params = params.clone()
    params.max_tokens = 1
    # vLLM refuses a minimum above the maximum. For the first token, a minimum of 1 has the same
    # effect as any larger one.
    params.min_tokens = min(params.min_tokens, 1)
    return params
