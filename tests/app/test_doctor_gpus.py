"""`doctor` on nodes with GPUs and RDMA: their number, peer access, pinned memory and samplers."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig

from app.doctor import engines, machine
from configs.settings.parsing import parse_settings
from configs.settings.service import ServiceSettings


@pytest.mark.parametrize(
    ("decode", "enough"),
    [
        ({"executor": "ray", "num_gpus": 8, "tensor_parallel_size": 8}, True),
        ({"executor": "mp", "num_gpus": 8, "tensor_parallel_size": 8}, False),
        ({"executor": "mp", "num_gpus": 4, "tensor_parallel_size": 4}, True),
    ],
    ids=["ranks on several nodes", "one node", "fits"],
)
def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch, decode: dict[str, Any], enough: bool) -> None:
    """Each rank of executor `ray` needs one; an engine of executor `mp` needs all on one node."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda *_: True)
    finding, *_ = machine.check_gpus(parse_settings({"prefill": {"num_gpus": 1}, "decode": decode}))
    assert finding.ok == enough


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (
            {"prefill": {"replicas": 2, "num_gpus": 2}, "decode": {"num_gpus": 4}},
            ["prefill 2 x 2 + decode 1 x 4 = 8 GPUs; this node has 4, so other nodes must have 4"],
        ),
        (
            {"prefill": {"num_gpus": 0.5}, "decode": {"num_gpus": 0.5}, "engine": {"gpu_memory_utilization": 0.45}},
            ["prefill 1 x 0.5 + decode 1 x 0.5 = 1 GPUs; this node has 4"],
        ),
        (
            {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 0.5}},
            ["prefill 1 x 1 + decode", "decode: an engine has 0.5 of a GPU and takes 0.92 of its memory"],
        ),
        (
            {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 2, "tensor_parallel_size": 4}},
            ["prefill 1 x 1 + decode 1 x 2 = 3", "decode: an engine of 4 ranks has 2 GPUs"],
        ),
        (
            {"prefill": {"replicas": {"initial_replicas": 3}}, "decode": {"tensor_parallel_size": 2}},
            ["5 engine workers need 12 GiB of memory and their weights; this node has 8 free, so other nodes must"],
        ),
    ],
)
def test_all_engines_of_a_node(monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], texts: list[str]) -> None:
    """The sums of a configuration, by hand; the default of gpu_memory_utilization is vLLM's."""
    assert CacheConfig(block_size=16).gpu_memory_utilization == engines.GPU_MEMORY_UTILIZATION
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(engines.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 2**30))
    found = list(engines.check_engines(parse_settings(args)))
    assert [one.what.startswith(text) for one, text in zip(found, texts, strict=True)] == [True] * len(texts), found
    assert [one.ok for one in found] == [True, False][: len(texts)]


OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\n"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.06  Wed Jun 26 06:46:07 UTC 2024\n"
MODULES = "nvidia_uvm 1732608 4 - Live 0x0000000000000000 (POE)\nib_core 495616 9 rdma_cm,mlx5_ib, Live 0x0\n"
PEER_MODULE = "nvidia_peermem 20480 0 - Live 0x0000000000000000 (POE)\n"
GPUS = {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}}


