"""What the client is told of cached tokens, through vLLM's own output processor."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats

from actors.upstream.vllm_output_processor import SharedRequestOutputs

PROMPT = 87
BLOCK = 32


def told(local: int, external: int, block_tokens: int | None = BLOCK, now_cached: int = 64) -> tuple[int, int]:
    """(cached, newly cached) of a prompt of 87 tokens, of which `local` were in the cache and `external` arrived."""
    processor = OutputProcessor(None, log_stats=False)
    SharedRequestOutputs.take_over(processor, block_tokens)
    params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.DELTA)
    collector = RequestOutputCollector(params.output_kind, request_id="r")
    processor.add_request(
        EngineCoreRequest(
            request_id="r",
            external_req_id="r",
            prompt_token_ids=list(range(PROMPT)),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        ),
        None,
        queue=collector,
    )
    stats = PrefillStats()
    stats.set(PROMPT, local, external)
    stats.finalize(now_cached)
    processor.process_outputs([EngineCoreOutput(request_id="r", new_token_ids=[7], prefill_stats=stats)])
    output = collector.get_nowait()
    return output.num_cached_tokens, output.num_cache_creation_tokens


@pytest.mark.parametrize(
    ("local", "external", "block_tokens", "expected"),
    [
        (0, 0, BLOCK, (0, 64)),
        (64, 0, BLOCK, (64, 0)),
        (0, 86, BLOCK, (0, 64)),
        (32, 54, BLOCK, (32, 32)),
        (64, 22, BLOCK, (64, 0)),
        (0, 86, None, (0, 0)),
    ],
    ids=["alone", "alone, again", "apart", "apart, partly known", "apart, again", "apart, without a prefix cache"],
)
def test_what_came_from_another_engine_is_not_called_cached(local, external, block_tokens, expected):
    """As one engine would say that had computed it."""
    assert told(local, external, block_tokens) == expected
