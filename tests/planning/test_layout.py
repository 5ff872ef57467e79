"""Regions, groups and pages: what is registered, and what a layout refuses."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
SPLIT = replace(
    PAGES, rows=2, kernel_blocks=3, kernel_block_stride_bytes=150, head_stride_bytes=60, row_stride_bytes=12
)
STRIPED = replace(PAGES, rows=2, stripes=2, stripe_stride_bytes=20)
FULL = Group(0, GroupKind.FULL, 5, None, (PAGES,))
LAYOUT = EngineLayout(0, 1, 4, (Region(1000, 400, HOST),), (FULL,))


def region(address: int, length: int, memory_kind: MemoryKind = HOST) -> Region:
    return Region(address, length, memory_kind)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12))
def test_regions_hold_each_byte_once(spans: list[tuple[int, int]]) -> None:
    """They cover the bytes of the spans, do not overlap, and contain every span as a whole."""
    regions = unique_regions(Region(address, length, HOST) for address, length in spans)
    covered = [byte for region in regions for byte in range(region.address, region.end)]
    assert sorted(covered) == sorted({byte for address, length in spans for byte in range(address, address + length)})
    assert all(any(r.address <= a and a + n <= r.end for r in regions) for a, n in spans)
    assert len({region.address for region in regions}) == len(regions)


def test_regions_of_devices_and_shared_tensors() -> None:
    """Equal addresses on two devices are different memory; groups share tensors."""
    spans = [region(100, 50, GPU1), region(100, 50, GPU0), region(120, 50, GPU1)]
    assert unique_regions(spans) == (region(100, 50, GPU0), region(100, 70, GPU1))
    assert len(make_rank(Shape(shared=True), 0, 1).layout.regions) == 2
    assert len(make_rank(Shape(shared=False), 0, 1).layout.regions) == 6


def test_sizes_by_hand() -> None:
    """Content without padding; the last byte of the last row ends a page."""
    sizes = [(pages.page_bytes, pages.last_offset) for pages in (PAGES, SPLIT, STRIPED)]
    assert sizes == [(100, 100), (120, 2 * 150 + 60 + 12 + 10), (80, 50 + 20 + 10 + 10)]
    assert replace(FULL, layers=(PAGES, replace(PAGES, block_stride_bytes=128))).block_bytes == 200
    groups = (FULL, replace(FULL, kind=GroupKind.SLIDING, window_tokens=7), replace(FULL, kind=GroupKind.STATE))
    assert [group.kept_tokens for group in groups] == [0, 7, FULL.block_tokens]
    assert LAYOUT.memory_kind == HOST
    assert Group(0, GroupKind.STATE, 16, None, (replace(PAGES, rows=3),)).block_bytes == 60  # rows are no tokens


@pytest.mark.parametrize(
    ("pages", "changes"),
    [
        (PAGES, {"block_stride_bytes": 0}),
        (PAGES, {"total_heads": 0}),
        (PAGES, {"heads": 0}),
        (PAGES, {"head_stride_bytes": 0}),
        (PAGES, {"rows": 0}),
        (PAGES, {"row_bytes": 0}),
        (PAGES, {"row_stride_bytes": 9}),
        (SPLIT, {"kernel_blocks": 1}),
        (SPLIT, {"kernel_blocks": 0}),
        (SPLIT, {"kernel_block_stride_bytes": 0}),
        (SPLIT, {"kernel_block_stride_bytes": -150}),
        (STRIPED, {"stripes": 1}),
        (STRIPED, {"stripe_stride_bytes": 0}),
    ],
)
def test_impossible_pages_are_refused(pages: LayerPages, changes: dict[str, Any]) -> None:
    """Sizes are positive, rows do not overlap, and a stride belongs to several."""
    with pytest.raises(PlanError, match="layer 'a'"):
        replace(pages, **changes)


OTHER = replace(PAGES, layer="b")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_tokens": 0}, "block_tokens"),
        ({"window_tokens": 8}, "window_tokens"),
        ({"kind": GroupKind.SLIDING}, "window_tokens"),
        ({"kind": GroupKind.CHUNKED}, "window_tokens"),
        ({"kind": GroupKind.CHUNKED, "window_tokens": 0}, "window_tokens"),
        ({"kind": GroupKind.STATE, "window_tokens": 8}, "window_tokens"),
        ({"layers": (PAGES, OTHER, PAGES)}, "adjacent"),  # they are sent layer by layer
        ({"kind": GroupKind.STATE, "layers": (SPLIT,)}, "layer 'a'"),
        ({"block_tokens": 7}, "7 tokens"),
        ({"block_tokens": 4}, "4 tokens"),
        ({"block_tokens": 8, "layers": (SPLIT,)}, "8 tokens"),  # in 3 kernel blocks
        ({"block_tokens": 9, "layers": (SPLIT,)}, "9 tokens"),  # 3 tokens in 2 rows
    ],
)
def test_impossible_groups_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        replace(FULL, **changes)


@pytest.mark.parametrize(
    ("block_tokens", "pages", "row_tokens"), [(5, PAGES, 1), (80, PAGES, 16), (6, SPLIT, 1), (96, SPLIT, 16)]
)
def test_rows_divide_a_blocks_tokens(block_tokens: int, pages: LayerPages, row_tokens: int) -> None:
    assert Group(0, GroupKind.FULL, block_tokens, None, (pages, pages)).row_tokens(pages) == row_tokens


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp_rank": 1}, "tp_rank 1"),
        ({"tp_rank": -1}, "tp_rank -1"),
        ({"groups": (replace(FULL, index=1),)}, "index"),
        ({"regions": ()}, "memory kind"),
        ({"regions": (region(1000, 400), region(1000, 400, GPU0))}, "memory kind"),
        ({"regions": (region(1001, 400),)}, "layer 'a': its 4 pages"),
        ({"regions": (region(1000, 399),)}, "layer 'a': its 4 pages"),
        ({"num_blocks": 5}, "layer 'a': its 5 pages"),
        ({"groups": (replace(FULL, layers=(replace(PAGES, heads=1),)),)}, "layer 'a': .* 1 of 2 heads"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, Any], says: str) -> None:
    """Ranks exist, groups are numbered, memory is of one kind, every page lies in one region."""
    with pytest.raises(PlanError, match=says):
        replace(LAYOUT, **changes)


def test_the_last_kernel_block_lies_in_the_region() -> None:
    """Two pages end at byte 1000 + 100 + 382."""
    group = Group(0, GroupKind.FULL, 6, None, (SPLIT,))
    EngineLayout(0, 1, 2, (region(1000, 482),), (group,))
    with pytest.raises(PlanError, match="its 2 pages"):
        EngineLayout(0, 1, 2, (region(1000, 481),), (group,))


def test_a_rank_has_its_share_of_every_part() -> None:
    """3 heads over 2 ranks are 1 and 2; one head is replicated."""
    latent = replace(PAGES, total_heads=1, heads=1)
    for rank, heads in ((0, 1), (1, 2)):
        groups = (Group(0, GroupKind.FULL, 5, None, (replace(PAGES, total_heads=3, heads=heads), latent)),)
        assert EngineLayout(rank, 2, 4, LAYOUT.regions, groups).groups == groups
        with pytest.raises(PlanError, match="of 3 heads"):
            EngineLayout(1 - rank, 2, 4, LAYOUT.regions, groups)


def test_layers_are_numbered_over_all_groups() -> None:
    """All parts of a layer have its number."""
    k0, v0, k1, v1, state = (replace(PAGES, layer=name) for name in ("a", "a", "b", "b", "c"))
    groups = (Group(0, GroupKind.FULL, 5, None, (k0, v0, k1, v1)), Group(1, GroupKind.STATE, 5, None, (state, state)))
    assert [layer_index for layer_index, _ in numbered(groups[0], groups)] == [0, 0, 1, 1]
    assert [layer_index for layer_index, _ in numbered(groups[1], groups)] == [2, 2]
