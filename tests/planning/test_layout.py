"""Regions, groups and pages: what is registered, and what a layout refuses."""

from dataclasses import replace
from typing import Any

import pytest

from connectors.errors import PlanError
from connectors.planning.layout import (
    EngineLayout,
    Group,
    GroupKind,
    LayerPages,
    MemoryKind,
    Region,
    numbered,
    unique_regions,
)
from tests.planning.builders import HOST, Shape, make_rank

GPU0, GPU1 = MemoryKind("VRAM", 0), MemoryKind("VRAM", 1)

PAGES = LayerPages("a", 1000, 100, 2, 2, 50, 5, 10, 10, "rows")
FULL = Group(0, GroupKind.FULL, 5, None, (PAGES,))
LAYOUT = EngineLayout(0, 1, 4, (Region(1000, 400, HOST),), (FULL,))


def region(address: int, length: int, memory_kind: MemoryKind = HOST) -> Region:
    return Region(address, length, memory_kind)


@pytest.mark.parametrize(
    ("spans", "merged"),
    [
        ([], []),
        ([(100, 50)], [(100, 50)]),
        ([(100, 50), (100, 50)], [(100, 50)]),
        ([(200, 50), (100, 50)], [(100, 50), (200, 50)]),
        ([(100, 50), (120, 50)], [(100, 70)]),  # overlapping views of one storage
        ([(100, 50), (120, 10)], [(100, 50)]),  # one inside the other
        ([(100, 20), (100, 50)], [(100, 50)]),  # one base, two lengths
        ([(100, 50), (150, 50)], [(100, 50), (150, 50)]),  # touching: maybe two allocations
        ([(100, 30), (120, 30), (140, 30)], [(100, 70)]),  # a chain
    ],
)
def test_unique_regions_by_hand(spans: list[tuple[int, int]], merged: list[tuple[int, int]]) -> None:
    """Each byte is registered once; spans that only touch stay separate."""
    assert unique_regions(region(*span) for span in spans) == tuple(region(*span) for span in merged)


def test_gemma_3_4b_registers_five_tensors() -> None:
    """Gemma 3 4B has 34 layers on 5 tensors, so it has 5 regions."""
    tensors = [region(0x10000 * (1 + k), 0x8000) for k in range(5)]
    assert unique_regions(tensors[layer % 5] for layer in range(34)) == tuple(tensors)


def test_devices_are_kept_apart() -> None:
    """Equal addresses on two devices are different memory."""
    spans = [region(100, 50, GPU1), region(100, 50, GPU0), region(120, 50, GPU1)]
    assert unique_regions(spans) == (region(100, 50, GPU0), region(100, 70, GPU1))


def test_shared_buffers_are_one_region_each() -> None:
    """Layer k of three groups lies in one buffer: 2 layers per group make 2 regions, or 6
    without sharing.
    """
    assert len(make_rank(Shape(shared=True), 0, 1).layout.regions) == 2
    assert len(make_rank(Shape(shared=False), 0, 1).layout.regions) == 6


def test_sizes_are_derived() -> None:
    """Content is heads times rows times row bytes, without padding; a group's is the sum over
    its layers.
    """
    assert (PAGES.page_bytes, FULL.block_bytes, FULL.row_tokens(PAGES)) == (100, 100, 1)
    padded = replace(PAGES, block_stride_bytes=128)
    assert replace(FULL, layers=(PAGES, padded)).block_bytes == 200
    assert region(100, 50).end == 150
    assert LAYOUT.memory_kind == HOST


@pytest.mark.parametrize(
    "change",
    [
        {"block_stride_bytes": 0},
        {"heads": 0},
        {"head_stride_bytes": 0},
        {"rows": 0},
        {"row_bytes": 0},
        {"row_stride_bytes": 9},
    ],
)
def test_impossible_pages_are_refused(change: dict[str, Any]) -> None:
    """Sizes are positive and rows do not overlap; the error names the layer."""
    with pytest.raises(PlanError, match="layer 'a'"):
        replace(PAGES, **change)


@pytest.mark.parametrize(
    ("kind", "block_tokens", "window", "says"),
    [
        (GroupKind.FULL, 0, None, "block_tokens must be positive, not 0"),
        (GroupKind.FULL, 4, 8, "window_tokens must be positive for sliding and chunked groups"),
        (GroupKind.SLIDING, 4, None, "window_tokens must be positive for sliding and chunked groups"),
    ],
)
def test_impossible_groups_are_refused(kind: GroupKind, block_tokens: int, window: int | None, says: str) -> None:
    """A sliding group has a window, other groups have none, and blocks have tokens; the error
    names the group.
    """
    with pytest.raises(PlanError, match=f"group 3: {says}"):
        Group(3, kind, block_tokens, window, ())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tp_rank": 1}, "tp_rank 1 must be at least 0 and below tp_size 1"),
        ({"tp_rank": -1}, "tp_rank -1 must be at least 0 and below tp_size 1"),
        ({"groups": (replace(FULL, index=1),)}, "sorted by index"),
        ({"regions": ()}, "one memory kind"),
        ({"regions": (region(1000, 400), region(1000, 400, GPU0))}, "one memory kind"),
        ({"regions": (region(1001, 400),)}, "layer 'a': its 4 pages are not inside one region"),
        ({"regions": (region(1000, 399),)}, "layer 'a': its 4 pages are not inside one region"),
        ({"num_blocks": 5}, "layer 'a': its 5 pages are not inside one region"),
    ],
)
def test_impossible_layouts_are_refused(change: dict[str, Any], says: str) -> None:
    """Ranks exist, groups are numbered, all memory is of one kind, and every page lies inside
    one region.
    """
    with pytest.raises(PlanError, match=says):
        replace(LAYOUT, **change)


