"""First tokens for the client, through vLLM's own output processor."""

from __future__ import annotations

import asyncio

import pytest
from transformers import AutoTokenizer
from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats

from actors.replay_log import KvArrivals, ServedCall
from actors.upstream.vllm_output_processor import SharedRequestOutputs
from configs.settings.service import DEMO_MODEL_DIR

PROMPT = 87


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
