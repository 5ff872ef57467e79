"""The digest that devices compute in place, against values by hand and against Python arithmetic.

The device is the CPU here; ``make gpu-check`` compares a GPU's digests with a CPU's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from connectors.errors import ConfigurationError, PlanError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.transport.device_digest import KEYS, SEGMENT_BYTES, CacheMemory, DeviceMemory
from connectors.transport.digest import HostMemory

FIRST_KEYS = (0xA03A6DACB97B8DE3, 0x2331CC9914ADBED3, 0x4DD628C2D90F9E3D)
LAST_KEY = 0xA2DF665AA72F35C9
"""Keys from SHAKE128(b"tandem"), as little-endian words of 64 bits with the lowest bit set."""


def memory_of(content: bytes) -> tuple[DeviceMemory, int]:
    """Return a cache of one page with ``content``, and the page's address."""
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    address, size = tensor.data_ptr(), len(content)
    layout = layout_of(address, 1, size)
    # The tensor keeps the bytes alive.
    memory = DeviceMemory(layout)
    memory.kept = tensor  # type: ignore[attr-defined]
    return memory, address


def layout_of(address: int, blocks: int, page_bytes: int, memory: str = "DRAM") -> EngineLayout:
    pages = LayerPages("layer", address, page_bytes, 1, 1, page_bytes, 1, page_bytes, page_bytes, "p")
    region = Region(address, blocks * page_bytes, MemoryKind(memory, 0))
    return EngineLayout(0, 1, blocks, (region,), (Group(0, GroupKind.FULL, 4, None, (pages,)),))


def sums_of(content: bytes) -> list[int]:
    memory, address = memory_of(content)
    return [int(value) % 2**64 for value in memory.sums(np.array([address]), len(content)).flatten()]


def test_keys_are_fixed() -> None:
    """Engines of all releases and devices must use the same keys. An odd key detects every change
    of its word.
    """
    assert tuple(int(key) % 2**64 for key in KEYS[:3]) == FIRST_KEYS
    assert int(KEYS[-1]) % 2**64 == LAST_KEY
    assert len(KEYS) == 4096
    assert (KEYS % 2 == 1).all()


@pytest.mark.parametrize(
    ("content", "factors"),
    [
        (bytes(12), (0, 0, 0)),
        (b"\x01\0\0\0", (1,)),
        (b"\0\0\0\0\x01\0\0\0", (0, 1)),
        (b"\x02\x01\0\0\x03\0\0\0\x05\0\0\0", (0x102, 3, 5)),
        (b"\xff\xff\xff\xff\xfe\xff\xff\xff", (-1, -2)),
        (b"\0\0\0\x80\xff\xff\xff\x7f", (-(2**31), 2**31 - 1)),
    ],
    ids=["zeros", "one", "second word", "little-endian", "negative", "extremes"],
)
def test_a_segment_is_the_sum_of_its_words_times_the_keys(content: bytes, factors: tuple[int, ...]) -> None:
    expected = sum(factor * key for factor, key in zip(factors, FIRST_KEYS, strict=False)) % 2**64
    assert sums_of(content) == [expected]


def test_odd_bytes_at_the_end_are_padded_with_zeros() -> None:
    """Also at an odd address."""
    assert sums_of(b"\x01\0\0\0\x02") == [(FIRST_KEYS[0] + 2 * FIRST_KEYS[1]) % 2**64]
    memory, address = memory_of(b"\x09\x01\0\0\0\x02\x09")
    assert int(memory.sums(np.array([address + 1]), 5)[0, 0]) % 2**64 == (FIRST_KEYS[0] + 2 * FIRST_KEYS[1]) % 2**64


def test_a_long_piece_is_cut_into_segments() -> None:
    """Segments of 16 KiB; a segment's last word uses the last key, the next segment's first word
    the first.
    """
    content = bytearray(2 * SEGMENT_BYTES + 8)
    content[SEGMENT_BYTES - 4] = 1
    content[SEGMENT_BYTES] = 3
    content[2 * SEGMENT_BYTES + 4] = 7
    assert sums_of(bytes(content)) == [LAST_KEY, 3 * FIRST_KEYS[0] % 2**64, 7 * FIRST_KEYS[1] % 2**64]


def test_a_stream_is_the_xxh3_of_its_sums_in_order() -> None:
    """The hash does not depend on the division into feeds."""
    content = np.random.default_rng(0).integers(0, 256, (6, 24), np.uint8)
    memory, address = memory_of(content.tobytes())
    order = np.array([4, 0, 5, 2])
    expected = xxhash.xxh3_128()
    for row in order:
        words = content[row].view("<i4").tolist()
        total = sum(word * int(key) for word, key in zip(words, KEYS, strict=False)) % 2**64
        expected.update(total.to_bytes(8, "little"))
    for cuts in ([4], [1, 3], [2, 0, 2]):
        stream = memory.new_stream()
        for part in np.split(order, np.cumsum(cuts)[:-1]):
            stream.feed(address + 24 * part, 24)
        assert stream.digest() == expected.digest()
    assert memory.new_stream().digest() == xxhash.xxh3_128_digest(b"")


def test_what_both_ends_use_depends_on_both() -> None:
    """xxh3 between two hosts, sums if one end is an accelerator."""
    tensor = torch.zeros(64, dtype=torch.uint8)
    host, device = MemoryKind("DRAM", 0), MemoryKind("VRAM", 1)
    in_dram = CacheMemory(layout_of(tensor.data_ptr(), 1, 64))
    in_vram = CacheMemory(layout_of(tensor.data_ptr(), 1, 64, "VRAM"), [tensor])
    assert isinstance(in_dram.shared_with(host), HostMemory)
    for memory, peer in ((in_dram, device), (in_vram, host), (in_vram, device)):
        assert isinstance(memory.shared_with(peer), DeviceMemory)


def test_the_storage_of_a_view_gives_the_region() -> None:
    """vLLM's views are slices of larger tensors, in any order; the region's bytes are found by
    address.
    """
    storage = torch.arange(256, dtype=torch.uint8)
    other, view = torch.zeros(8), storage[64:128].view(2, 4, 8).transpose(0, 1)
    memory = DeviceMemory(layout_of(storage.data_ptr() + 64, 4, 16, "VRAM"), [other, view])
    on_host = DeviceMemory(layout_of(storage.data_ptr() + 64, 4, 16))
    for each in (memory, on_host):
        sums = each.sums(np.array([storage.data_ptr() + 80]), 4)
        assert int(sums[0, 0]) % 2**64 == int.from_bytes(bytes([16 + 64, 81, 82, 83]), "little") * FIRST_KEYS[0] % 2**64


def test_memory_outside_the_cache_is_refused() -> None:
    """A GPU's memory cannot be read by its address alone."""
    tensor = torch.zeros(64, dtype=torch.uint8)
    layout = layout_of(tensor.data_ptr() + 32, 1, 64, "VRAM")
    with pytest.raises(ConfigurationError, match="no tensor holds the region"):
        DeviceMemory(layout, [tensor])

    memory, address = memory_of(bytes(64))
    for start in (address - 1, address + 64):
        with pytest.raises(PlanError, match="no region"):
            memory.sums(np.array([start]), 4)
    with pytest.raises(PlanError, match="do not lie in one region"):
        memory.sums(np.array([address, address + 61]), 4)
