"""Real vLLM configurations, specs and tensors, made without starting an engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

from app.demo.paths import MODEL_DIR

BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE, WINDOW = 8, 32, 4, 32, 128
CONTENT = 2 * HEAD_SIZE
BLOCK_ELEMENTS = HEADS * BLOCK_TOKENS * CONTENT


def cache_folder(root: Path) -> Path:
    """Return `root`, prepared as a VLLM_CACHE_ROOT without digests of weights.

    It shares what vLLM has found out about model classes, which takes a new process each.
    """
    facts = Path(envs.VLLM_CACHE_ROOT).absolute() / "modelinfos"
    for folder in (facts, root):
        folder.mkdir(parents=True, exist_ok=True)
    (root / facts.name).symlink_to(facts)
    return root


@cache
def vllm_config(**overrides: Any) -> VllmConfig:
    """Return vLLM's own configuration for the demo model (4 KV heads)."""
    arguments: dict[str, Any] = {
        "model": str(MODEL_DIR),
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
    }
    if isinstance(overrides.get("hf_overrides"), frozenset):
        overrides["hf_overrides"] = dict(overrides["hf_overrides"])
    return EngineArgs(**(arguments | overrides)).create_engine_config()


_MODULES = {"TandemConnector": "connector", "TandemStoreConnector": "store_connector"}


def child(kind: str = "TandemConnector", role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """Return the settings of a connector of Tandem, with its ``kv_connector_extra_config``."""
    return {
        "kv_connector": kind,
        "kv_connector_module_path": f"connectors.vllm_hma.{_MODULES.get(kind, 'multi_connector')}",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def connector_config(kind: str = "TandemConnector", role: str = "kv_both", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(**child(kind, role, **extra))


def full(**overrides: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**(_attention() | overrides))


def sliding(**overrides: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**(_attention() | {"sliding_window": WINDOW} | overrides))


def _attention() -> dict[str, Any]:
    return {"block_size": BLOCK_TOKENS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32}


def cache_config(*groups: tuple[list[str], KVCacheSpec]) -> KVCacheConfig:
    """A cache of ``BLOCKS`` blocks; each group is its layers and their spec."""
    longest = max(len(layers) for layers, _ in groups)
    tensors = [
        KVCacheTensor(
            size=BLOCKS * BLOCK_ELEMENTS * 4,
            layers=[layers[i] for layers, _ in groups if i < len(layers)],
            layer_stride=0,
            block_stride=BLOCK_ELEMENTS * 4,
        )
        for i in range(longest)
    ]
    return KVCacheConfig(BLOCKS, tensors, [KVCacheGroupSpec(layers, spec) for layers, spec in groups])


def views(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Return one tensor for the i-th layers of all groups, as in vLLM's hybrid caches on the
    CPU.
    """
    longest = max(len(group.layer_names) for group in config.kv_cache_groups)
    storage = torch.zeros(longest, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT)
    return {layer: storage[i] for group in config.kv_cache_groups for i, layer in enumerate(group.layer_names)}
