"""Shorten the busy wait of vLLM's processes on engines that use the fork server.

After each step, a worker and the engine core poll shared memory for one second before they block
(`SpinCondition`). On a GPU host the polling hides the wake-up latency. Where the model runs on the
CPU, the polling takes cores from other engines' computation. Blocking instead costs a wake-up of
about 0.1 ms.

The fork server calls `shorten_busy_wait`, so its processes inherit the change. Engines with a GPU
do not use the fork server. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/device_communicators/shm_broadcast.py
"""

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

BUSY_WAIT_S = 0.01
"""Busy-wait time of vLLM's processes in seconds, longer than the pause between two steps."""


def shorten_busy_wait(busy_wait_s: float = BUSY_WAIT_S) -> None:
    """Set the default of `SpinCondition`'s argument `busy_loop_s`, which vLLM never passes."""
    SpinCondition.__init__.__defaults__ = (busy_wait_s,)
