"""Regions, groups and pages: what is registered, and what a layout refuses to describe."""

from dataclasses import replace

import pytest

from connectors.errors import PlanError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, Place, Region, unique_regions
from tests.planning.builders import HOST, Shape, make_rank

GPU0, GPU1 = Place("VRAM", 0), Place("VRAM", 1)

PAGES = LayerPages("a", 1000, 100, 2, 2, 50, 5, 10, 10, "rows")
FULL = Group(0, GroupKind.FULL, 5, None, (PAGES,))
LAYOUT = EngineLayout(0, 1, 4, (Region(1000, 400, HOST),), (FULL,))


def region(address: int, length: int, place: Place = HOST) -> Region:
    return Region(address, length, place)


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
    """Each byte is registered once; spans that only touch stay two."""
    assert unique_regions(region(*span) for span in spans) == tuple(region(*span) for span in merged)


def test_gemma_3_4b_registers_five_tensors() -> None:
    """34 layers lie on 5 tensors: 5 regions."""
    tensors = [region(0x10000 * (1 + k), 0x8000) for k in range(5)]
    assert unique_regions(tensors[layer % 5] for layer in range(34)) == tuple(tensors)


def test_devices_are_kept_apart() -> None:
    """Equal addresses on two devices are two memories."""
    spans = [region(100, 50, GPU1), region(100, 50, GPU0), region(120, 50, GPU1)]
    assert unique_regions(spans) == (region(100, 50, GPU0), region(100, 70, GPU1))


def test_shared_buffers_are_one_region_each() -> None:
    """Layer k of three groups lies in one buffer: 2 layers a group make 2 regions, or 6 where nothing is shared."""
    assert len(make_rank(Shape(shared=True), 0, 1).layout.regions) == 2
    assert len(make_rank(Shape(shared=False), 0, 1).layout.regions) == 6


def test_sizes_are_derived() -> None:
    """Content is heads times rows times row bytes, padding not counted; a group's is the sum over its layers."""
    assert (PAGES.page_bytes, FULL.block_bytes, FULL.row_tokens(PAGES)) == (100, 100, 1)
    padded = replace(PAGES, block_stride_bytes=128)
    assert replace(FULL, layers=(PAGES, padded)).block_bytes == 200
    assert region(100, 50).end == 150
    assert LAYOUT.place == HOST


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
def test_impossible_pages_are_refused(change: dict[str, int]) -> None:
    """Sizes are positive and rows do not overlap; the error names the layer."""
    with pytest.raises(PlanError, match="layer 'a'"):
        replace(PAGES, **change)


@pytest.mark.parametrize(
    ("kind", "block_tokens", "window", "says"),
    [
        (GroupKind.FULL, 0, None, "block_tokens must be positive, not 0"),
        (GroupKind.FULL, 4, 8, "a window belongs to sliding and chunked groups"),
        (GroupKind.SLIDING, 4, None, "a window belongs to sliding and chunked groups"),
    ],
)
def test_impossible_groups_are_refused(kind: GroupKind, block_tokens: int, window: int | None, says: str) -> None:
    """A sliding group has a window, any other has none, and blocks hold tokens; the error names the group."""
    with pytest.raises(PlanError, match=f"group 3: {says}"):
        Group(3, kind, block_tokens, window, ())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tp_rank": 1}, "tp_rank 1 does not exist in a group of 1"),
        ({"tp_rank": -1}, "tp_rank -1 does not exist"),
        ({"groups": (replace(FULL, index=1),)}, "in the order of their index"),
        ({"regions": ()}, "one kind of memory"),
        ({"regions": (region(1000, 400), region(1000, 400, GPU0))}, "one kind of memory"),
        ({"regions": (region(1001, 400),)}, "layer 'a': its 4 pages do not lie inside one region"),
        ({"regions": (region(1000, 399),)}, "layer 'a': its 4 pages do not lie inside one region"),
        ({"num_blocks": 5}, "layer 'a': its 5 pages do not lie inside one region"),
    ],
)
def test_impossible_layouts_are_refused(change: dict[str, object], says: str) -> None:
    """Ranks exist, groups are numbered, memory is of one place, and every page lies inside one region."""
    with pytest.raises(PlanError, match=says):
        replace(LAYOUT, **change)
