"""Runs of plans, the proof that refuses damaged ones, and peers without a common plan.

``test_oracle.py`` compares the bytes that plans move.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.errors import CoverError, IncompatiblePeerError, PlanError
from connectors.planning.descriptors import Runs, build_runs, coalesce, move_bytes
from connectors.planning.layout import EngineLayout, Group, GroupKind
from connectors.planning.plan import GroupPlan, PairPlan, check_compatible, plan_pair
from connectors.planning.verify import prove_plans, verify_cover, wanted_bytes
from tests.planning.builders import GEMMA, STYLES, Shape, draw_moves, make_engine, make_rank, whole_blocks, with_field

NONE = np.empty(0, np.int64)


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


def pair_of(shape: Shape, tp: tuple[int, int] = (1, 1)) -> PairPlan:
    """Return the plan of the first ranks."""
    return plan_pair(make_rank(shape, 0, tp[0]).layout, make_rank(shape, 0, tp[1]).layout)


def rows(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True))


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], []),
        ([(0, 100, 10)], [(0, 100, 10)]),
        ([(0, 100, 10), (10, 110, 5), (15, 115, 1)], [(0, 100, 16)]),
        ([(0, 100, 10), (10, 111, 10)], [(0, 100, 10), (10, 111, 10)]),  # a gap at the destination
        ([(0, 100, 10), (11, 110, 10)], [(0, 100, 10), (11, 110, 10)]),  # a gap at the source
        ([(10, 110, 10), (0, 100, 10)], [(10, 110, 10), (0, 100, 10)]),  # adjacent, but backwards
        ([(0, 100, 10), (10, 110, 10), (0, 200, 10), (10, 210, 10)], [(0, 100, 20), (0, 200, 20)]),
    ],
)
def test_adjacent_runs_merge(before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]) -> None:
    columns = zip(*before, strict=True) if before else ([], [], [])
    assert rows(coalesce(Runs(*(np.asarray(column, np.int64) for column in columns)))) == after


@pytest.mark.parametrize(
    ("lengths", "most", "parts"),
    [
        ([], (2, 100), []),
        ([5, 5, 5], (2, 100), [[5, 5], [5]]),
        ([5, 5, 5], (9, 10), [[5, 5], [5]]),
        ([5, 5, 5], (9, 9), [[5], [5], [5]]),
        ([50, 5, 5], (9, 10), [[50], [5, 5]]),
        ([5, 50, 5], (9, 10), [[5], [50], [5]]),
    ],
)
def test_slices_have_limits(lengths: list[int], most: tuple[int, int], parts: list[list[int]]) -> None:
    """A run that exceeds the limit of bytes is a part of its own."""
    at = np.arange(len(lengths), dtype=np.int64)
    found = list(Runs(at, at + 100, np.asarray(lengths, np.int64)).slices(*most))
    assert [part.length.tolist() for part in found] == parts
    assert [int(number) for part in found for number in part.src] == at.tolist()
    assert all((part.dst == part.src + 100).all() for part in found)


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "count"),
    [
        ((1, 2, 3, 4), (5, 6, 7, 8), 1),
        ((1, 2, 3, 4), (5, 6, 8, 9), 2),
        ((1, 2, 4, 5), (5, 6, 7, 8), 2),
        ((4, 3, 2, 1), (4, 3, 2, 1), 4),
        ((1, 3, 5, 7), (1, 2, 3, 4), 4),
        ((1, 2, 3, 4), (1, 3, 5, 7), 4),
        ((), (), 0),
    ],
)
def test_neighbouring_blocks_are_one_run_of_a_layer(src_ids: Any, dst_ids: Any, count: int) -> None:
    """Padding between pages is not moved, so it separates them."""
    dense, gaps = (make_rank(Shape(pad_bytes=pad), 0, 1).layout for pad in (0, 8))
    plan = plan_pair(dense, dense)
    move = whole_blocks(0, ints(*src_ids), ints(*dst_ids))
    runs = build_runs(plan, [move])
    assert (len(runs), runs.total_bytes) == (2 * count, len(src_ids) * plan.unit_bytes[0])
    for padded in ((gaps, gaps), (gaps, dense), (dense, gaps)):
        assert len(build_runs(plan_pair(*padded), [move])) == 2 * len(src_ids)
    assert len(build_runs(plan, [])) == 0
    with pytest.raises(PlanError, match="group 1"):
        build_runs(plan, [whole_blocks(1, ints(1, 2), ints(3))])


@pytest.mark.parametrize(
    ("style", "tp", "pieces"),
    [
        ("packed", (1, 1), 1),
        ("head_major", (1, 1), 1),
        ("head_major", (4, 2), 1),
        ("heads_outer", (1, 1), 4),
        ("token_major", (1, 1), 1),
        ("token_major", (4, 2), 4),  # one for each row: all heads of a row lie together
        ("gapped_rows", (1, 2), 8),  # one for each row and head
    ],
)
def test_a_plan_has_as_few_pieces_as_both_sides_allow(style: str, tp: tuple[int, int], pieces: int) -> None:
    assert [len(group.piece_bytes) for group in pair_of(Shape(style=style), tp).groups] == [2 * pieces] * 3


def test_layers_can_move_one_after_the_other() -> None:
    """Layers ``[first, stop)`` of a move; all such parts together are the move."""
    plan = pair_of(Shape(groups=((GroupKind.FULL, None, 3),), style="token_major"), (1, 2))
    whole = whole_blocks(0, ints(1, 2, 5), ints(3, 4, 2))
    parts = [replace(whole, layers=layers) for layers in ((0, 1), (1, 3), (3, 9))]
    together = [row for part in parts for row in rows(build_runs(plan, [part]))]
    assert sorted(together) == sorted(rows(build_runs(plan, [whole])))
    third = move_bytes(plan, whole) // 3
    assert [move_bytes(plan, part) for part in (*parts, whole)] == [third, 2 * third, 0, 3 * third]


def test_adjacent_layers_are_one_piece() -> None:
    """Layers side by side in each block of both sides move as one; digests keep them apart."""
    layout = make_rank(Shape(num_blocks=4, style="packed"), 0, 1).layout
    first, second = layout.groups[0].layers
    size = first.page_bytes
    beside = (
        replace(first, block_stride_bytes=2 * size),
        replace(second, address=first.address + size, block_stride_bytes=2 * size),
    )
    layout = replace(layout, num_blocks=2, groups=(replace(layout.groups[0], layers=beside),))
    (group,) = plan_pair(layout, layout).groups
    assert group.piece_bytes.tolist() == [size, size]
    assert group.across_layers(None).piece_bytes.tolist() == [2 * size]
    assert group.across_layers((1, 2)).piece_bytes.tolist() == [size]
    runs = build_runs(plan_pair(layout, layout), [whole_blocks(0, ints(0, 1), ints(0, 1))])
    assert rows(runs) == [(first.address, first.address, 4 * size)]


# ---- proofs --------------------------------------------------------------------------------------


@st.composite
def transfers(draw: st.DrawFn) -> tuple[EngineLayout, list[PairPlan], list[Any]]:
    """A consumer rank, its plans, and moves of a transfer, between engines that may differ."""
    packed, rows = draw(st.booleans()), draw(st.integers(1, 4))
    group = st.tuples(st.sampled_from([(GroupKind.FULL, None), (GroupKind.SLIDING, 9)]), st.integers(1, 3))
    groups = tuple((*kind, count) for kind, count in draw(st.lists(group, min_size=1, max_size=3)))
    styles = ["packed"] if packed else [style for style in STYLES if style != "packed"]
    producer, consumer = (
        Shape(
            kv_heads=draw(st.shared(st.integers(1, 8), key="heads")),
            style=draw(st.sampled_from(styles)),
            rows=rows,
            row_bytes=8,
            num_blocks=draw(st.integers(4, 14)),
            pad_bytes=draw(st.sampled_from([0, 56])),
            shared=draw(st.booleans()),
            groups=groups,
            block_tokens=rows,
        )
        for _ in range(2)
    )
    target = draw(st.sampled_from(make_engine(consumer, draw(st.integers(1, 4))))).layout
    plans = [plan_pair(rank.layout, target) for rank in make_engine(producer, draw(st.integers(1, 4)))]
    moves = draw_moves(np.random.default_rng(draw(st.integers(0, 1000))), producer, consumer)
    return target, plans, moves


@settings(max_examples=120)
@given(transfers(), st.data())
def test_a_damaged_transfer_is_no_cover(transfer: tuple[EngineLayout, list[PairPlan], list[Any]], data: Any) -> None:
    """The proof accepts all runs, and refuses them with one missing, repeated, cut or moved."""
    consumer, plans, moves = transfer
    prove_plans(consumer, plans)
    runs, ids = [build_runs(plan, moves) for plan in plans], [move.dst_ids for move in moves]
    verify_cover(consumer, ids, runs)
    starts = np.asarray([region.address for region in consumer.regions])
    ends = np.asarray([region.end for region in consumer.regions])
    for part in runs:
        assert (part.dst + part.length <= ends[np.searchsorted(starts, part.dst, "right") - 1]).all(), "one region each"
    senders = [number for number, part in enumerate(runs) if len(part)]
    if not senders:
        return
    sender = data.draw(st.sampled_from(senders))
    part, by = runs[sender], data.draw(st.sampled_from([-8, -1, 1, 8]))
    only = np.arange(len(part)) == data.draw(st.integers(0, len(part) - 1))
    for bad in (
        Runs(part.src[~only], part.dst[~only], part.length[~only]),
        Runs(*(np.r_[column, column[only]] for column in (part.src, part.dst, part.length))),
        Runs(part.src, part.dst, part.length - only),
        Runs(part.src, part.dst, part.length + only),
        Runs(part.src, part.dst + by * only, part.length),
    ):
        with pytest.raises(CoverError):
            verify_cover(consumer, ids, [*runs[:sender], bad, *runs[sender + 1 :]])


def columns(plan: GroupPlan, chosen: np.ndarray) -> GroupPlan:
    return GroupPlan(
        plan.shape, plan.src.of(chosen), plan.dst.of(chosen), plan.piece_bytes[chosen], plan.layer_of[chosen]
    )


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (2, 4), (3, 2)])
@pytest.mark.parametrize("style", ["packed", "token_major"])
def test_damaged_plans_are_refused(tp: tuple[int, int], style: str) -> None:
    """Missing, repeated, moved, shortened or lengthened pieces of any group; a missing rank."""
    consumer = make_engine(Shape(style=style), tp[1])[-1].layout
    plans = [plan_pair(rank.layout, consumer) for rank in make_engine(Shape(style=style), tp[0])]
    prove_plans(consumer, plans)
    sender = next(number for number, plan in enumerate(plans) if plan.groups[1].unit_bytes)
    others = plans[:sender] + plans[sender + 1 :]
    for number, group in enumerate(plans[sender].groups):
        numbers = np.arange(len(group.piece_bytes))
        for bad in (
            columns(group, numbers[1:]),
            columns(group, np.r_[0, numbers]),
            replace(group, dst=replace(group.dst, address=group.dst.address + 8)),
            replace(group, dst=replace(group.dst, block_stride=group.dst.block_stride + 8)),
            replace(group, piece_bytes=group.piece_bytes - 1),
            replace(group, piece_bytes=group.piece_bytes + 1),
        ):
            groups = (*plans[sender].groups[:number], bad, *plans[sender].groups[number + 1 :])
            with pytest.raises(CoverError):
                prove_plans(consumer, [replace(plans[sender], groups=groups), *others])
    for wrong in (others, [*plans, plans[sender]]):
        with pytest.raises(CoverError):
            prove_plans(consumer, wrong)


def test_what_is_wanted_is_unique_and_all_that_is_written() -> None:
    """A block cannot have two contents; without wanted blocks, nothing may be written."""
    consumer, plan = make_rank(Shape(), 0, 1).layout, pair_of(Shape())
    verify_cover(consumer, [NONE] * 3, [])
    assert [len(column) for column in wanted_bytes(consumer, [NONE] * 3)] == [0, 0]
    for ids in ([ints(3, 3), NONE, NONE], [ints(3), ints(3), NONE]):
        with pytest.raises(CoverError, match="more than once"):
            verify_cover(consumer, ids, [])
    plan = plan_pair(consumer, consumer)
    for wanted, written in ((NONE, ints(2)), (ints(2), ints(2, 3)), (ints(2), ints(3)), (ints(2), NONE)):
        with pytest.raises(CoverError):
            verify_cover(consumer, [wanted, NONE, NONE], [build_runs(plan, [whole_blocks(0, written, written)])])


# ---- refusals ------------------------------------------------------------------------------------

BASE = make_rank(Shape(), 0, 1).layout
FIRST, SECOND = BASE.groups[1].layers


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (make_rank(Shape(kv_heads=8), 0, 1).layout, "number of KV heads of layer 'layers.0.0'"),
        (make_rank(Shape(groups=GEMMA[:2]), 0, 1).layout, "number of KV cache groups"),
        (with_field(BASE, 2, kind=GroupKind.SLIDING, window_tokens=8), "kind of KV cache group 2"),
        (with_field(BASE, 1, window_tokens=9), "window_tokens of KV cache group 1"),
        (with_field(BASE, 0, block_tokens=8), "tokens per row of layer 'layers.0.0'"),
        (with_field(BASE, 1, layers=(FIRST, replace(SECOND, layer="other"))), "layers of KV cache group 1"),
        (with_field(BASE, 1, layers=(FIRST,)), "layers of KV cache group 1"),
        (with_field(BASE, 1, layers=(FIRST, replace(SECOND, packing="other"))), "packing of layer 'layers.1.1'"),
        (with_field(BASE, 1, layers=(FIRST, replace(SECOND, rows=2))), "tokens per row of layer 'layers.1.1'"),
        (with_field(BASE, 1, layers=(FIRST, replace(SECOND, row_bytes=8))), "row_bytes of layer 'layers.1.1'"),
        (
            with_field(BASE, 1, layers=(FIRST, replace(SECOND, rows=2, stripes=2, stripe_stride_bytes=32))),
            "stripes of layer 'layers.1.1'",
        ),
    ],
)
def test_an_incompatible_peer_is_named(theirs: EngineLayout, field: str) -> None:
    for pair in ((theirs, BASE), (BASE, theirs)):
        with pytest.raises(IncompatiblePeerError) as refusal:
            check_compatible(*pair)
        assert refusal.value.field == field


def test_what_may_differ() -> None:
    """TP size, pool, padding, addresses, and the order of heads and rows."""
    for shape in (Shape(num_blocks=30), Shape(pad_bytes=64), Shape(style="token_major"), Shape(shared=False)):
        for rank in make_engine(shape, 2):
            check_compatible(rank.layout, BASE)


@pytest.mark.parametrize(
    ("tokens", "window", "states", "refused"),
    [
        ((8, 8), False, False, False),
        ((16, 8), True, True, False),
        ((8, 16), False, False, False),
        ((8, 16), True, False, True),
        ((8, 12), True, False, True),
        ((8, 16), False, True, True),
    ],
)
def test_blocks_that_prefill_has_in_part(tokens: Any, window: bool, states: bool, refused: bool) -> None:
    """A prefix cache would reuse such a window block; beside states it may hold their bytes."""
    layouts = []
    for block_tokens in tokens:
        kinds = ((GroupKind.SLIDING, 6, 1) if window else (GroupKind.FULL, None, 1),)
        shape = Shape(groups=kinds + (((GroupKind.STATE, None, 1),) if states else ()), rows=4, style="packed")
        layout = make_rank(shape, 0, 1).layout
        pages = layout.groups[0].layers[0]
        dense = replace(pages, rows=block_tokens // 4, row_bytes=4, row_stride_bytes=4, packing="same")
        groups = [replace(layout.groups[0], block_tokens=block_tokens, layers=(dense,)), *layout.groups[1:]]
        layouts.append(replace(layout, groups=tuple(groups), caches_prefixes=True))
    if window and not states:
        check_compatible(layouts[0], replace(layouts[1], caches_prefixes=False))
    if refused:
        with pytest.raises(IncompatiblePeerError) as refusal:
            check_compatible(*layouts)
        assert refusal.value.field == "block_tokens of KV cache group 0"
    else:
        check_compatible(*layouts)


def test_states_have_equal_rows() -> None:
    state = Group(0, GroupKind.STATE, 4, None, BASE.groups[0].layers)
    base = replace(BASE, groups=(state,))
    check_compatible(base, with_field(base, 0, block_tokens=8))
    for field in ("rows", "row_bytes"):
        changes: dict[str, Any] = {field: 2}
        pages = tuple(replace(each, **changes) for each in state.layers)
        with pytest.raises(IncompatiblePeerError) as refusal:
            check_compatible(with_field(base, 0, layers=pages), base)
        assert refusal.value.field.startswith(field)
