"""Checks of a step's fences, its order of layers, and digests beside a running kernel."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from connectors.planning.plan import plan_pair
from connectors.transport.device_digest import CacheMemory, DeviceMemory
from connectors.transport.digest import End
from connectors.transport.digest import digests as transfer_digests
from connectors.vllm_hma.worker_side.steps import Begun, Ended, Entry, LayersComputed, StepFence, Steps
from tests.campaigns.gpu.device import keep_busy, memory_kind_of, set_current, synchronize, until
from tests.campaigns.gpu.pair import layout_of

LAYERS, PAGE_BYTES, PAGES = 4, 40_000, 64
"""Pages of three segments, the last one short."""


class Cache:
    """A layer's pages in a separate tensor, as vLLM allocates them."""

    def __init__(self, device: torch.device, count: int = PAGES) -> None:
        self.device = device
        self.layers = [torch.zeros(count * PAGE_BYTES, dtype=torch.uint8, device=device) for _ in range(LAYERS)]
        synchronize(device)
        self.layout = layout_of(self.layers, PAGE_BYTES)

    def filled_with(self, layer: int) -> set[int]:
        """Return the values of a layer's bytes, read on a stream that waits for no other."""
        if self.device.type == "cpu":
            return set(self.layers[layer].unique().tolist())
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            return set(self.layers[layer].cpu().unique().tolist())


def an_event_passes_after_its_kernels(device: torch.device) -> str:
    """Another thread polls, like the progress thread, and finds the bytes computed before the
    event.
    """
    cache, fence = Cache(device), StepFence(device)
    keep_busy(device)
    cache.layers[0].fill_(7)
    event = fence.mark()
    waited = not fence.passed(event)

    def poll() -> set[int]:
        set_current(device)
        until(lambda: fence.passed(event), "the event")
        return cache.filled_with(0)

    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(poll).result()
    assert seen == {7}, f"the event has passed, and the bytes are {seen}"
    assert waited or device.type == "cpu", "the event had passed before its kernels could end: this shows nothing"
    return "it had not passed while the kernel ran" if waited else "a CPU has computed when a call returns"


def layers_come_out_in_order(device: torch.device) -> str:
    """Each layer's entry is returned once its bytes are computed, before later layers are."""
    cache, found, early = Cache(device), list[Entry](), 0
    steps = Steps(cache.layout.groups, StepFence(device))
    chunks = cast(Any, (SimpleNamespace(request_id="r"),))
    steps.begin(chunks)
    for number, layer in enumerate(cache.layers):
        keep_busy(device, 0.3)
        layer.fill_(number + 1)
        assert steps.layer(f"layer{number}"), f"layer {number} completes nothing"
    steps.end(chunks)

    def poll() -> None:
        nonlocal early
        set_current(device)

        def ended() -> bool:
            nonlocal early
            for entry in steps.passed():
                found.append(entry)
                if isinstance(entry, LayersComputed):
                    for layer in range(entry.stop):
                        values = cache.filled_with(layer)
                        assert values == {layer + 1}, f"layer {layer} was returned, but its bytes are {values}"
                    early += cache.filled_with(LAYERS - 1) == {0}
            return bool(found) and isinstance(found[-1], Ended)

        until(ended, "the step's end")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(poll).result()
    assert isinstance(found[0], Begun), "the step's begin does not come first"
    stops = [entry.stop for entry in found if isinstance(entry, LayersComputed)]
    assert stops == [1, 2, 3, 4], f"layers came out as {stops}"
    assert early > 0 or device.type == "cpu", "no layer came out before the last one was computed: this shows nothing"
    return f"{LAYERS} layers, {early} of them before the last one was computed"


def digests_are_a_cpus(device: torch.device) -> str:
    """Pages of several segments in several tensors, of lengths other than whole words, and empty
    ones.
    """
    cache = Cache(device)
    on_host = Cache(torch.device("cpu"))
    for ours, theirs in zip(cache.layers, on_host.layers, strict=True):
        content = torch.from_numpy(np.random.default_rng(ours.numel()).integers(0, 256, ours.numel(), np.uint8))
        ours.copy_(content)
        theirs.copy_(content)
    synchronize(device)
    memory = CacheMemory(cache.layout, cache.layers).shared_with(memory_kind_of(device))
    # Between two host memories xxh3 is used, which no accelerator computes.
    memory = DeviceMemory(cache.layout, cache.layers) if device.type == "cpu" else memory
    reference = DeviceMemory(on_host.layout)
    compared = 0
    for length in (0, 4, 5, 4096, 16_384, 20_001, PAGE_BYTES):
        ours, theirs = memory.new_stream(), reference.new_stream()
        for layer, pages in enumerate(cache.layout.groups[0].layers):
            ids = np.random.default_rng(layer).permutation(PAGES)[: 20 + layer]
            if length:
                ours.feed(pages.address + ids * PAGE_BYTES, length)
                theirs.feed(on_host.layers[layer].data_ptr() + ids * PAGE_BYTES, length)
                compared += len(ids)
        assert ours.digest() == theirs.digest(), f"digests of pieces of {length} bytes differ"
    ids, kind = np.random.default_rng(0).permutation(PAGES)[:40], ""
    found = []
    for layout, at in ((cache.layout, memory), (on_host.layout, reference)):
        of_transfer = transfer_digests(plan_pair(layout, layout), at, End.SOURCE)()
        kind = kind or type(of_transfer).__name__
        of_transfer.add(0, ids, np.zeros_like(ids))
        found.append(of_transfer.hexdigest())
    assert found[0] == found[1], "the digests of a transfer differ"
    return f"{compared} pieces of up to {PAGE_BYTES} bytes; a transfer, by {kind}"


def a_digest_does_not_wait_for_the_forward_pass(device: torch.device) -> str:
    """The digest runs beside the kernels of the current stream."""
    cache = Cache(device)
    memory, fence = DeviceMemory(cache.layout, cache.layers), StepFence(device)
    stream = memory.new_stream()
    stream.feed(np.array([cache.layers[0].data_ptr()]), PAGE_BYTES)
    first = stream.digest()
    keep_busy(device)
    event = fence.mark()
    stream = memory.new_stream()
    stream.feed(np.array([cache.layers[1].data_ptr()]), PAGE_BYTES)
    second = stream.digest()
    beside = not fence.passed(event)
    synchronize(device)
    assert first == second, "two pages of zeros have different digests"
    assert beside or device.type == "cpu", "the digest came after the kernel that was queued before it"
    return "it ended while a kernel ran" if beside else "a CPU has one queue"


def speed_of_a_digest(device: torch.device) -> tuple[str, dict[str, Any]]:
    """Median of digests of scattered pages of all layers, without a limit."""
    count = PAGES if device.type == "cpu" else 4096
    cache = Cache(device, count)
    memory = DeviceMemory(cache.layout, cache.layers)
    ids = np.random.default_rng(0).permutation(count)
    took_s = []
    for _ in range(6):
        began = time.perf_counter()
        stream = memory.new_stream()
        for layer in cache.layers:
            stream.feed(layer.data_ptr() + ids * PAGE_BYTES, PAGE_BYTES)
        stream.digest()
        took_s.append(time.perf_counter() - began)
    size = LAYERS * count * PAGE_BYTES
    speed = size / float(np.median(took_s[1:])) / 1e9
    return f"{speed:.1f} GB/s of {size} bytes", {"GB_s": round(speed, 1), "bytes": size}
