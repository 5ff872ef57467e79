"""Variables that an engine with GPUs sets on its node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import vllm.envs

from actors.engine.startup.gpu_defaults import SAMPLER, START_LIMIT, START_LIMIT_S, set_gpu_defaults


def install(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("tools", "cuda", "cache", "given", "sampler"),
    [
        ((), None, False, None, "0"),
        (("ninja",), None, False, None, "0"),
        (("nvcc", "ninja"), None, False, None, None),
        (("nvcc", "ninja"), "other", False, None, "0"),
        (("ninja",), "cuda", False, None, None),
        ((), None, True, None, None),
        ((), None, False, "1", "1"),
    ],
    ids=["nothing", "no compiler", "compiler", "CUDA_HOME without one", "CUDA_HOME", "jit cache", "the user's choice"],
)
def test_flashinfer_samples_only_where_it_can_be_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tools: tuple[str, ...],
    cuda: str | None,
    cache: bool,
    given: str | None,
    sampler: str | None,
) -> None:
    """Without a compiler, the first request with `top_p` would end the engine."""
    install(tmp_path / "bin", *tools)
    install(tmp_path / "cuda" / "bin", "nvcc")
    monkeypatch.setattr("actors.engine.startup.gpu_defaults.CUDA", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for variable in ("CUDA_HOME", "CUDA_PATH", SAMPLER, START_LIMIT):
        monkeypatch.setenv(variable, "")  # restored after the test, also if the code sets it
        monkeypatch.delenv(variable)
    if cuda:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / cuda))
    if cache:
        (tmp_path / "packages" / "flashinfer_jit_cache").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / "packages")
    if given:
        monkeypatch.setenv(SAMPLER, given)
    set_gpu_defaults()
    assert os.environ.get(SAMPLER) == sampler
    assert START_LIMIT_S == vllm.envs.VLLM_ENGINE_READY_TIMEOUT_S
    monkeypatch.setenv(START_LIMIT, "60")
    set_gpu_defaults()
    assert vllm.envs.VLLM_ENGINE_READY_TIMEOUT_S == 60