# ---- kernel blocks, rows of several tokens, parts ----------------------------------------------

SPLIT = replace(
    PAGES, rows=2, kernel_blocks=3, kernel_block_stride_bytes=150, head_stride_bytes=60, row_stride_bytes=12
)


def test_kernel_blocks_count_into_sizes() -> None:
    """3 kernel blocks of 2 heads of 2 rows of 10 bytes; the last byte ends at 2*150 + 1*60 +
    1*12 + 10.
    """
    assert (SPLIT.page_bytes, SPLIT.last_offset) == (120, 382)
    assert (PAGES.page_bytes, PAGES.last_offset) == (100, 100)


@pytest.mark.parametrize("change", [{"kernel_blocks": 1}, {"kernel_block_stride_bytes": 0}, {"kernel_blocks": 0}])
def test_a_stride_belongs_to_several_kernel_blocks(change: dict[str, Any]) -> None:
    """One kernel block has no stride, several have one, and there is at least one."""
    with pytest.raises(PlanError, match="layer 'a'"):
        replace(SPLIT, **change)


@pytest.mark.parametrize(
    ("block_tokens", "pages", "row_tokens"),
    [
        (5, PAGES, 1),
        (80, PAGES, 16),
        (6, SPLIT, 1),
        (96, SPLIT, 16),
        (7, PAGES, None),
        (4, PAGES, None),
        (8, SPLIT, None),  # 8 tokens in 3 kernel blocks
        (9, SPLIT, None),  # 3 tokens in 2 rows
    ],
)
def test_rows_share_a_blocks_tokens_evenly(block_tokens: int, pages: LayerPages, row_tokens: int | None) -> None:
    """Tokens of a block are divided over its kernel blocks, and there over rows; a remainder is
    refused.
    """
    if row_tokens is None:
        with pytest.raises(PlanError, match=f"layer 'a': {block_tokens} tokens cannot be divided"):
            Group(0, GroupKind.FULL, block_tokens, None, (pages,))
    else:
        assert Group(0, GroupKind.FULL, block_tokens, None, (pages,)).row_tokens(pages) == row_tokens


def test_a_states_rows_are_not_tokens() -> None:
    """A convolution has 3 columns, whatever the block size."""
    assert Group(0, GroupKind.STATE, 16, None, (replace(PAGES, rows=3),)).block_bytes == 60


@pytest.mark.parametrize(("last", "fits"), [(1482, True), (1481, False)])
def test_the_last_kernel_block_lies_inside_the_region(last: int, fits: bool) -> None:
    """A page ends with the last row of the last head of its last kernel block: byte 1000 + 1 *
    100 + 382.
    """
    group = Group(0, GroupKind.FULL, 6, None, (SPLIT,))
    regions = (region(1000, last - 1000),)
    if fits:
        assert EngineLayout(0, 1, 2, regions, (group,)).memory_kind == HOST
    else:
        with pytest.raises(PlanError, match="its 2 pages are not inside one region"):
            EngineLayout(0, 1, 2, regions, (group,))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": GroupKind.CHUNKED},
        {"kind": GroupKind.STATE, "window_tokens": 8},
        {"kind": GroupKind.CHUNKED, "window_tokens": 0},
    ],
)
def test_windows_of_chunks_and_states(change: dict[str, Any]) -> None:
    """A chunk has a size, a state has none."""
    with pytest.raises(PlanError, match="window_tokens must be positive for sliding and chunked groups"):
        replace(FULL, **change)


def test_parts_of_a_layer_share_its_turn() -> None:
    """Layers are numbered over all groups; the parts of one layer count once."""
    k0, v0, k1, v1, state = (replace(PAGES, layer=name) for name in ("a", "a", "b", "b", "c"))
    groups = (Group(0, GroupKind.FULL, 5, None, (k0, v0, k1, v1)), Group(1, GroupKind.STATE, 5, None, (state, state)))
    assert [layer_index for layer_index, _ in numbered(groups[0], groups)] == [0, 0, 1, 1]
    assert [layer_index for layer_index, _ in numbered(groups[1], groups)] == [2, 2]


def test_a_rank_holds_its_share_of_every_part() -> None:
    """3 heads over 2 ranks are 1 and 2, one head is replicated on each; other splits are
    refused.
    """
    one, two = replace(PAGES, total_heads=3, heads=1), replace(PAGES, total_heads=3, heads=2)
    latent = replace(PAGES, total_heads=1, heads=1)
    for rank, pages in ((0, one), (1, two)):
        groups = (Group(0, GroupKind.FULL, 5, None, (pages, latent)),)
        assert EngineLayout(rank, 2, 4, LAYOUT.regions, groups).groups == groups
        with pytest.raises(PlanError, match="of 3 heads, but an even split gives it"):
            EngineLayout(1 - rank, 2, 4, LAYOUT.regions, groups)


def test_impossible_parts_are_refused() -> None:
    """The parts of a layer must be adjacent, for sending layer by layer; a state has no kernel
    blocks.
    """
    other = replace(PAGES, layer="b")
    Group(0, GroupKind.FULL, 5, None, (PAGES, PAGES, other, other))
    with pytest.raises(PlanError, match="group 0: the parts of a layer must be adjacent"):
        Group(0, GroupKind.FULL, 5, None, (PAGES, other, PAGES))
    with pytest.raises(PlanError, match="layer 'a': a state cannot have kernel blocks"):
        Group(0, GroupKind.STATE, 5, None, (replace(PAGES, kernel_blocks=2, kernel_block_stride_bytes=40),))
