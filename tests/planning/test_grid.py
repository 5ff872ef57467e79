"""Pipeline stages and DCP shards in layouts and plans: tables, properties, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.errors import CoverError, IncompatiblePeerError, PlanError
from connectors.planning.blocks import BlockSet, UnitShape, wanted_units
from connectors.planning.grid import EVERY_TOKEN, Grid, Shard
from connectors.planning.heads import HeadShare, shares_of_layer
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, Region
from connectors.planning.plan import check_compatible, consumer_ranks, plan_pair, unit_shape
from connectors.planning.verify import prove_plans
from tests.planning.builders import HOST

# ---- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shard", "stored"),
    [
        (Shard(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (Shard(0, 2, 1), [0, 2, 4, 6, 8, 10]),
        (Shard(1, 2, 1), [1, 3, 5, 7, 9, 11]),
        (Shard(1, 2, 2), [2, 3, 6, 7, 10, 11]),
        (Shard(2, 3, 2), [4, 5, 10, 11]),
        (Shard(0, 3, 4), [0, 1, 2, 3]),
    ],
)
def test_tokens_of_a_shard(shard: Shard, stored: list[int]) -> None:
    """Rank i has ``interleave_tokens`` tokens, rank i+1 the next; each stores its own densely."""
    tokens = np.arange(12)
    assert tokens[shard.stores(tokens)].tolist() == stored
    assert shard.local(np.asarray(stored)).tolist() == list(range(len(stored)))


@pytest.mark.parametrize(
    ("grid", "dcp_ranks"),
    [
        # (PCP, TP) ranks in order; DCP ranks are consecutive along PCP, then along TP
        (Grid(4), [0, 0, 0, 0]),
        (Grid(4, dcp_size=2), [0, 1, 0, 1]),
        (Grid(4, dcp_size=4), [0, 1, 2, 3]),
        (Grid(2, pcp_size=2), [0, 0, 0, 0]),
        (Grid(2, pcp_size=2, dcp_size=2), [0, 0, 1, 1]),
        (Grid(2, pcp_size=2, dcp_size=4), [0, 2, 1, 3]),
    ],
)
def test_dcp_ranks(grid: Grid, dcp_ranks: list[int]) -> None:
    found = [grid.shard(pcp, tp).rank for pcp in range(grid.pcp_size) for tp in range(grid.tp_size)]
    assert found == dcp_ranks


# (producer, consumer, heads) -> (producer rank, consumer rank, first head, stop)
SHARES: dict[tuple[Grid, Grid, int], list[tuple[int, int, int, int]]] = {
    # MLA on two ranks that each store every other token: the consumer needs both
    (Grid(2, dcp_size=2), Grid(1), 1): [(0, 0, 0, 1), (1, 0, 0, 1)],
    (Grid(1), Grid(2, dcp_size=2), 1): [(0, 0, 0, 1), (0, 1, 0, 1)],
    # the same division on both sides
    (Grid(2, dcp_size=2), Grid(2, dcp_size=2), 1): [(0, 0, 0, 1), (1, 1, 0, 1)],
    # one token at a time against four: each rank has tokens of both
    (Grid(2, dcp_size=2), Grid(2, dcp_size=2, interleave_tokens=4), 1): [
        (0, 0, 0, 1),
        (1, 0, 0, 1),
        (0, 1, 0, 1),
        (1, 1, 0, 1),
    ],
    # ranks 0 and 2 are replicas of the even tokens, 1 and 3 of the odd ones; consumers take turns
    (Grid(4, dcp_size=2), Grid(2), 1): [(0, 0, 0, 1), (1, 0, 0, 1), (2, 1, 0, 1), (3, 1, 0, 1)],
    # 2 heads on 4 ranks: ranks 0, 1 divide head 0, ranks 2, 3 divide head 1
    (Grid(4, dcp_size=2), Grid(1), 2): [(0, 0, 0, 1), (1, 0, 0, 1), (2, 0, 1, 2), (3, 0, 1, 2)],
    # PCP alone stores the same on ranks 0 and 1: they take turns over the consumers
    (Grid(1, pcp_size=2), Grid(2), 2): [(0, 0, 0, 1), (1, 1, 1, 2)],
}


@pytest.mark.parametrize("case", SHARES)
def test_shares_by_hand(case: tuple[Grid, Grid, int]) -> None:
    producer, consumer, heads = case
    assert list(shares_of_layer(producer, consumer, heads, 0, 1, (True, True))) == [HeadShare(*s) for s in SHARES[case]]


Stages = tuple[tuple[str, ...], ...]


def layout(grid: Grid, rank: tuple[int, int, int], stages: Stages, heads: int, block_tokens: int = 4) -> EngineLayout:
    """Return a rank (PP, PCP, TP) with one group; ``block_tokens`` of one rank, 8 bytes a row."""
    pp_rank, pcp_rank, tp_rank = rank
    held = max(1, heads // grid.tp_size)
    size = block_tokens * held * 8
    pages = tuple(
        LayerPages(name, 1000 * number, size, heads, held, block_tokens * 8, block_tokens, 8, 8, "rows")
        for number, name in enumerate(stages[pp_rank], 1)
    )
    group = Group(
        0,
        GroupKind.FULL,
        block_tokens * grid.dcp_size,
        None,
        pages,
        grid.shard(pcp_rank, tp_rank),
        stages if grid.pp_size > 1 else (),
    )
    regions = tuple(Region(each.address, 4 * size, HOST) for each in pages)
    return EngineLayout(
        tp_rank,
        grid.tp_size,
        4,
        regions,
        (group,),
        pp_rank=pp_rank,
        pp_size=grid.pp_size,
        pcp_rank=pcp_rank,
        pcp_size=grid.pcp_size,
        dcp_size=grid.dcp_size,
        interleave_tokens=grid.interleave_tokens,
    )


def engine(grid: Grid, stages: Stages, heads: int = 1) -> list[EngineLayout]:
    return [
        layout(grid, (pp, pcp, tp), stages, heads)
        for pp in range(grid.pp_size)
        for pcp in range(grid.pcp_size)
        for tp in range(grid.tp_size)
    ]


ONE, TWO, THREE = (("a", "b", "c"),), (("a", "b"), ("c",)), (("a",), ("b",), ("c",))


def test_partners_of_stages_by_hand() -> None:
    """A producer stage writes to the consumer stages with which it has a common layer."""
    two, three = engine(Grid(1, 2), TWO), engine(Grid(1, 3), THREE)
    assert [consumer_ranks(rank, three[0]) for rank in two] == [{0, 1}, {2}]
    assert [consumer_ranks(rank, two[1]) for rank in three] == [{0}, {0}, {1}]
    one = engine(Grid(2), ONE, heads=2)
    staged = engine(Grid(2, 2), TWO, heads=2)
    # ranks of the staged engine: stage 0 is ranks 0 and 1, stage 1 is ranks 2 and 3
    assert [consumer_ranks(rank, staged[0]) for rank in one] == [{0, 2}, {1, 3}]
    assert [consumer_ranks(rank, one[0]) for rank in staged] == [{0}, {1}, {0}, {1}]


def test_a_stage_without_a_share_has_a_partner() -> None:
    """PCP ranks are replicas that divide the layers: a stage of one layer uses only one."""
    producers = engine(Grid(1, 3, pcp_size=2), THREE)
    (consumer,) = engine(Grid(1), ONE)
    assert [sum(plan_pair(rank, consumer).unit_bytes) > 0 for rank in producers] == [
        True, False, True, False, False, True,
    ]  # fmt: skip
    assert [consumer_ranks(rank, consumer) for rank in producers] == [{0}] * 6


def test_pieces_of_a_stage_by_hand() -> None:
    """The producer's stage 1 has layer c alone, the consumer's third layer, at address 3000."""
    producers = engine(Grid(1, 2), TWO)
    (consumer,) = engine(Grid(1), ONE)
    plans = [plan_pair(rank, consumer) for rank in producers]
    assert [(plan.producer_rank, plan.consumer_rank) for plan in plans] == [(0, 0), (1, 0)]
    assert [plan.groups[0].src.address.tolist() for plan in plans] == [[1000, 2000], [1000]]
    assert [plan.groups[0].dst.address.tolist() for plan in plans] == [[1000, 2000], [3000]]
    assert [plan.groups[0].layer_of.tolist() for plan in plans] == [[0, 1], [0]]
    prove_plans(consumer, plans)
    with pytest.raises(CoverError):
        prove_plans(consumer, plans[:1])


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        # (shard, block tokens over all ranks)
        ((Shard(), 16), (Shard(0, 2, 4), 32), (4, 4, 8)),
        ((Shard(), 16), (Shard(0, 2, 16), 32), (16, 1, 2)),
        ((Shard(0, 2, 4), 32), (Shard(1, 4, 2), 64), (2, 16, 32)),
        ((Shard(0, 2, 1), 32), (Shard(), 16), (1, 32, 16)),
    ],
)
def test_units_lie_on_one_rank_of_each_side(
    src: tuple[Shard, int], dst: tuple[Shard, int], shape: tuple[int, int, int]
) -> None:
    """The unit divides both interleaves and both blocks."""
    groups = [Group(0, GroupKind.FULL, tokens, None, (), shard) for shard, tokens in (src, dst)]
    assert unit_shape(*groups) == UnitShape(*shape, src[0], dst[0])


def test_an_equal_division_is_not_cut() -> None:
    """Both engines give rank 0 the same tokens of a block: one unit, of 16 tokens a rank."""
    group = Group(0, GroupKind.FULL, 32, None, (), Shard(0, 2, 1))
    assert unit_shape(group, group) == UnitShape(32, 1, 1, EVERY_TOKEN, EVERY_TOKEN, 2)
    larger = replace(group, block_tokens=96)
    assert unit_shape(group, larger) == UnitShape(32, 1, 3, EVERY_TOKEN, EVERY_TOKEN, 2)


def test_a_rank_is_asked_for_its_own_units() -> None:
    """The producer stores tokens 0-1, 4-5, ..., the consumer 0-3, 8-11, ...; units of 2 tokens."""
    src, dst = Shard(0, 2, 2), Shard(0, 2, 4)
    group = Group(0, GroupKind.FULL, 16, None, (), dst)
    blocks = BlockSet(np.array([0, 1]), np.array([7, 9]))
    units = wanted_units(group, blocks, UnitShape(2, 4, 8, src, dst), 18)
    assert [(u * 2, b, p) for u, b, p in zip(units.units, units.dst_ids, units.dst_parts, strict=True)] == [
        (0, 7, 0),
        (8, 7, 4),
        (16, 9, 0),
    ]


# ---- properties ----------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 500))
def test_a_token_has_one_rank_and_one_place(size: int, interleave: int, token: int) -> None:
    """One rank of a DCP group stores a token, behind its earlier tokens."""
    tokens = np.arange(token + 1)
    shards = [Shard(rank, size, interleave if size > 1 else 1) for rank in range(size)]
    (shard,) = (shard for shard in shards if shard.stores(tokens)[-1])
    assert int(shard.local(tokens)[-1]) == int(shard.stores(tokens).sum()) - 1


shards = st.integers(1, 6).flatmap(
    lambda size: st.builds(Shard, st.integers(0, size - 1), st.just(size), st.integers(1, 9 if size > 1 else 1))
)


@given(shards, shards)
def test_shards_meet_where_a_token_lies_on_both(ours: Shard, theirs: Shard) -> None:
    tokens = np.arange(ours.period * theirs.period)
    assert ours.meets(theirs) == bool((ours.stores(tokens) & theirs.stores(tokens)).any())


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tp_size": 0}, "must be positive"),
        ({"tp_size": 4, "dcp_size": 3}, "tp_size 4 must be a multiple of dcp_size 3"),
        ({"tp_size": 4, "pcp_size": 2, "dcp_size": 4}, "dcp_size 4 must be 1, pcp_size or pcp_size"),
    ],
)
def test_grids_that_vllm_does_not_allow(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Grid(**sizes)


def test_a_rank_must_hold_its_share_of_the_grid() -> None:
    """Layers of another stage, tokens of another shard and repeated layers are refused by name."""
    staged, sharded = engine(Grid(1, 2), TWO)[0], engine(Grid(2, dcp_size=2), ONE)[1]
    with pytest.raises(PlanError, match=r"stage 1 has layers \('c',\), but this rank holds \('a', 'b'\)"):
        replace(staged, pp_rank=1)
    with pytest.raises(PlanError, match="stages has 2 entries, but pp_size 3 requires 3"):
        replace(staged, pp_size=3)
    with pytest.raises(PlanError, match="pp_rank 2 must be at least 0 and below pp_size 2"):
        replace(staged, pp_rank=2)
    with pytest.raises(PlanError, match="the pipeline stages contain a layer twice"):
        replace(staged, groups=(replace(staged.groups[0], stages=(("a", "b"), ("b",))),))
    with pytest.raises(PlanError, match=r"stores Shard\(rank=1, .* its shard in the grid is Shard\(rank=0"):
        replace(sharded, tp_rank=0)
    with pytest.raises(PlanError, match=r"needs full attention .* = 8 tokens; .* blocks of 20 tokens"):
        Group(0, GroupKind.FULL, 20, None, (), Shard(0, 2, 4))
    with pytest.raises(PlanError, match="rank 0 of 1, 4 tokens at a time"):
        Shard(0, 1, 4)
    with pytest.raises(PlanError, match="blocks of 16 tokens and is of kind state"):
        Group(0, GroupKind.STATE, 16, None, (), Shard(0, 2, 4))


def test_other_layers_are_refused_whatever_their_stages() -> None:
    """Stages may differ between engines, layers may not, also those of other stages."""
    two = engine(Grid(1, 2), TWO)
    for other in (*engine(Grid(1), ONE), *engine(Grid(1, 3), THREE)):
        for rank in two:
            check_compatible(rank, other)
            check_compatible(other, rank)
    (shorter,) = engine(Grid(1), (("a", "b"),))
    with pytest.raises(IncompatiblePeerError, match="layers of KV cache group 0"):
        check_compatible(two[0], shorter)


def test_packed_rows_are_not_cut_into_tokens() -> None:
    """Rows of 4 tokens cannot be cut into every other token; equal divisions move whole rows."""

    def packed(shard: Shard) -> Group:
        pages = LayerPages("a", 0, 1024, 1, 1, 1024, 4, 256, 256, "packed")
        return Group(0, GroupKind.FULL, 16 * shard.size, None, (pages,), shard)

    with pytest.raises(PlanError, match="interleaved over 2 DCP ranks, have units of 1 tokens, but the kernel packs 4"):
        unit_shape(packed(Shard(0, 2, 1)), packed(Shard()))
    assert unit_shape(packed(Shard(0, 2, 1)), packed(Shard(0, 2, 1))).tokens == 32
    assert unit_shape(packed(Shard(0, 2, 4)), packed(Shard())).tokens == 4


def test_a_missing_shard_or_stage_is_no_proof() -> None:
    """Without one producer rank, plans do not cover a consumer's blocks."""
    for producer, stages in ((Grid(2, dcp_size=2, interleave_tokens=4), ONE), (Grid(1, 3), THREE)):
        for consumer, theirs in ((Grid(1), ONE), (Grid(1, 2), TWO)):
            for rank in engine(consumer, theirs):
                plans = [plan_pair(each, rank) for each in engine(producer, stages)]
                prove_plans(rank, plans)
                for left in range(len(plans)):
                    if sum(plans[left].unit_bytes):
                        with pytest.raises(CoverError):
                            prove_plans(rank, plans[:left] + plans[left + 1 :])
