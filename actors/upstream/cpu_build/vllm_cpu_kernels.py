"""Detect models, caches and adapters that vLLM's CPU build cannot run, before it runs them.

vLLM 0.32 selects some CPU kernels by model and CPU, not by dtype, so that an engine fails while it
loads weights or at its first step: `vllm/platforms/cpu.py` (MLA) and
`vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

BFLOAT16 = "bfloat16"
REFERENCE_MLA = "CPU_MLA"
"""vLLM's MLA backend for all CPUs and dtypes; an explicit `attention_backend` selects it."""

GATED_DELTA_NET_MODELS = ("qwen3_next", "qwen3_5")
"""Prefixes of the `model_type` of models whose layers call `cpu_gdn_attention_core`."""


@dataclass(frozen=True)
class CpuFeatures:
    """Instruction sets of the CPU by which vLLM selects kernels."""

    amx: bool
    avx512: bool


def cpu_features() -> CpuFeatures:
    import torch

    return CpuFeatures(
        amx=torch.cpu._is_amx_tile_supported(),  # noqa: SLF001 (the function that vLLM calls)
        avx512=torch.cpu._is_avx512_supported(),  # noqa: SLF001
    )


@dataclass(frozen=True)
class KernelProblem:
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


def model_problem(model: "ModelConfig", backend: Any, features: CpuFeatures) -> KernelProblem | None:
    """Return why vLLM's CPU kernels cannot run `model`, or None.

    `backend` is vLLM's enum member of an explicit attention backend, its name, or None.
    """
    dtype, text = str(model.dtype).removeprefix("torch."), model.hf_text_config
    if dtype == BFLOAT16:
        return None
    linear = "linear_attention" in (getattr(text, "layer_types", None) or ())
    if linear and str(getattr(text, "model_type", "")).startswith(GATED_DELTA_NET_MODELS):
        reason = f"vLLM's CPU kernel for gated delta net needs bfloat16, not {dtype}"
        return KernelProblem(reason, f"set `engine.dtype: {BFLOAT16}`")
    if model.use_mla and features.amx and getattr(backend, "name", backend) != REFERENCE_MLA:
        remedy = f"set `engine.dtype: {BFLOAT16}`, or `engine.attention_backend: {REFERENCE_MLA}` for the slower kernel"
        return KernelProblem(f"vLLM's MLA kernel for CPUs with AMX needs bfloat16, not {dtype}", remedy)
    return None


def cache_problem(cache_dtype: str, features: CpuFeatures) -> KernelProblem | None:
    """Return why vLLM's CPU attention cannot use this `kv_cache_dtype`, or None.

    The model's head sizes may rule it out too. Source: `_get_attn_isa` in
    vllm/v1/attention/backends/cpu_attn.py.
    """
    from vllm.utils.torch_utils import is_quantized_kv_cache

    if features.amx or features.avx512 or not is_quantized_kv_cache(cache_dtype):
        return None
    return KernelProblem(
        f"a KV cache of {cache_dtype} needs a CPU with AVX-512 or AMX", "set `engine.kv_cache_dtype: auto`"
    )


def adapter_problem(slots: int, adapters: int) -> KernelProblem | None:
    """Return why vLLM on a CPU would apply an adapter to requests without one, or None.

    vLLM marks tokens of the base model with slot -1, which torch reads as the last slot
    (`vllm/lora/ops/torch_ops/lora_ops.py`). Slots are filled from the first one, so the last stays
    empty if there are more slots (`max_loras`) than adapters.
    """
    if not adapters or slots > adapters:
        return None
    reason = f"on a CPU, vLLM applies the last of its {slots} adapter slots to requests for the base model"
    return KernelProblem(
        reason, f"set `engine.max_loras` to at least {adapters + 1}, so that the last slot stays empty"
    )


def engine_problem(model: "ModelConfig", backend: Any, cache_dtype: str, parallel: Any) -> KernelProblem | None:
    features = cpu_features()
    return (
        model_problem(model, backend, features)
        or cache_problem(cache_dtype, features)
        or experts_problem(model, parallel)
    )


def experts_problem(model: "ModelConfig", parallel: Any) -> KernelProblem | None:
    """Return why vLLM's CPU build cannot run the model's experts on several ranks, or None.

    Over data-parallel ranks, the engine dies in its first step: `CpuCommunicator` does not
    implement `all_gatherv`. With expert parallelism, the kernel ignores which experts its rank has
    (`CPUUnquantizedExperts.apply` in vllm/model_executor/layers/fused_moe/experts/cpu_moe.py) and
    reads beyond their weights.
    """
    if not model.is_moe:
        return None
    if parallel.data_parallel_size > 1:
        return KernelProblem(
            "vLLM's CPU build cannot run a model with experts on several data-parallel ranks",
            "set `data_parallel_size: 1`, and `replicas` for more engines",
        )
    if parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1:
        return KernelProblem("vLLM's CPU build cannot run expert parallelism", "remove `engine.enable_expert_parallel`")
    return None
