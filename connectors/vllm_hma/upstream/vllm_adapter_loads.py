"""Make vLLM's workers report each LoRA adapter that they read from files.

They read one at the server's start, when a client loads it, and in a step with a request whose
adapter is not in memory or has ``load_inplace``. Source:
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

    ``folder`` is local, after a download from a hub, and may be missing or incomplete. When the
    context exits without an exception, vLLM has read the files and has not yet used the weights.
    """

    def load(manager: WorkerLoRAManager, request: LoRARequest) -> LoRAModel:
        try:
            folder = Path(get_adapter_absolute_path(request.lora_path))
        except Exception:  # vLLM's own call raises it again, where vLLM handles it
            folder = Path(request.lora_path)
        # Pass the folder to vLLM: a second look-up in a hub may find another commit. Pass the
        # request unchanged if the folder has no adapter: vLLM's error must name the request's path.
        found = (folder / "adapter_config.json").is_file()
        with watch(request, folder):
            return _LOAD(manager, msgspec.structs.replace(request, lora_path=str(folder)) if found else request)

    WorkerLoRAManager._load_adapter = load  # noqa: SLF001
