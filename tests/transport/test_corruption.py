"""Digests detect every corruption and raise no false alarm: real bytes over random layouts.

The suite runs a part, the campaign ``corruption`` all 1,000 cases of each kind and 10,000 clean
transfers. Cases are seeded: a failure names the seeds.
"""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import xxhash

from connectors.errors import PlanError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.transport.device_digest import DeviceMemory
from connectors.transport.digest import HostMemory
from tests.campaigns.corruption import DAMAGES, Scene, Transfer, draw_scene

WHOLE = "TANDEM_CORRUPTION" in os.environ
CASES, CLEAN = (1_000, 10_000) if WHOLE else (200, 2_000)
SCENES = 120


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    """Pairs of engines that are reused: every transfer changes their content.

    Some compute digests as a device does.
    """
    memories = (DeviceMemory, *[HostMemory] * 5)
    return [draw_scene(np.random.default_rng([1, seed]), memories[seed % 6]) for seed in range(SCENES)]


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_corruption_is_caught(kind: str, scenes: list[Scene], capsys: pytest.CaptureFixture[str]) -> None:
    damage = DAMAGES[kind]
    fitting = [scene for scene in scenes if len(scene.consumer.heads) >= damage.heads]
    assert len(fitting) > SCENES // 3
    missed, false_alarms = [], []
    for seed in range(CASES):
        rng = np.random.default_rng([2, *kind.encode(), seed])
        transfer = Transfer.draw(fitting[seed % len(fitting)], rng, damage.units)
        said = transfer.run()
        if transfer.found() != said:
            false_alarms.append(seed)
        before = [buffer.copy() for buffer in transfer.scene.consumer.buffers]
        damage.do(transfer)
        after = transfer.scene.consumer.buffers
        assert not all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), f"seed {seed}: no damage"
        if transfer.found() == said:
            missed.append(seed)
    with capsys.disabled():
        print(f"\n{kind}: {CASES - len(missed)} of {CASES} caught", end="")
    assert missed == []
    assert false_alarms == []


def test_clean_transfers_are_believed(scenes: list[Scene], capsys: pytest.CaptureFixture[str]) -> None:
    began, alarms, seen = time.monotonic(), [], set()
    for seed in range(CLEAN):
        transfer = Transfer.draw(scenes[seed % len(scenes)], np.random.default_rng([3, seed]))
        said = transfer.run()
        seen.update(said)
        if transfer.found() != said:
            alarms.append(seed)
    with capsys.disabled():
        print(f"\nclean: {len(alarms)} false alarms in {CLEAN}, {time.monotonic() - began:.1f} s", end="")
    assert alarms == []
    assert len(seen) > CLEAN, "digests that hardly differ would agree for nothing"


def test_a_block_that_is_not_there_is_refused(scenes: list[Scene]) -> None:
    """An id outside the pool is an error, not a read of other memory."""
    consumer = scenes[0].consumer
    digest = scenes[0].pairs[0].target()
    for block in (-1, consumer.layout.num_blocks):
        with pytest.raises(PlanError, match="are not all in a pool"):
            digest.add(0, np.array([block]), np.zeros(1, np.int64))


@pytest.mark.parametrize("length", [8, 1000, 4096, 20_000, 100_000])
@pytest.mark.parametrize("together", [1, 2, 50])
def test_feeding_is_hashing_the_bytes_in_order(length: int, together: int) -> None:
    """Digests of scattered, adjacent, short and long pages equal xxhash over a plain copy."""
    blocks = 200
    content = np.random.default_rng(6).integers(0, 256, blocks * length, np.uint8)
    pages = LayerPages("layer", content.ctypes.data, length, 1, 1, length, 1, length, length, "p")
    region = Region(content.ctypes.data, content.nbytes, MemoryKind("DRAM", 0))
    memory = HostMemory(EngineLayout(0, 1, blocks, (region,), (Group(0, GroupKind.FULL, 4, None, (pages,)),)))
    starts = np.random.default_rng(7).permutation(blocks // together) * together
    ids = (starts[:, None] + np.arange(together)).ravel()
    stream = memory.new_stream()
    stream.feed(content.ctypes.data + ids * length, length)
    assert stream.digest() == xxhash.xxh3_128(content.reshape(blocks, length)[ids].tobytes()).digest()
