"""The load computed from vLLM's own stats objects and request states."""

import time
from types import SimpleNamespace

import pytest
from vllm.config import ParallelConfig, VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from actors.autoscaling.stat_logger import LoadLogger


def request(name: str, tokens: int, prefilling: bool) -> RequestState:
    state = RequestState(
        request_id=name,
        external_req_id=name,
        parent_req=None,
        request_index=0,
        lora_request=None,
        output_kind=RequestOutputKind.DELTA,
        prompt=None,
        prompt_token_ids=[0] * tokens,
        prompt_embeds=None,
        logprobs_processor=None,
        detokenizer=None,
        max_tokens_param=1,
        arrival_time=time.time(),
        queue=None,
        log_stats=True,
        stream_interval=1,
    )
    state.is_prefilling = prefilling
    return state


@pytest.fixture
def llm() -> SimpleNamespace:
    """Part of the engine that LoadLogger reads: vLLM's own output processor."""
    return SimpleNamespace(output_processor=OutputProcessor(tokenizer=None, log_stats=True))


def step(**stats: object) -> IterationStats:
    iteration = IterationStats()
    for name, value in stats.items():
        setattr(iteration, name, value)
    return iteration


def state(load: LoadLogger, llm: SimpleNamespace) -> tuple[float, ...]:
    read = load.read(llm)
    return read["running"], read["waiting"], read["kv_use"]


def test_prompts_that_wait_are_counted_by_their_tokens(llm):
    """Requests with a first token no longer count as waiting."""
    load = LoadLogger(VllmConfig())
    for state in (request("a", 700, True), request("b", 300, True), request("c", 50, False)):
        llm.output_processor.request_states[state.request_id] = state
    assert load.read(llm)["queued_tokens"] == 1000


def test_what_the_scheduler_says_counts_while_there_are_requests(llm):
    """vLLM reports nothing after the last abort; the load shows an idle engine."""
    load = LoadLogger(VllmConfig())
    load.record(SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.25), None)
    llm.output_processor.request_states["a"] = request("a", 1, False)
    assert state(load, llm) == (3, 2, 0.25)
    llm.output_processor.request_states.clear()
    assert state(load, llm) == (0, 0, 0)


def test_data_parallel_ranks_are_one_load(llm):
    """Requests add up; the KV cache is that of all ranks, of which one may not have run a step
    yet.
    """
    config = VllmConfig(parallel_config=ParallelConfig(data_parallel_size=4, data_parallel_size_local=4))
    load = LoadLogger(config)
    manager = PerEngineStatLoggerAdapter(config, [0, 1, 2, 3], lambda *_: load)
    manager.record(SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.25), None, engine_idx=0)
    manager.record(SchedulerStats(num_running_reqs=1, kv_cache_usage=0.5), None, engine_idx=3)
    manager.record(SchedulerStats(num_running_reqs=2, kv_cache_usage=0.75), None, engine_idx=3)
    llm.output_processor.request_states["a"] = request("a", 1, False)
    assert state(load, llm) == (5, 2, 0.25)


def test_steps_reach_the_logger_through_vllms_adapter(llm):
    """vLLM's adapter passes the prompts and token gaps of each step to the logger."""
    load = LoadLogger(VllmConfig())
    manager = PerEngineStatLoggerAdapter(VllmConfig(), [0], lambda *_: load)
    ended = FinishedRequestStats(FinishReason.LENGTH, num_prompt_tokens=900, prefill_time=3.0)
    aborted = FinishedRequestStats(FinishReason.ABORT, num_prompt_tokens=900)
    manager.record(SchedulerStats(), step(finished_requests=[ended, aborted]))
    manager.record(SchedulerStats(), step(inter_token_latencies_iter=[0.02, 0.04]))
    read = load.read(llm)
    assert read["prompt_tokens"] == pytest.approx(900)
    assert read["tpot_s"] == pytest.approx(0.03)
    assert read["tokens_per_s"] > 0
