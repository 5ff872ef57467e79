"""Makes vLLM's workers report each LoRA adapter that they read from files.

vLLM does not tell connectors which adapters are in memory. Its workers read an adapter when the
server starts or a client loads it, and again at a step that needs an adapter that they have
evicted. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/lora/worker_manager.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.lora.worker_manager import WorkerLoRAManager

_LOAD = WorkerLoRAManager._load_adapter  # noqa: SLF001


def watch_adapter_loads(watch: Callable[[LoRARequest, Path], AbstractContextManager[None]]) -> None:
    """Make the workers in this process read each adapter within ``watch(request, folder)``.

    A later call replaces ``watch``. ``folder`` has the adapter's files: an adapter of a hub has
    been downloaded. When the context of ``watch`` ends, vLLM has read the files and not yet put the
    adapter into use; if reading raises, it never does.
    """

    def load(manager: WorkerLoRAManager, request: LoRARequest) -> LoRAModel:
        try:
            folder = Path(get_adapter_absolute_path(request.lora_path))
        except Exception:  # vLLM's own call raises it again, where vLLM handles it
            folder = Path(request.lora_path)
        # A second look-up of a hub's adapter may find another commit. vLLM's error for a missing
        # adapter must name the path of the request.
        found = (folder / "adapter_config.json").is_file()
        with watch(request, folder):
            return _LOAD(manager, msgspec.structs.replace(request, lora_path=str(folder)) if found else request)

    WorkerLoRAManager._load_adapter = load  # noqa: SLF001
