"""Plans against an oracle that iterates over (layer, head, row): real bytes of whole buffers.

The consumers' buffers start as canaries, so padding, foreign heads and other blocks are compared as
well.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from connectors.errors import IncompatiblePeerError, PlanError
from connectors.planning.descriptors import move_bytes
from connectors.planning.layout import EngineLayout, GroupKind
from connectors.planning.plan import check_compatible, plan_pair
from connectors.planning.verify import prove_plans, verify_cover
from tests.planning.builders import (
    GEMMA,
    STYLES,
    Shape,
    all_plans,
    draw_moves,
    execute,
    fill_distinct,
    make_engine,
    make_rank,
    oracle_copy,
    runs_of,
    wanted_ids,
    whole_blocks,
    with_field,
)

TP_PAIRS = [(p, c) for p in range(1, 5) for c in range(1, 5)]
KV_HEADS = [1, 2, 3, 4, 8]


def transfer_and_compare(producer: Shape, consumer: Shape, tp: tuple[int, int], seed: int) -> None:
    """One transfer by plan and one by the oracle leave equal buffers, and the cover proof
    agrees.
    """
    producers, planned, expected = (
        make_engine(shape, size) for shape, size in ((producer, tp[0]), (consumer, tp[1]), (consumer, tp[1]))
    )
    fill_distinct(producers, producer)
    moves = draw_moves(np.random.default_rng(seed), producer, consumer)
    oracle_copy(producers, expected, moves)
    for rank, plans in zip(planned, all_plans(producers, planned), strict=True):
        for other in producers:
            check_compatible(other.layout, rank.layout)
        prove_plans(rank.layout, plans)
        runs = runs_of(plans, moves)
        verify_cover(rank.layout, wanted_ids(moves), runs)
        assert [part.total_bytes for part in runs] == [sum(move_bytes(plan, m) for m in moves) for plan in plans]
        for part in runs:
            execute(part)
    for rank, reference in zip(planned, expected, strict=True):
        assert rank.region_bytes() == reference.region_bytes(), f"rank {rank.layout.tp_rank} of {tp}, seed {seed}"


@pytest.mark.parametrize("kv_heads", KV_HEADS)
@pytest.mark.parametrize("style", STYLES)
def test_equal_styles_at_all_tp_pairs(style: str, kv_heads: int) -> None:
    """Plans of TP 1..4 x 1..4 move the right bytes, with shared regions and fragmented ids."""
    shape = Shape(kv_heads=kv_heads, style=style)
    for seed, tp in enumerate(TP_PAIRS):
        transfer_and_compare(shape, replace(shape, num_blocks=17), tp, seed)


@pytest.mark.parametrize("kv_heads", KV_HEADS)
@pytest.mark.parametrize(
    ("producer_style", "consumer_style"),
    [("head_major", "token_major"), ("token_major", "heads_outer"), ("gapped_rows", "token_major")],
)
def test_different_styles_at_all_tp_pairs(producer_style: str, consumer_style: str, kv_heads: int) -> None:
    """Rows are equal on both sides, strides are not: every row still arrives."""
    producer = Shape(kv_heads=kv_heads, style=producer_style, rows=2)
    for seed, tp in enumerate(TP_PAIRS):
        transfer_and_compare(producer, replace(producer, style=consumer_style, num_blocks=9), tp, seed)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pads", [(24, 0), (0, 24), (16, 40)])
def test_padding_is_neither_read_nor_written(style: str, pads: tuple[int, int]) -> None:
    """Block strides exceed the content, by different lengths on the two sides."""
    producer = Shape(style=style, pad_bytes=pads[0])
    for seed, tp in enumerate([(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (3, 2)]):
        transfer_and_compare(producer, replace(producer, pad_bytes=pads[1]), tp, seed)


def test_groups_may_differ_in_size_and_lie_alone() -> None:
    """One group has three layers, another has one, and they share no region."""
    groups = ((GroupKind.FULL, None, 3), (GroupKind.SLIDING, 8, 1))
    shape = Shape(groups=groups, shared=False)
    for seed, tp in enumerate(TP_PAIRS):
        transfer_and_compare(shape, shape, tp, seed)


def test_equal_dense_layouts_are_one_piece_a_layer() -> None:
    """The plan has as few pieces as both sides allow: adjacent heads move as one."""
    for style, tp, pieces in (
        ("packed", (1, 1), 1),
        ("head_major", (1, 1), 1),
        ("head_major", (1, 2), 1),
        ("head_major", (4, 2), 1),
        ("heads_outer", (1, 1), 4),
        ("token_major", (1, 1), 1),
        ("token_major", (4, 2), 4),  # one per row: all heads of a row lie together
        ("gapped_rows", (1, 2), 8),  # one per row and head
    ):
        shape = Shape(style=style)
        plan = plan_pair(make_rank(shape, 0, tp[0]).layout, make_rank(shape, 0, tp[1]).layout)
        assert [len(group.piece_bytes) for group in plan.groups] == [2 * pieces] * 3, (style, tp)


def test_swapped_head_slices_are_seen_by_the_oracle() -> None:
    """The cover proof checks destinations only; real bytes show that the sources are the right
    heads.
    """
    shape = Shape()
    producers, planned, expected = make_engine(shape, 1), make_engine(shape, 2), make_engine(shape, 2)
    fill_distinct(producers, shape)
    moves = [whole_blocks(0, np.array([3]), np.array([5]))]
    oracle_copy(producers, expected, moves)
    (plan,) = all_plans(producers, planned)[1]
    group = plan.groups[0]
    src = replace(group.src, address=group.src.address - 2 * 64)
    wrong = replace(plan, groups=(replace(group, src=src), *plan.groups[1:]))
    runs = runs_of([wrong], moves)
    verify_cover(planned[1].layout, [np.array([5]), np.array([], np.int64), np.array([], np.int64)], runs)
    execute(runs[0])
    assert planned[1].region_bytes() != expected[1].region_bytes()


# ---- refusals ----------------------------------------------------------------------------------

BASE = make_rank(Shape(), 0, 1).layout


def layer_changed(**changes: Any) -> EngineLayout:
    pages = BASE.groups[1].layers
    return with_field(BASE, 1, layers=(pages[0], replace(pages[1], **changes)))


@pytest.mark.parametrize(
    ("theirs", "field", "remedy"),
    [
        (
            make_rank(Shape(kv_heads=8), 0, 1).layout,
            "number of KV heads of layer 'layers.0.0'",
            "same model, dtype and KV layout",
        ),
        (make_rank(Shape(groups=GEMMA[:2]), 0, 1).layout, "number of KV cache groups", "same model"),
        (with_field(BASE, 2, kind=GroupKind.SLIDING, window_tokens=8), "kind of KV cache group 2", "same model"),
        (with_field(BASE, 1, window_tokens=9), "window_tokens of KV cache group 1", "same model"),
        (with_field(BASE, 0, block_tokens=8), "tokens per row of layer 'layers.0.0'", "same block_size"),
        (layer_changed(layer="other"), "layers of KV cache group 1", "same model"),
        (with_field(BASE, 1, layers=BASE.groups[1].layers[:1]), "layers of KV cache group 1", "same model"),
        (layer_changed(packing="other"), "packing of layer 'layers.1.1'", "KV layout"),
        (layer_changed(rows=2), "tokens per row of layer 'layers.1.1'", "same block_size"),
        (layer_changed(row_bytes=8), "row_bytes of layer 'layers.1.1'", "KV layout"),
    ],
)
def test_an_incompatible_peer_is_named(theirs: EngineLayout, field: str, remedy: str) -> None:
    """The error names the first difference, with both values and a remedy; no plan is made."""
    with pytest.raises(IncompatiblePeerError, match=remedy) as refusal:
        check_compatible(theirs, BASE)
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field} differs: the decode engine has ")
    with pytest.raises(IncompatiblePeerError) as mirrored:
        check_compatible(BASE, theirs)
    assert mirrored.value.field == field


def test_what_may_differ_is_accepted() -> None:
    """TP size, pool size, padding, addresses and the order of heads and rows in memory may
    differ.
    """
    for shape in (Shape(num_blocks=30), Shape(pad_bytes=64), Shape(style="token_major"), Shape(shared=False)):
        for rank in make_engine(shape, 2):
            check_compatible(rank.layout, BASE)


def test_pages_with_fewer_heads_than_the_rank_holds_are_refused() -> None:
    """A layer with fewer heads than its rank's share is refused; the error names it."""
    pages = BASE.groups[0].layers
    with pytest.raises(PlanError, match=r"layer 'layers\.0\.0': rank 0 of 1 holds 3 of 4 heads, .* gives it 4"):
        with_field(BASE, 0, layers=(replace(pages[0], heads=3), pages[1]))


