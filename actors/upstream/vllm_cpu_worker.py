"""vLLM's CPU worker, with seeds that survive a prompt longer than one step.

vLLM samples in every step of a prompt and throws the result away in all but the last. With a seed, it then turns the
request's random generator back by an offset (``GPUModelRunner._bookkeeping_sync``), which PyTorch's generators on the
CPU do not have: they raise, the engine dies, and with it everybody's requests. Here a generator's whole state is kept
before a sample that will be thrown away, and put back after it.

Engines without a GPU are started with this worker (``arguments.py``): ``worker_cls`` is vLLM's own argument for it.
"""

from typing import Any

import numpy as np
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class RewindingModelRunner(CPUModelRunner):
    """Turns generators back by their states instead of by offsets."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        kept = {index: generators[index].get_state() for index in self._discarded() if index in generators}
        output = super()._sample(*args, **kwargs)
        for index, state in kept.items():
            generators[index].set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        # What has been turned back already is out of the way for as long as vLLM would turn it back.
        hidden = {index: generators.pop(index) for index in self._discarded() if index in generators}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(hidden)

    def _discarded(self) -> list[int]:
        """Rows of the batch whose sample is thrown away: their prompts go on in the next step."""
        rows: list[int] = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        return rows


class CpuWorker(cpu_worker.CPUWorker):
    """vLLM's, with the runner above."""

    def init_device(self) -> None:
        # It makes a runner of whatever class has this name in its module, in a process of its own.
        cpu_worker.CPUModelRunner = RewindingModelRunner
        super().init_device()
