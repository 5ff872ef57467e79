"""Environment variables of engines on a machine without a GPU.

Separate from ``engines.py``, which imports vLLM.
"""

from __future__ import annotations

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "UCX_LOG_LEVEL": "error",
}