@pytest.mark.parametrize(
    ("prefill_tokens", "decode_tokens", "fits"), [(8, 8, True), (16, 8, True), (8, 16, False), (8, 12, False)]
)
def test_a_prefix_cache_needs_whole_blocks(prefill_tokens: int, decode_tokens: int, fits: bool) -> None:
    """A window may begin in a decode block that prefill has only in part: refused if decode
    caches prefixes.
    """
    groups = ((GroupKind.SLIDING, 6, 1), (GroupKind.FULL, None, 1))
    layouts = [
        make_rank(Shape(groups=groups, block_tokens=tokens, rows=tokens), 0, 1).layout
        for tokens in (prefill_tokens, decode_tokens)
    ]
    check_compatible(*layouts)
    layouts[1] = replace(layouts[1], caches_prefixes=True)
    if fits:
        check_compatible(*layouts)
    else:
        with pytest.raises(IncompatiblePeerError, match="turn decode's enable_prefix_caching off"):
            check_compatible(*layouts)


def test_states_need_whole_blocks_beside_them() -> None:
    """Unwritten parts of a block may have a state's bytes, which attention must never read."""
    groups = ((GroupKind.STATE, None, 1), (GroupKind.FULL, None, 1))
    small, large = (
        make_rank(Shape(groups=groups, block_tokens=tokens, rows=4, style="packed"), 0, 1).layout for tokens in (8, 16)
    )
    small, large = (
        replace(
            layout,
            groups=(
                layout.groups[0],
                replace(layout.groups[1], layers=tuple(replace(p, packing="same") for p in layout.groups[1].layers)),
            ),
        )
        for layout in (small, large)
    )
    with pytest.raises(
        IncompatiblePeerError, match="for a model with state groups, set prefill's block_size to a multiple"
    ):
        check_compatible(small, large)
