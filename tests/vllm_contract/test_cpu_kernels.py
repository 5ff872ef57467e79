"""vLLM's choice of CPU kernels depends on the inputs of `vllm_cpu_kernels.py` only."""

from __future__ import annotations

import inspect

import pytest
import torch
from vllm.lora.ops.torch_ops.lora_ops import bgmv_shrink
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend
from vllm.v1.attention.selector import AttentionSelectorConfig

from actors.upstream.cpu_build.vllm_cpu_kernels import adapter_problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("amx", "asked", "chosen"),
    [
        (True, None, Backend.AMX_MLA),
        (True, Backend.TRITON_MLA, Backend.AMX_MLA),
        (True, Backend.CPU_MLA, Backend.CPU_MLA),
        (False, None, Backend.CPU_MLA),
        (False, Backend.AMX_MLA, Backend.CPU_MLA),
    ],
)
def test_the_mla_kernel_follows_the_cpu_and_not_the_dtype(
    monkeypatch: pytest.MonkeyPatch, amx: bool, asked: Backend | None, chosen: Backend, dtype: torch.dtype
) -> None:
    """AMX on every CPU that has it, unless CPU_MLA is requested by name."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    of = AttentionSelectorConfig(head_size=576, dtype=dtype, kv_cache_dtype=None, block_size=None, use_mla=True)
    assert CpuPlatform.get_attn_backend_cls(asked, of) == chosen.get_path()


def test_dtypes() -> None:
    """One kernel accepts one dtype, the other all; gated delta net's error names its dtype."""
    assert AMXMLABackend.supported_dtypes == [torch.bfloat16]
    assert {torch.float32, torch.bfloat16, torch.float16} <= set(CPUMLABackend.supported_dtypes)
    assert "requires BF16" in inspect.getsource(cpu_gdn_attention_core)


def test_tokens_without_an_adapter_take_the_last_slot() -> None:
    """Slot -1 means no adapter, and torch reads it as the last one; an empty slot adds nothing."""
    weights = torch.zeros(3, 1, 2, 4)
    weights[1] = 1.0
    inputs, index = torch.ones(2, 4), torch.tensor([1, -1])
    found = torch.empty(2, 2)
    bgmv_shrink(inputs, weights, found, index)
    assert found.tolist() == [[4.0, 4.0], [0.0, 0.0]]
    bgmv_shrink(inputs, weights[:2], found, index)
    assert found.tolist() == [[4.0, 4.0], [4.0, 4.0]]


@pytest.mark.parametrize(("slots", "adapters", "good"), [(1, 0, True), (1, 1, False), (2, 1, True), (3, 4, False)])
def test_a_slot_must_stay_empty(slots: int, adapters: int, good: bool) -> None:
    problem = adapter_problem(slots, adapters)
    assert (problem is None) == good
    if problem is not None:
        assert f"set `engine.max_loras` to at least {adapters + 1}" in str(problem)
