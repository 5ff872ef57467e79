"""Cached-token counts and first tokens for the client, through vLLM's own output processor."""

from __future__ import annotations

import asyncio

import pytest
from transformers import AutoTokenizer
from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from actors.replay_log import KvArrivals, ServedCall
from actors.upstream.vllm_output_processor import SharedRequestOutputs, one_token, samples_first_token
from configs.settings.service import DEMO_MODEL_DIR

PROMPT = 87
BLOCK = 32


def request(params: SamplingParams | None) -> EngineCoreRequest:
    return EngineCoreRequest(
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
    )


def told(local: int, external: int, block_tokens: int | None = BLOCK, now_cached: int = 64) -> tuple[int, int]:
    """(cached, newly cached) of a prompt of 87 tokens, of which `local` were in the cache and
    `external` arrived.
    """
    processor = OutputProcessor(None, log_stats=False)
    SharedRequestOutputs.take_over(processor, block_tokens)
    params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.DELTA)
    collector = RequestOutputCollector(params.output_kind, request_id="r")
    processor.add_request(request(params), None, queue=collector)
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
    """The counts are those of one engine that had computed the prompt."""
    assert told(local, external, block_tokens) == expected


def test_times_are_collected_for_generation_only():
    """Only `generate` takes them: the entry of a pooling request (`encode`) would stay."""
    processor = OutputProcessor(None, log_stats=False)
    SharedRequestOutputs.take_over(processor, None)
    processor.arrivals = arrivals = KvArrivals()
    pooling = request(None)
    pooling.pooling_params = PoolingParams(task="embed")
    for added, collected in ((pooling, False), (request(SamplingParams(detokenize=False)), True)):
        queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request_id="r")
        ServedCall().context().run(processor.add_request, added, None, queue=queue)
        processor.abort_requests(["r"], internal=True)
        arrivals.observe({"fetches": {"r": (1.0, 2.0)}})
        assert (arrivals.take("r").fetch is not None) is collected


@pytest.mark.parametrize("unfinished", [False, True])
def test_the_end_of_a_first_token_is_hidden(unfinished):
    """A request that decode continues stays open, keeps back a possible stop string, and is
    counted once.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    processor = OutputProcessor(tokenizer, log_stats=True)
    SharedRequestOutputs.take_over(processor, None)
    params = SamplingParams(max_tokens=1, stop=["stop"], output_kind=RequestOutputKind.DELTA)
    collector = RequestOutputCollector(params.output_kind, request_id="r")
    processor.add_request(request(params), None, queue=collector)
    if unfinished:
        processor.unfinished.add("r")
    stats = IterationStats()
    (token,) = tokenizer.encode("s", add_special_tokens=False)
    last = EngineCoreOutput(request_id="r", new_token_ids=[token], finish_reason=FinishReason.LENGTH)
    processor.process_outputs([last], 1.0, stats)
    output = collector.get_nowait()
    assert (output.finished, output.outputs[0].finish_reason) == ((False, None) if unfinished else (True, "length"))
    assert output.outputs[0].text == ("" if unfinished else "s")
    assert [one.finish_reason for one in stats.finished_requests] == [FinishReason.LENGTH]
    processor.abort_requests(["r"], internal=True)
    assert not processor.request_states


@pytest.mark.parametrize(
    ("kind", "last", "reported"),
    [
        (RequestOutputKind.FINAL_ONLY, None, True),
        (RequestOutputKind.FINAL_ONLY, FinishReason.LENGTH, False),
        (RequestOutputKind.DELTA, None, False),
    ],
    ids=["an answer", "an answer of one token", "a stream"],
)
async def test_the_first_token_of_an_answer_is_reported(kind, last, reported):
    """vLLM itself would report nothing before its last token. A stream has the token in its first
    chunk, an answer of one token ends with it.
    """
    processor = OutputProcessor(None, log_stats=False)
    SharedRequestOutputs.take_over(processor, None)
    params = SamplingParams(max_tokens=9, detokenize=False, output_kind=kind)
    first_token = asyncio.get_running_loop().create_future()
    served = ServedCall(first_token=first_token)

    def add() -> None:
        processor.add_request(request(params), None, queue=RequestOutputCollector(kind, request_id="r"))

    served.context().run(add)
    assert not first_token.done()
    processor.process_outputs([EngineCoreOutput(request_id="r", new_token_ids=[7], finish_reason=last)])
    assert first_token.done() == reported


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (None, False),
        ({"do_remote_decode": True}, False),
        ({"first_token": True}, False),
        ({"do_remote_prefill": True, "first_token": True}, False),
        ({"do_remote_decode": True, "first_token": True}, True),
    ],
)
def test_which_requests_sample_first_tokens(transfer, expected):
    """Prefill legs that are asked for the first token."""
    assert samples_first_token(SamplingParams(extra_args={"kv_transfer_params": transfer})) is expected
    assert samples_first_token(SamplingParams()) is False


def test_one_token():
    """The limits are 1 whatever the client's are; the client's parameters do not change."""
    params = SamplingParams(max_tokens=9, min_tokens=5, temperature=0.5, stop=["a"])
    only = one_token(params)
    assert (only.max_tokens, only.min_tokens, only.temperature, only.stop) == (1, 1, 0.5, ["a"])
    assert (params.max_tokens, params.min_tokens) == (9, 5)
