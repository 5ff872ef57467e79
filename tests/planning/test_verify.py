"""The proof accepts plans and refuses modified ones."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from connectors.errors import CoverError
from connectors.planning.descriptors import Runs, coalesce
from connectors.planning.plan import GroupPlan, PairPlan, Side
from connectors.planning.verify import prove_plans, verify_cover, wanted_bytes
from tests.planning.builders import Rank, Shape, all_plans, draw_moves, make_engine, runs_of, wanted_ids, whole_blocks

TP_PAIRS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (3, 2)]
STYLES = ["packed", "head_major", "token_major"]


Change = Callable[[GroupPlan], GroupPlan]


def consumer_and_plans(tp: tuple[int, int], style: str) -> tuple[Rank, list[PairPlan]]:
    shape = Shape(style=style)
    consumers = make_engine(shape, tp[1])
    return consumers[-1], all_plans(make_engine(shape, tp[0]), consumers)[-1]


def edit(plan: PairPlan, group: int, change: Change) -> PairPlan:
    groups = list(plan.groups)
    groups[group] = change(groups[group])
    return replace(plan, groups=tuple(groups))


def columns(plan: GroupPlan, rows: np.ndarray) -> GroupPlan:
    src, dst = (Side(s.address[rows], s.block_stride[rows], s.unit_offset[rows]) for s in (plan.src, plan.dst))
    return GroupPlan(plan.shape, src, dst, plan.piece_bytes[rows], plan.layer_of[rows])


def drop(plan: GroupPlan) -> GroupPlan:
    return columns(plan, np.arange(1, len(plan.piece_bytes)))


def duplicate(plan: GroupPlan) -> GroupPlan:
    return columns(plan, np.r_[0, np.arange(len(plan.piece_bytes))])


def shift(plan: GroupPlan) -> GroupPlan:
    return replace(plan, dst=replace(plan.dst, address=plan.dst.address + 8))


def shorten(plan: GroupPlan) -> GroupPlan:
    return replace(plan, piece_bytes=plan.piece_bytes - 1)


def lengthen(plan: GroupPlan) -> GroupPlan:
    return replace(plan, piece_bytes=plan.piece_bytes + 1)


def other_layer(plan: GroupPlan) -> GroupPlan:
    return replace(plan, dst=replace(plan.dst, address=np.full_like(plan.dst.address, plan.dst.address[0])))


def stride(plan: GroupPlan) -> GroupPlan:
    return replace(plan, dst=replace(plan.dst, block_stride=plan.dst.block_stride + 8))


@pytest.mark.parametrize("change", [drop, duplicate, shift, shorten, lengthen, other_layer, stride])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tp", TP_PAIRS)
def test_mutated_plans_are_refused(tp: tuple[int, int], style: str, change: Change) -> None:
    """A plan is proved before it is trusted: missing, repeated, moved or excess bytes are
    refused.
    """
    consumer, plans = consumer_and_plans(tp, style)
    prove_plans(consumer.layout, plans)
    sender = next(at for at, plan in enumerate(plans) if plan.groups[1].unit_bytes)
    for group in range(3):
        mutated = [edit(plan, group, change) if at == sender else plan for at, plan in enumerate(plans)]
        with pytest.raises(CoverError):
            prove_plans(consumer.layout, mutated)


@pytest.mark.parametrize("tp", [(2, 1), (4, 2), (3, 2)])
def test_a_missing_or_doubled_rank_is_refused(tp: tuple[int, int]) -> None:
    """All producer ranks together cover the requested bytes; without one there is a hole, with
    one twice an overlap.
    """
    consumer, plans = consumer_and_plans(tp, "head_major")
    senders = [plan for plan in plans if plan.groups[0].unit_bytes]
    with pytest.raises(CoverError, match="not exactly the"):
        prove_plans(consumer.layout, senders[1:])
    with pytest.raises(CoverError, match="written more than once"):
        prove_plans(consumer.layout, [*senders, senders[0]])


@pytest.mark.parametrize("tp", [(1, 2), (2, 4), (4, 2)])
def test_swapped_destination_slices_are_refused(tp: tuple[int, int]) -> None:
    """The plan of another consumer rank, on this rank's addresses, does not cover its bytes."""
    shape = Shape()
    consumers = make_engine(shape, tp[1])
    plans = all_plans(make_engine(shape, tp[0]), consumers)
    with pytest.raises(CoverError):
        prove_plans(consumers[0].layout, plans[1])


