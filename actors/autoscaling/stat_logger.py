"""Pass vLLM's statistics of each step to a `LoadMeter`. Imports vLLM."""

import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from actors.autoscaling.load import LoadMeter


class LoadLogger(StatLoggerBase):
    """vLLM stat logger that measures the load of its engine, over all data-parallel ranks."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._rank_count = vllm_config.parallel_config.data_parallel_size
        self._load = LoadMeter(time.monotonic())
        self._ranks: dict[int, tuple[int, int, float]] = {}
        """Running and waiting requests and used fraction of the KV cache, by data-parallel rank."""

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        now_s = time.monotonic()
        if scheduler_stats is not None:
            stats = scheduler_stats
            self._ranks[engine_idx] = stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage
        if iteration_stats is not None:
            for request in iteration_stats.finished_requests:
                if request.prefill_time > 0:  # else it ended before its first token
                    # vLLM reports a request when it ends: on a prefill engine with its first token.
                    self._load.prompt(request.num_prompt_tokens, request.prefill_time, now_s)
            for gap_s in iteration_stats.inter_token_latencies_iter:
                self._load.tokens(gap_s, now_s)

    def log_engine_initialized(self) -> None:
        """Do nothing; vLLM's hook."""

    def read(self, llm: AsyncLLM) -> dict[str, float]:
        requests = llm.output_processor.request_states.values()
        # vLLM reports no step after the last request is aborted, so its last numbers are stale.
        ranks = list(self._ranks.values()) if requests else []
        return self._load.read(time.monotonic()) | {
            "queued_tokens": float(sum(one.prompt_len for one in requests if one.is_prefilling)),
            "running": float(sum(running for running, _, _ in ranks)),
            "waiting": float(sum(waiting for _, waiting, _ in ranks)),
            "kv_use": float(sum(kv_use for _, _, kv_use in ranks)) / self._rank_count if ranks else 0.0,
        }
