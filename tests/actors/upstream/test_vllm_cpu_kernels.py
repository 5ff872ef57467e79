"""Models that vLLM's CPU kernels cannot run are detected before the start, with and without AMX."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from actors.engine import vllm_engine
from actors.upstream.cpu_build import vllm_cpu_kernels
from actors.upstream.cpu_build.vllm_cpu_kernels import (
    CpuFeatures,
    adapter_problem,
    cache_problem,
    experts_problem,
    model_problem,
)
from configs.settings.parsing import parse_settings
from testing.models import deepseek_v2

AMX, PLAIN = CpuFeatures(amx=True, avx512=True), CpuFeatures(amx=False, avx512=True)
AVX2 = CpuFeatures(amx=False, avx512=False)
GATED = {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
USE_BFLOAT16 = "set `engine.dtype: bfloat16`"
OR_CPU_MLA = "or `engine.attention_backend: CPU_MLA`"


@pytest.mark.parametrize(
    ("text", "mla", "features", "dtype", "backend", "remedies"),
    [
        ({}, False, AMX, "float32", None, ()),
        # Latent attention: the CPU's choice, unless the backend is named.
        ({}, True, PLAIN, "float32", None, ()),
        ({}, True, AMX, "float32", None, (USE_BFLOAT16, OR_CPU_MLA)),
        # vLLM ignores it and uses AMX_MLA
        ({}, True, AMX, "float32", "TRITON_MLA", (USE_BFLOAT16, OR_CPU_MLA)),
        ({}, True, AMX, "float32", "CPU_MLA", ()),
        ({}, True, AMX, "bfloat16", None, ()),
        # Gated delta net: one dtype on every CPU.
        (GATED, False, PLAIN, "float32", None, (USE_BFLOAT16,)),
        (GATED, False, AMX, "float16", "CPU_MLA", (USE_BFLOAT16,)),
        (GATED, False, AMX, "bfloat16", None, ()),
        (GATED, True, PLAIN, "float32", "CPU_MLA", (USE_BFLOAT16,)),
        (GATED | {"model_type": "qwen3_5_moe_text"}, False, PLAIN, "float32", None, (USE_BFLOAT16,)),
        (GATED | {"layer_types": ["full_attention"]}, False, PLAIN, "float32", None, ()),
        # Linear attention of another kind.
        (GATED | {"model_type": "minimax"}, False, PLAIN, "float32", None, ()),
        ({"model_type": "llama", "layer_types": None}, False, PLAIN, "float32", None, ()),
    ],
)
def test_what_cannot_run(
    text: dict[str, Any], mla: bool, features: CpuFeatures, dtype: str, backend: str | None, remedies: tuple[str, ...]
) -> None:
    """The reason has the requested dtype, and the remedy all settings that help."""
    model: Any = SimpleNamespace(hf_text_config=SimpleNamespace(**text), use_mla=mla, dtype=f"torch.{dtype}")
    problem = model_problem(model, backend, features)
    assert (problem is None) == (remedies == ())
    if problem is not None:
        assert f"not {dtype}" in problem.reason
        assert [one for one in (USE_BFLOAT16, OR_CPU_MLA) if one in problem.remedy] == list(remedies)


async def test_an_engine_refuses_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the setting, before any process starts."""
    monkeypatch.setattr(vllm_cpu_kernels, "cpu_features", lambda: AMX)
    monkeypatch.setattr(
        "actors.upstream.vllm_replaying_llm.ReplayingLLM.start", lambda *_: pytest.fail("an engine core was started")
    )
    settings = parse_settings({"model": deepseek_v2(tmp_path), "engine": {"skip_tokenizer_init": True}})
    with pytest.raises(vllm_engine.EngineStartError, match="bfloat16"):
        await vllm_engine.VllmEngine.start(settings, "decode", "127.0.0.1")


@pytest.mark.parametrize(
    ("cache_dtype", "features", "runs"),
    [
        ("auto", AVX2, True),
        ("fp8", AVX2, False),
        ("fp8", PLAIN, True),
        ("fp8", CpuFeatures(amx=True, avx512=False), True),
    ],
)
def test_quantized_caches_need_avx_512(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: str, features: CpuFeatures, runs: bool
) -> None:
    """vLLM's own choice of the kernel raises an error for the same CPUs and dtypes."""
    problem = cache_problem(cache_dtype, features)
    assert (problem is None) == runs
    if problem is not None:
        assert "kv_cache_dtype: auto" in str(problem)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: features.amx)
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: features.avx512)
    with contextlib.nullcontext() if runs else pytest.raises(NotImplementedError, match="requires x86 with AVX-512"):
        _get_attn_isa(torch.bfloat16, 32, 64, cache_dtype)


@pytest.mark.parametrize(
    ("experts", "parallel", "remedy"),
    [
        (True, {"data_parallel_size": 2}, "set `data_parallel_size: 1`"),
        (True, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "remove `engine.enable_expert_parallel`"),
        (True, {"tensor_parallel_size": 2}, None),
        (True, {"enable_expert_parallel": True}, None),
        (False, {"data_parallel_size": 2}, None),
    ],
)
def test_experts_on_several_ranks(experts: bool, parallel: dict[str, object], remedy: str | None) -> None:
    """The arguments are vLLM's own, which have the names of its configuration."""
    model: Any = SimpleNamespace(is_moe=experts)
    problem = experts_problem(model, AsyncEngineArgs(model="m", **parallel))
    assert (problem is None) == (remedy is None)
    if problem is not None:
        assert remedy is not None
        assert remedy in problem.remedy


@pytest.mark.parametrize(("slots", "adapters", "good"), [(1, 0, True), (1, 1, False), (2, 1, True), (3, 4, False)])
def test_a_slot_must_stay_empty(slots: int, adapters: int, good: bool) -> None:
    problem = adapter_problem(slots, adapters)
    assert (problem is None) == good
    if problem is not None:
        assert f"max_loras` to at least {adapters + 1}" in str(problem)
