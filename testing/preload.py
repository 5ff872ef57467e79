"""What the fork server imports before it forks servers, and where a forked server begins."""

from __future__ import annotations

import torch
import torch._dynamo
import vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector
import vllm.model_executor.models.gemma3  # noqa: F401
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.entrypoints.launchers.api_server.entry import main as _main
from vllm.envs import environment_variables
from vllm.v1.engine import core_client  # noqa: F401
from vllm.v1.executor import multiproc_executor  # noqa: F401
from vllm.v1.worker import cpu_worker  # noqa: F401

import connectors.vllm_hma.connector  # noqa: F401


def main() -> None:
    """vLLM's OpenAI server on ``sys.argv``; the engine core and its workers are forked, too."""
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # noqa: SLF001 - torch has no public name for it
    # vLLM's CPU platform asks to spawn, by setting this variable.
    environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    # For a second after every step vLLM's processes wait for the next one in a loop; many servers share few cores here.
    SpinCondition.__init__.__defaults__ = (0.01,)
    _main()
