"""vLLM's engine core without its model: scheduler, block pool, connector, merged reports.

Nothing of vLLM is replaced. A subclass models the workers, draws requests and checks each step.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

STOP_TOKEN = 7


class Core:
    """``step`` is one random turn of the engine core's loop.

    ``encoder_tokens``     capacity of the encoder's cache, of a model that reads images
    ``ends_within_steps``  most steps for requests that are there at the end of a run
    ``most_requests``      at a time
    """

    ends_within_steps = 600
    most_requests = 30
    ranks: Sequence[Any]

    def __init__(
        self, seed: int, config: VllmConfig, cache: KVCacheConfig, asynchronous: bool, tp: int, encoder_tokens: int = 0
    ) -> None:
        self.rng = random.Random(seed)
        # vLLM turns it off where there is no GPU (platforms/cpu.py).
        config.scheduler_config.async_scheduling = self.asynchronous = asynchronous
        config.cache_config.num_gpu_blocks = cache.num_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        if encoder_tokens:
            # As vLLM sets them for a model that reads images.
            self.scheduler.encoder_cache_manager = EncoderCacheManager(encoder_tokens)
            self.scheduler.max_num_encoder_input_tokens = encoder_tokens
        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(hash_block_size, hashing)
        self.connector: Any = self.scheduler.get_kv_connector()
        self.aggregator = KVOutputAggregator.from_connector(self.connector, tp)
        self.depth = config.max_concurrent_batches
        self.batches: deque[tuple[SchedulerOutput, tuple[Any, ...]]] = deque()
        self.steps = 0
        self.counts = Counter[str]()
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.baseline = self.pool.get_num_free_blocks()

    def close(self) -> None:
        self.scheduler.shutdown()

    # ---- what a subclass adds -------------------------------------------------------------------

    def add(self, number: int) -> None:
        """Add a random request."""
        raise NotImplementedError

    def scheduled(self, output: SchedulerOutput) -> tuple[Any, ...]:
        """Check a scheduled step; return further arguments of ``execute``."""
        raise NotImplementedError

    def execute(self, output: SchedulerOutput, *given: Any) -> ModelRunnerOutput:
        """Carry out a step like the workers."""
        raise NotImplementedError

    def updated(self, result: ModelRunnerOutput) -> None:
        """Follow a step whose result the scheduler has taken."""

    def check_nothing_remains(self) -> None:
        assert not self.scheduler.requests, f"requests have not ended: {list(self.scheduler.requests)}"
        assert self.pool.get_num_free_blocks() == self.baseline, "blocks are lost"

    # ---- the loop -------------------------------------------------------------------------------

    def step(self) -> None:
        """Run like EngineCore: fill the queue of batches, else take the oldest one's output."""
        self.steps += 1
        if len(self.batches) < self.depth and self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.counts["preempted"] += len(output.preempted_req_ids or ())
            self.batches.append((output, self.scheduled(output)))
            if len(self.batches) < self.depth and self.rng.random() < 0.8:
                return
        if self.batches:
            output, given = self.batches.popleft()
            result = self.execute(output, *given)
            self.scheduler.update_from_output(output, result)
            self.updated(result)

    def merged(self, tokens: dict[str, list[int]], reports: Sequence[KVConnectorOutput]) -> ModelRunnerOutput:
        """Return the ranks' outputs as the executor merges them."""
        outputs = []
        for report in reports:
            each = ModelRunnerOutput(list(tokens), {r: i for i, r in enumerate(tokens)}, list(tokens.values()))
            each.kv_connector_output = report
            outputs.append(each)
        together = self.aggregator.aggregate(outputs)
        assert together is not None
        return together

    def abort(self, *others: str) -> str | None:
        """Abort a client's request in any state; ``others`` are more candidates."""
        if not self.scheduler.requests:
            return None
        self.counts["aborted"] += 1
        name = self.rng.choice([*self.scheduler.requests, *others])
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return name

    def preempt_all(self) -> None:
        """Reset the prefix cache: vLLM preempts all requests before it finds blocks held."""
        self.counts["resets"] += 1
        with contextlib.suppress(RuntimeError):
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def resets(self) -> float:
        """Probability of ``preempt_all`` before a step."""
        return 0.01

    def run(self, steps: int) -> None:
        """Run random steps, then until all requests have ended; check that nothing is left."""
        number = 0
        for _ in range(steps):
            while len(self.scheduler.requests) < self.most_requests and self.rng.random() < 0.3:
                self.add(number)
                number += 1
            if self.rng.random() < 0.04:
                self.abort()
            if self.rng.random() < self.resets():
                self.preempt_all()
            self.step()
        self.counts["steps"] += steps
        self.counts["requests"] += number
        for _ in range(self.ends_within_steps):
            if not self.scheduler.has_requests() and not self.batches:
                break
            self.step()
        self.check_nothing_remains()


def sample(rng: random.Random) -> int:
    """Return a sampled token, which sometimes ends its request."""
    return STOP_TOKEN if rng.random() < 0.02 else rng.randint(10, 500)