def test_whole_transfers_are_verified() -> None:
    """`verify_cover` accepts a transfer's own runs, and refuses them with a run removed, repeated,
    cut or moved.
    """
    shape = Shape(style="token_major")
    producers, consumers = make_engine(shape, 2), make_engine(shape, 1)
    plans = all_plans(producers, consumers)[0]
    moves = [
        whole_blocks(group, np.array([1 + group, 5 + group]), np.array([7 - group, 10 - group])) for group in (0, 2)
    ]
    ids = [move.dst_ids for move in (moves[0], whole_blocks(1, *[np.empty(0, np.int64)] * 2), moves[1])]
    good = runs_of(plans, moves)
    verify_cover(consumers[0].layout, ids, good)
    keep = np.arange(1, len(good[0]))
    for bad in (
        Runs(good[0].src[keep], good[0].dst[keep], good[0].length[keep]),
        Runs(*(np.r_[column, column[:1]] for column in (good[0].src, good[0].dst, good[0].length))),
        Runs(good[0].src, good[0].dst + 1, good[0].length),
        Runs(good[0].src, good[0].dst, good[0].length - (good[0].dst == good[0].dst[0])),
        Runs(good[0].src[:0], good[0].dst[:0], good[0].length[:0]),
    ):
        with pytest.raises(CoverError):
            verify_cover(consumers[0].layout, ids, [bad, good[1]])
    with pytest.raises(CoverError):
        verify_cover(consumers[0].layout, ids, [])


def test_blocks_that_nobody_wants_are_refused() -> None:
    """One block more than requested, or another one, is refused."""
    shape = Shape()
    producers, consumers = make_engine(shape, 1), make_engine(shape, 1)
    plans = all_plans(producers, consumers)[0]
    none = np.empty(0, np.int64)
    for written in ([2, 3], [3]):
        moves = [whole_blocks(0, np.array(written), np.array(written))]
        with pytest.raises(CoverError, match="not exactly the"):
            verify_cover(consumers[0].layout, [np.array([2]), none, none], runs_of(plans, moves))


def test_nothing_wanted_and_nothing_written_is_a_cover() -> None:
    """A consumer with the whole prompt in its cache requests no byte, and receives none."""
    consumer = make_engine(Shape(), 1)[0]
    none = [np.empty(0, np.int64)] * 3
    verify_cover(consumer.layout, none, [])
    assert [len(column) for column in wanted_bytes(consumer.layout, none)] == [0, 0]


def test_bytes_written_where_nothing_is_wanted_are_refused() -> None:
    """Runs that write bytes although none are requested are refused."""
    shape = Shape()
    consumer, plans = consumer_and_plans((1, 1), "head_major")
    moves = draw_moves(np.random.default_rng(4), shape, shape)
    assert sum(len(ids) for ids in wanted_ids(moves))
    with pytest.raises(CoverError):
        verify_cover(consumer.layout, [np.empty(0, np.int64)] * 3, runs_of(plans, moves))


def test_one_block_wanted_twice_is_refused() -> None:
    """A block id at two positions, or in two groups that share memory, cannot have both
    contents.
    """
    consumer, _ = consumer_and_plans((1, 1), "head_major")
    none = np.empty(0, np.int64)
    with pytest.raises(CoverError, match="wanted more than once"):
        verify_cover(consumer.layout, [np.array([3, 3]), none, none], [])
    with pytest.raises(CoverError, match="wanted more than once"):
        verify_cover(consumer.layout, [np.array([3]), np.array([3]), none], [])


def test_merging_does_not_change_a_proof() -> None:
    """Merged or not, the same bytes are covered."""
    consumer, plans = consumer_and_plans((1, 1), "head_major")
    moves = [whole_blocks(group, np.arange(1, 4) + 3 * group, np.arange(1, 4) + 3 * group) for group in range(3)]
    runs = runs_of(plans, moves)[0]
    assert len(coalesce(runs)) == len(runs)
    halves = Runs(
        np.r_[runs.src, runs.src + 8], np.r_[runs.dst, runs.dst + 8], np.r_[np.full(len(runs), 8), runs.length - 8]
    )
    for part in (runs, halves):
        verify_cover(consumer.layout, wanted_ids(moves), [part])
