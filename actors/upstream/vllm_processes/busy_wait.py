"""Shorten the busy wait of vLLM's processes on engines that use the fork server.

After each step, a worker and the engine core poll shared memory for one second before they block
(`SpinCondition`). On a GPU host the polling hides the wake-up latency. Where the model runs on the
CPU, the polling takes cores from other engines' computation. Blocking instead costs a wake-up of
about 0.1 ms.

The fork server calls `shorten_busy_wait`, so its processes inherit the change. Engines with a GPU
do not use the fork server. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/device_communicators/shm_broadcast.py
"""

import inspect
import logging

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

logger = logging.getLogger(__name__)

BUSY_WAIT_S = 0.01
"""Busy-wait time of vLLM's processes in seconds.

It is longer than the pause between steps of a busy engine.
"""


def shorten_busy_wait(busy_wait_s: float = BUSY_WAIT_S) -> None:
    """Set the default of `SpinCondition`'s last argument to `busy_wait_s`; vLLM never passes it.

    If the arguments of `SpinCondition` have changed, log a warning and keep vLLM's busy wait.
    """
    parameters = list(inspect.signature(SpinCondition.__init__).parameters)
    defaults = SpinCondition.__init__.__defaults__
    if parameters[-1] != "busy_loop_s" or defaults is None or len(defaults) != 1:
        logger.warning(
            "vLLM's processes poll for a second after each step, because SpinCondition has changed (arguments: %s); "
            "update actors/upstream/vllm_processes/busy_wait.py",
            parameters,
        )
        return
    SpinCondition.__init__.__defaults__ = (busy_wait_s,)
