"""Set the current accelerator of a thread, and check that its kernels read received KV."""

from __future__ import annotations

import threading

import torch
from vllm.platforms import current_platform

from connectors.errors import ConfigurationError

_thread = threading.local()


def set_thread_device(device: torch.device) -> None:
    """Make ``device`` and its context current in this thread; no effect for a CPU or a second time.

    Each of the connector's threads that calls NIXL or reads the KV cache calls this first: a new
    thread does not inherit the device. Without a CUDA context UCX disables NVLink (vllm#36475), or
    crashes in its progress call (nixl#2102). vLLM's ``set_device`` creates the context;
    ``torch.cuda.set_device`` does not for device 0.
    """
    if device.type != "cpu" and getattr(_thread, "device", None) != device:
        current_platform.set_device(device)
        _thread.device = device


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """None for an accelerator other than a CUDA device."""
    found = current_platform.get_device_capability(device.index or 0) if current_platform.is_cuda() else None
    return None if found is None else (found.major, found.minor)


def check_integrity(integrity: str, capability: tuple[int, int] | None) -> None:
    """Raise ConfigurationError if only digests prove that kernels see the bytes of RDMA writes.

    Before Hopper, a write that has arrived is visible after a flush, which nothing here requests
    (docs.nvidia.com/cuda/gpudirect-rdma: synchronization and memory ordering).
    """
    if integrity == "off" and (capability is None or capability < (9, 0)):
        found = "this accelerator" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        raise ConfigurationError(
            f"transfer.integrity (kv_connector_extra_config: integrity): off needs a GPU of compute capability 9.0 "
            f"(Hopper) or newer. On {found}, kernels may read bytes from before an RDMA write; set it to auto"
        )