@pytest.mark.parametrize(
    ("modules", "driver", "kernel", "found"),
    [
        (MODULES + PEER_MODULE, CLOSED_DRIVER, "5.4.0-204-generic", "nvidia_peermem is loaded"),
        (MODULES, OPEN_DRIVER, "6.8.0-60-generic", "dma-buf, Linux 6.8.0-60-generic"),
        (MODULES, OPEN_DRIVER, "5.4.0-204-generic", None),
        (MODULES, CLOSED_DRIVER, "6.8.0-60-generic", None),
    ],
)
def test_gpudirect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: str, driver: str, kernel: str, found: str | None
) -> None:
    """Either way by which an RDMA device reaches GPU memory; nothing to check without a device."""
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text(driver)
    (tmp_path / "modules").write_text(modules)
    monkeypatch.setattr(machine.platform, "release", lambda: kernel)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)

    def about_memory(settings: ServiceSettings) -> list[tuple[str, bool]]:
        checked = machine.check_ucx_devices(settings, tmp_path / "infiniband", proc=tmp_path)
        return [(one.what, one.ok) for one in checked if "GPU memory" in one.what]

    assert about_memory(parse_settings(GPUS)) == []
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    expected = (
        f"RDMA reaches GPU memory: {found}" if found else "RDMA does not reach GPU memory: KV moves through the host"
    )
    assert about_memory(parse_settings(GPUS)) == [(expected, found is not None)]
    assert about_memory(ServiceSettings()) == []


def test_memory_that_rdma_cannot_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RDMA, nothing is pinned."""
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (2**26, 2**26))

    def failed() -> list[str]:
        return [one.what for one in machine.check_ucx_devices(ServiceSettings(), tmp_path / "rdma") if not one.ok]

    assert failed() == []
    (tmp_path / "rdma" / "mlx5_0").mkdir(parents=True)
    assert failed() == ["only 64 MiB of memory may be pinned (RLIMIT_MEMLOCK)"]


@pytest.mark.parametrize(
    ("peers", "pods", "own_pids", "rdma", "failed"),
    [
        (True, False, True, False, []),
        (False, False, False, False, ["KV between GPUs 0-1 moves over TCP"]),
        (False, True, True, True, []),
        (True, True, True, False, ["KV between pods moves over TCP"]),
        (True, True, False, False, []),
    ],
    ids=["one container", "no peers", "RDMA", "pods", "pods with hostPID"],
)
def test_cuda_ipc(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    peers: bool,
    pods: bool,
    own_pids: bool,
    rdma: bool,
    failed: list[str],
) -> None:
    """Without peer access or a common PID namespace, UCX would emulate writes over TCP."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda *_: peers)
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").touch()
    if not own_pids:
        monkeypatch.setattr(machine, "HOST_PIDS", (tmp_path / "self" / "ns" / "pid").stat().st_ino)
    if rdma:
        (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    selector = {"label_selector": {"tandem/role": "x"}} if pods else {}
    settings = parse_settings({role: own | selector for role, own in GPUS.items()})
    found = list(machine.check_gpus(settings, tmp_path, tmp_path / "infiniband"))
    assert [one.what.partition(":")[0] for one in found if not one.ok] == failed


def test_a_sampler_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine chooses another one, unless the configuration demands FlashInfer's."""
    monkeypatch.setattr(machine, "why_not_compiled", lambda: "no nvcc")
    monkeypatch.delenv(machine.SAMPLER, raising=False)
    demanded = GPUS | {"decode": {"num_gpus": 1, "environment": {machine.SAMPLER: "1"}}}
    found = [one for one in machine.check_gpus(parse_settings(demanded)) if "FlashInfer" in one.what]
    assert [(one.what, one.ok) for one in found] == [
        ("prefill: vLLM samples without FlashInfer: no nvcc", True),
        ("decode: vLLM samples without FlashInfer: no nvcc", False),
    ]


def test_rdma_is_asked_for_where_there_is_none(tmp_path: Path) -> None:
    """The node of the rdma overlay's pods has no RDMA device."""
    settings = parse_settings({"prefill": {"environment": {"UCX_TLS": "rc,cuda,cma,self"}}})
    found = list(machine.check_ucx_devices(settings, rdma=tmp_path / "none"))
    assert [one.what for one in found if not one.ok] == ["prefill: UCX_TLS contains rc, but there is no RDMA device"]
    (tmp_path / "some" / "mlx5_0").mkdir(parents=True)
    found = list(machine.check_ucx_devices(settings, rdma=tmp_path / "some"))
    assert [one.what for one in found if "UCX_TLS" in one.what] == []
