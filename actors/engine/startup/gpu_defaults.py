"""Environment of an engine with GPUs: defaults that depend on its node."""

import logging
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
START_LIMIT, START_LIMIT_S = "VLLM_ENGINE_READY_TIMEOUT_S", 3600
"""Limit of an engine core's start. Loading and hashing hundreds of GB can take longer than 600 s,
vLLM's default."""
CUDA = Path("/usr/local/cuda")


def set_gpu_defaults() -> None:
    """Set defaults for unset variables. Call it before vLLM is imported.

    Without a compiler, FlashInfer's sampler would fail at the first request with `top_p` or `top_k`
    (https://github.com/vllm-project/vllm/issues/49497).
    """
    os.environ.setdefault(START_LIMIT, str(START_LIMIT_S))
    if SAMPLER not in os.environ and (reason := why_not_compiled()):
        os.environ[SAMPLER] = "0"
        logger.info("vLLM samples without FlashInfer: %s", reason)


def why_not_compiled() -> str | None:
    """Return why FlashInfer can neither load nor compile its sampler here, or None.

    Looks for nvcc where FlashInfer does (`get_cuda_path` in flashinfer/jit/cpp_ext.py).
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(home) / "bin"] if home else [*os.get_exec_path(), CUDA / "bin"]
    compiler = shutil.which("nvcc", path=os.pathsep.join(map(str, places))) and shutil.which("ninja")
    if compiler or find_spec("flashinfer_jit_cache") is not None:
        return None
    return "neither nvcc and ninja nor the package flashinfer-jit-cache are installed"
