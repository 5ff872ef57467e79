"""Plans applied to block ids: how runs merge, and their sums."""

from dataclasses import replace

import numpy as np
import pytest

from connectors.errors import PlanError
from connectors.planning.descriptors import Runs, build_runs, coalesce, move_bytes
from connectors.planning.layout import GroupKind
from connectors.planning.plan import plan_pair
from tests.planning.builders import Shape, draw_moves, make_rank, runs_of, whole_blocks


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


def runs(*rows: tuple[int, int, int]) -> Runs:
    return Runs(*(np.asarray(column, np.int64) for column in (zip(*rows, strict=True) if rows else ([], [], []))))


def rows(merged: Runs) -> list[tuple[int, int, int]]:
    return list(zip(merged.src.tolist(), merged.dst.tolist(), merged.length.tolist(), strict=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], []),
        ([(0, 100, 10)], [(0, 100, 10)]),
        ([(0, 100, 10), (10, 110, 10)], [(0, 100, 20)]),
        ([(0, 100, 10), (10, 110, 5), (15, 115, 1)], [(0, 100, 16)]),
        ([(0, 100, 10), (10, 111, 10)], [(0, 100, 10), (10, 111, 10)]),  # a gap at the destination
        ([(0, 100, 10), (11, 110, 10)], [(0, 100, 10), (11, 110, 10)]),  # a gap at the source
        ([(10, 110, 10), (0, 100, 10)], [(10, 110, 10), (0, 100, 10)]),  # adjacent, but backwards
        ([(0, 100, 10), (10, 110, 10), (0, 200, 10), (10, 210, 10)], [(0, 100, 20), (0, 200, 20)]),
    ],
)
def test_coalescing_by_hand(before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]) -> None:
    """A run merges with its predecessor if and only if both sides continue it."""
    assert rows(coalesce(runs(*before))) == after


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "count"),
    [
        ((1, 2, 3, 4), (5, 6, 7, 8), 1),
        ((1, 2, 3, 4), (5, 6, 8, 9), 2),
        ((1, 2, 4, 5), (5, 6, 7, 8), 2),
        ((1, 3, 5, 7), (1, 3, 5, 7), 4),
        ((4, 3, 2, 1), (4, 3, 2, 1), 4),
        ((), (), 0),
    ],
)
def test_neighbouring_blocks_are_one_run_a_layer(
    src_ids: tuple[int, ...], dst_ids: tuple[int, ...], count: int
) -> None:
    """Equal dense layouts: consecutive blocks on both sides make one run per layer."""
    shape = Shape(num_blocks=12)
    plan = plan_pair(make_rank(shape, 0, 1).layout, make_rank(shape, 0, 1).layout)
    built = build_runs(plan, [whole_blocks(0, ints(*src_ids), ints(*dst_ids))])
    assert len(built) == 2 * count
    assert built.total_bytes == len(src_ids) * plan.unit_bytes[0]


def test_padding_ends_a_run() -> None:
    """Padding between pages is not moved, so every block is a separate run."""
    padded = Shape(pad_bytes=8)
    plan = plan_pair(make_rank(padded, 0, 1).layout, make_rank(padded, 0, 1).layout)
    assert len(build_runs(plan, [whole_blocks(2, ints(1, 2, 3), ints(1, 2, 3))])) == 6


def test_nothing_to_move() -> None:
    """Without moves there are no runs and zero bytes."""
    shape = Shape()
    plan = plan_pair(make_rank(shape, 0, 1).layout, make_rank(shape, 0, 1).layout)
    assert (len(build_runs(plan, [])), build_runs(plan, []).total_bytes) == (0, 0)


def test_a_pair_without_a_share_moves_nothing() -> None:
    """Ranks without a share have a plan without pieces: blocks expand to no runs."""
    shape = Shape(kv_heads=2)
    plan = plan_pair(make_rank(shape, 1, 2).layout, make_rank(shape, 0, 2).layout)
    assert plan.unit_bytes == (0, 0, 0)
    assert len(build_runs(plan, [whole_blocks(0, ints(1, 2), ints(3, 4))])) == 0


def test_unequal_ids_are_refused() -> None:
    """Every destination needs a source; the error names the group."""
    shape = Shape()
    plan = plan_pair(make_rank(shape, 0, 1).layout, make_rank(shape, 0, 1).layout)
    with pytest.raises(PlanError, match="group 1: 2 source units for 1 destination units"):
        build_runs(plan, [whole_blocks(1, ints(1, 2), ints(3))])


def test_layers_can_move_one_after_the_other() -> None:
    """Moves limited to layers [first, stop) are the pieces of those layers; all such parts sum
    to the move.
    """
    shape = Shape(groups=((GroupKind.FULL, None, 3),), style="token_major")
    plan = plan_pair(make_rank(shape, 0, 1).layout, make_rank(shape, 0, 2).layout)
    whole = whole_blocks(0, ints(1, 2, 5), ints(3, 4, 2))
    parts = [replace(whole, layers=layers) for layers in ((0, 1), (1, 3), (3, 9))]
    together = [row for part in parts for row in rows(build_runs(plan, [part]))]
    assert sorted(together) == sorted(rows(build_runs(plan, [whole])))
    third = move_bytes(plan, whole) // 3
    assert [move_bytes(plan, part) for part in (*parts, whole)] == [third, 2 * third, 0, 3 * third]


@pytest.mark.parametrize("style", ["packed", "head_major", "token_major", "heads_outer"])
def test_runs_stay_inside_one_region(style: str) -> None:
    """Runs never merge across registered regions, on either side."""
    shape = Shape(style=style, num_blocks=24)
    for seed in range(10):
        src, dst = make_rank(shape, 0, 2), make_rank(shape, 0, 1)
        moves = draw_moves(np.random.default_rng(seed), shape, shape)
        for built in runs_of([plan_pair(src.layout, dst.layout)], moves):
            for side, layout in ((built.src, src.layout), (built.dst, dst.layout)):
                inside = [(side >= r.address) & (side + built.length <= r.end) for r in layout.regions]
                assert np.logical_or.reduce(inside).all()


def test_ten_thousand_blocks_in_little_time() -> None:
    """The code creates no object per block: 10,000 fragmented blocks expand as vectors."""
    shape = Shape(num_blocks=20_001, row_bytes=8, rows=1)
    plan = plan_pair(make_rank(shape, 0, 1).layout, make_rank(shape, 0, 1).layout)
    ids = np.arange(1, 20_001, 2)
    built = build_runs(plan, [whole_blocks(0, ids, ids[::-1].copy())])
    assert (len(built), built.total_bytes) == (20_000, 10_000 * plan.unit_bytes[0])
