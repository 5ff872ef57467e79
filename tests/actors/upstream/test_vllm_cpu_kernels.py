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
    Layers,
    adapter_problem,
    cache_problem,
    cpu_problem,
    experts_problem,
    layers_of,
)
from configs.settings.parsing import parse_settings
from testing.models import deepseek_v2

AMX, PLAIN = CpuFeatures(amx=True, avx512=True), CpuFeatures(amx=False, avx512=True)
AVX2 = CpuFeatures(amx=False, avx512=False)
MLA, GATED, BOTH, NEITHER = Layers(mla=True), Layers(gated_delta_net=True), Layers(True, True), Layers()
USE_BFLOAT16 = "set `engine.dtype: bfloat16`"
OR_CPU_MLA = "or `engine.attention_backend: CPU_MLA`"


@pytest.mark.parametrize(
    ("layers", "features", "dtype", "backend", "remedies"),
    [
        (NEITHER, AMX, "float32", None, ()),
        # Latent attention: the CPU's choice, unless the backend is named.
        (MLA, PLAIN, "float32", None, ()),
        (MLA, AMX, "float32", None, (USE_BFLOAT16, OR_CPU_MLA)),
        # vLLM ignores it and uses AMX_MLA
        (MLA, AMX, "float32", "TRITON_MLA", (USE_BFLOAT16, OR_CPU_MLA)),
        (MLA, AMX, "float32", "CPU_MLA", ()),
        (MLA, AMX, "bfloat16", None, ()),
        # Gated delta net: one dtype on every CPU.
        (GATED, PLAIN, "float32", None, (USE_BFLOAT16,)),
        (GATED, AMX, "float16", "CPU_MLA", (USE_BFLOAT16,)),
        (GATED, AMX, "bfloat16", None, ()),
        (BOTH, PLAIN, "float32", "CPU_MLA", (USE_BFLOAT16,)),
    ],
)
def test_what_cannot_run(
    layers: Layers, features: CpuFeatures, dtype: str, backend: str | None, remedies: tuple[str, ...]
) -> None:
    """The reason has the requested dtype, and the remedy all settings that help."""
    problem = cpu_problem(layers, features, dtype, backend)
    assert (problem is None) == (remedies == ())
    if problem is not None:
        assert f"not {dtype}" in problem.reason
        assert [one for one in (USE_BFLOAT16, OR_CPU_MLA) if one in problem.remedy] == list(remedies)


@pytest.mark.parametrize(
    ("model_type", "layer_types", "gated"),
    [
        ("qwen3_next", ["linear_attention", "full_attention"], True),
        ("qwen3_5_moe_text", ["linear_attention"], True),
        ("qwen3_next", ["full_attention"], False),
        ("minimax", ["linear_attention", "full_attention"], False),  # linear attention of another kind
        ("llama", None, False),
    ],
)
def test_gated_delta_net_is_recognised(model_type: str, layer_types: list[str] | None, gated: bool) -> None:
    config = SimpleNamespace(model_type=model_type, layer_types=layer_types)
    assert layers_of(config, mla=False) == Layers(gated_delta_net=gated)


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
