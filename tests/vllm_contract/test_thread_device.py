"""Every thread of a worker that calls NIXL or reads the KV cache sets the accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import connectors.vllm_hma.worker_side.runtime as runtime_module
from connectors.errors import ConfigurationError
from connectors.protocol.engines import Suspect
from connectors.protocol.wire import Peer
from connectors.vllm_hma.handshake.processes import own_process
from connectors.vllm_hma.worker_side import accelerator
from connectors.vllm_hma.worker_side.progress_thread import ProgressThread
from tests.vllm_contract.workers import ARRIVED, FAILED, Worker, transfer, until

NO_DEVICE = ("tandem-side-channel", "tandem-parent-watchdog")
"""Threads of the engine core that answer sockets and watch a process, without NIXL or the cache."""


def test_every_thread_of_a_worker_sets_its_device(
    monkeypatch: pytest.MonkeyPatch, worker: Callable[..., Worker]
) -> None:
    """A transfer with digests, both ends of a handshake, and a probe of a silent producer."""
    seen: dict[int, torch.device] = {}
    monkeypatch.setattr(
        runtime_module, "set_thread_device", lambda device: seen.__setitem__(threading.get_ident(), device)
    )
    others = {thread.ident for thread in threading.enumerate()}
    producer, consumer = worker("p", integrity="full"), worker("c", integrity="full")
    assert transfer(producer, consumer) == ARRIVED
    suspect = Suspect(Peer("nobody", 0), own_process(), True, None)
    consumer.runtime._probe.watch([suspect], [])  # noqa: SLF001 (no transfer has to fail for it)

    def started() -> set[str]:
        names = {thread.name for thread in threading.enumerate() if thread.ident not in others}
        return {name.rstrip("0123456789_") for name in names if name.startswith("tandem-")} - set(NO_DEVICE)

    until(lambda: started() == {"tandem-progress", "tandem-connect", "tandem-accept", "tandem-verify", "tandem-probe"})
    for thread in threading.enumerate():
        if thread.ident not in others and thread.name.startswith("tandem-") and thread.name not in NO_DEVICE:
            assert thread.ident in seen, f"{thread.name} runs without a device"
    assert set(seen.values()) == {torch.device("cpu")}


def test_a_verifier_without_a_device_fails_transfers(
    monkeypatch: pytest.MonkeyPatch, worker: Callable[..., Worker]
) -> None:
    """The device may be full, for example. Nothing else would end the wait for the comparison."""

    def full(_: torch.device) -> None:
        if threading.current_thread().name.startswith("tandem-verify"):
            raise RuntimeError("no memory on the device")

    monkeypatch.setattr(runtime_module, "set_thread_device", full)
    assert transfer(worker("p", integrity="full"), worker("c", integrity="full")) == FAILED


def test_a_progress_thread_without_a_device_ends_the_start() -> None:
    """No deadline would pass without it."""

    def full() -> None:
        raise RuntimeError("no memory on the device")

    with pytest.raises(RuntimeError, match="no memory"):
        ProgressThread(lambda: 1.0, 1.0, full).start()


def test_the_platform_sets_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform also creates the thread's CUDA context, which UCX needs; a CPU has none.

    Once per thread: it allocates a tensor and launches a kernel.
    """
    calls: list[Any] = []
    full = [True]

    class Platform:
        def set_device(self, device: torch.device) -> None:
            calls.append(device)
            if full and full.pop():
                raise RuntimeError("no memory on the device")

    def in_a_thread() -> None:
        for _ in range(2):
            accelerator.set_thread_device(torch.device("cpu"))
            accelerator.set_thread_device(torch.device("cuda", 3))

    monkeypatch.setattr(accelerator, "current_platform", Platform())
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(RuntimeError, match="no memory"):
            thread.submit(in_a_thread).result()
        thread.submit(in_a_thread).result()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(in_a_thread).result()
    assert calls == [torch.device("cuda", 3)] * 3


@pytest.mark.parametrize(
    ("integrity", "capability", "refused"),
    [
        ("off", (8, 0), True),
        ("off", (8, 9), True),
        ("off", None, True),
        ("off", (9, 0), False),
        ("off", (10, 0), False),
        ("auto", (8, 0), False),
        ("full", None, False),
    ],
)
def test_kv_is_used_without_a_digest_only_where_kernels_see_it(
    integrity: str, capability: tuple[int, int] | None, refused: bool
) -> None:
    """Before Hopper, kernels may not see what an RDMA write has changed."""
    with pytest.raises(ConfigurationError, match="set it to auto") if refused else nullcontext():
        accelerator.check_integrity(integrity, capability)
