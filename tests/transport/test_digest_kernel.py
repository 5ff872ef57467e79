"""The Triton kernel of the digests, in Triton's interpreter, against torch's sums.

``make emulated-gpu`` runs these tests, since they need Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("needs Triton's interpreter: run `make emulated-gpu`", allow_module_level=True)

from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.planning.plan import plan_pair
from connectors.transport import batched_digest
from connectors.transport.batched_digest import BatchedDigest
from connectors.transport.device_digest import SEGMENT_BYTES, DeviceMemory
from connectors.transport.digest import End, TransferDigest, digests
from tests.campaigns.corruption import Transfer, draw_scene

ZEROS = np.zeros(4, np.int64)
BY_TORCH, BY_KERNEL = partial(DeviceMemory, use_kernel=False), partial(DeviceMemory, use_kernel=True)


@pytest.mark.parametrize("seed", range(24))
def test_random_transfers_have_the_same_digests(seed: int) -> None:
    """Random layouts, block sizes, TP sizes, windows and chunks of both ends."""
    scenes = [draw_scene(np.random.default_rng([7, seed]), memory) for memory in (BY_TORCH, BY_KERNEL)]
    found = []
    for scene in scenes:
        transfer = Transfer.draw(scene, np.random.default_rng([8, seed]))
        said = transfer.run()
        assert transfer.found() == said
        found.append(said)
    assert type(scenes[1].pairs[0].source()) is BatchedDigest
    assert found[0] == found[1]


def cache(layers: int, blocks: int, page_bytes: int, kind: GroupKind, shift: int) -> tuple[EngineLayout, torch.Tensor]:
    """Return a cache of random bytes whose pages are ``shift`` bytes apart, block-outermost."""
    stride = layers * (page_bytes + shift)
    content = torch.from_numpy(np.random.default_rng(page_bytes).integers(0, 256, blocks * stride, np.uint8))
    base = content.data_ptr()
    pages = tuple(
        LayerPages(f"l{k}", base + k * (page_bytes + shift), stride, 1, 1, page_bytes, 1, page_bytes, page_bytes, "p")
        for k in range(layers)
    )
    region = Region(base, content.numel(), MemoryKind("DRAM", 0))
    return EngineLayout(0, 1, blocks, (region,), (Group(0, kind, 1, None, pages),)), content


def both(layout: EngineLayout, use: Callable[[TransferDigest], None]) -> list[str]:
    found = []
    for memory in (BY_TORCH, BY_KERNEL):
        digest = digests(plan_pair(layout, layout), memory(layout), End.SOURCE)()
        use(digest)
        found.append(digest.hexdigest())
    return found


@pytest.mark.parametrize("shift", [0, 4, 3])
@pytest.mark.parametrize("page_bytes", [1, 6, 100, 656, 4096, SEGMENT_BYTES, SEGMENT_BYTES + 10, 50_000, 2**21 + 12])
def test_pages_of_all_sizes(page_bytes: int, shift: int) -> None:
    """Pages of less than a word up to megabytes, also at odd addresses; several writes."""
    layout, _content = cache(3, 7, page_bytes, GroupKind.STATE if shift else GroupKind.FULL, shift)

    def use(digest: TransferDigest) -> None:
        digest.add(0, np.array([5, 1, 2]), ZEROS[:3], (0, 2))
        digest.ready()
        digest.add(0, np.array([4]), ZEROS[:1], (0, 2))
        digest.add(0, np.array([5, 1, 2, 4]), ZEROS, (2, 9))

    by_torch, by_kernel = both(layout, use)
    assert by_torch == by_kernel


def test_many_runs_wrap_around_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 scattered pages in writes of several sizes, through a ring that holds few of them."""
    monkeypatch.setattr(batched_digest, "_RING_ELEMENTS", 4096)
    layout, _content = cache(2, 8192, 64, GroupKind.FULL, 0)
    ids = np.random.default_rng(0).permutation(8192)

    def use(digest: TransferDigest) -> None:
        for part in np.split(ids, [100, 500, 4000, 4100, 4600]):
            digest.add(0, part, np.zeros(len(part), np.int64))
            digest.ready()

    by_torch, by_kernel = both(layout, use)
    assert by_torch == by_kernel


def test_two_transfers_share_the_ring() -> None:
    """Launches of two transfers end in any order of the transfers."""
    layout, _content = cache(2, 8, 300, GroupKind.FULL, 0)
    new = digests(plan_pair(layout, layout), BY_KERNEL(layout), End.TARGET)
    one, other = new(), new()
    for block in range(1, 5):
        for digest in (one, other):
            digest.add(0, np.array([block]), np.zeros(1, np.int64))
            digest.ready()
    expected = digests(plan_pair(layout, layout), BY_TORCH(layout), End.TARGET)()
    expected.add(0, np.arange(1, 5), np.zeros(4, np.int64))
    assert other.hexdigest() == one.hexdigest() == expected.hexdigest()
