"""vLLM's CPU worker, extended for seeded requests with prompts that need several steps.

vLLM samples in every step of a prompt and discards the result in all but the last. For a seeded
request it then rewinds the generator by an offset (`GPUModelRunner._bookkeeping_sync`), which
PyTorch's CPU generators do not support: they raise, and the engine dies. This worker saves a
generator's state before a discarded sample and restores the state afterwards.

By default, engines without a GPU use this worker (`engine/arguments.py`) through vLLM's own
argument `worker_cls`. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu_model_runner.py
"""

from typing import Any

import numpy as np
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class RewindingModelRunner(CPUModelRunner):
    """V1 model runner that restores generators from saved state, not by an offset."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        kept = {index: generators[index].get_state() for index in self._discarded() if index in generators}
        output = super()._sample(*args, **kwargs)
        for index, state in kept.items():
            generators[index].set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        # Hide the restored generators while vLLM would rewind them.
        hidden = {index: generators.pop(index) for index in self._discarded() if index in generators}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(hidden)

    def _discarded(self) -> list[int]:
        rows: list[int] = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        return rows


class CpuWorker(cpu_worker.CPUWorker):
    def init_device(self) -> None:
        # vLLM looks up the class of its V1 model runner by this name. The worker has its own
        # process, so the change affects no other engine.
        cpu_worker.CPUModelRunner = RewindingModelRunner
        super().init_device()
