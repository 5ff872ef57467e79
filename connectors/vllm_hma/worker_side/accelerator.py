"""Current accelerator of a thread. A new thread has none; it does not inherit that of its parent."""

from __future__ import annotations

import torch
from vllm.platforms import current_platform


def set_thread_device(device: torch.device) -> None:
    """Make ``device`` current in this thread, with its context; no effect for a CPU.

    Every thread that calls NIXL or reads the KV cache calls this first. Without a CUDA context UCX turns NVLink off
    (vllm#36475), or crashes in progress (nixl#2102). vLLM's ``set_device`` creates the context, which
    ``torch.cuda.set_device`` alone does not do for device 0.
    """
    if device.type != "cpu":
        current_platform.set_device(device)
