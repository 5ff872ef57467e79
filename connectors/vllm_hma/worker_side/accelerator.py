"""Set the current accelerator of a thread. A new thread does not inherit this setting."""

from __future__ import annotations

import torch
from vllm.platforms import current_platform


def set_thread_device(device: torch.device) -> None:
    """Make ``device`` and its context current in this thread; no effect for a CPU.

    Each of the connector's threads that calls NIXL or reads the KV cache calls this first. Without
    a CUDA context UCX disables NVLink (vllm#36475), or crashes in its progress call (nixl#2102).
    vLLM's ``set_device`` creates the context; ``torch.cuda.set_device`` does not for device 0.
    """
    if device.type != "cpu":
        current_platform.set_device(device)
