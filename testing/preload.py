"""Import vLLM in the fork server, and adapt it to many engines on few cores.

Every forked process inherits the imports and the changes.
"""

from __future__ import annotations

import torch
import torch._dynamo
import vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector  # noqa: F401
import vllm.model_executor.models.falcon_h1  # noqa: F401
import vllm.model_executor.models.gemma3  # noqa: F401
from vllm.entrypoints.launchers.api_server.entry import main as _main
from vllm.envs import environment_variables
from vllm.v1.engine import async_llm, core_client  # noqa: F401
from vllm.v1.executor import multiproc_executor  # noqa: F401
from vllm.v1.worker import cpu_worker  # noqa: F401

import connectors.vllm_hma.connector  # noqa: F401
from actors.upstream.vllm_processes.busy_wait import shorten_busy_wait
from testing.ports import give_vllm_these_ports

torch.set_num_threads(1)
torch._dynamo.config.disable = True  # noqa: SLF001 (torch has no public name for it)
# The CPU platform sets this variable to `spawn` (vllm/platforms/cpu.py).
environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
shorten_busy_wait()
give_vllm_these_ports()


def main() -> None:
    _main()
