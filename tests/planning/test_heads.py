"""Heads of each rank, and the sender of each head; ``test_oracle.py`` has layers and replicas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.errors import PlanError
from connectors.planning.heads import head_shares, held_heads
from connectors.planning.layout import GroupKind
from connectors.planning.plan import consumer_ranks
from tests.planning.builders import Shape, heads_of, make_engine


def partners(producer_tp: int, consumer_tp: int, heads: int, layers: int = 1) -> tuple[tuple[int, int], ...]:
    """Return (producer rank, consumer rank) of all pairs that exchange messages."""
    shape = Shape(kv_heads=heads, groups=((GroupKind.FULL, None, layers),))
    consumer = make_engine(shape, consumer_tp)[-1].layout
    producers = make_engine(shape, producer_tp)
    return tuple(sorted((p, c) for p, rank in enumerate(producers) for c in consumer_ranks(rank.layout, consumer)))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 12))
def test_every_head_of_every_rank_arrives_once(producer_tp: int, consumer_tp: int, kv_heads: int) -> None:
    """From a rank that has it; a rank of either side without a partner would wait forever."""
    got: dict[int, list[int]] = {rank: [] for rank in range(consumer_tp)}
    for share in head_shares(producer_tp, consumer_tp, kv_heads):
        sent = list(range(share.first, share.stop))
        assert set(sent) <= set(heads_of(share.producer_rank, producer_tp, kv_heads))
        got[share.consumer_rank] += sent
    assert got == {rank: heads_of(rank, consumer_tp, kv_heads) for rank in range(consumer_tp)}
    pairs = partners(producer_tp, consumer_tp, kv_heads, layers=2)
    assert {p for p, _ in pairs} == set(range(producer_tp))
    assert {c for _, c in pairs} == set(range(consumer_tp))


@pytest.mark.parametrize(("rank", "tp_size", "kv_heads"), [(2, 2, 4), (-1, 2, 4), (0, 0, 4), (0, 1, 0)])
def test_impossible_ranks_are_refused(rank: int, tp_size: int, kv_heads: int) -> None:
    with pytest.raises(PlanError, match=f"rank {rank} of {tp_size}"):
        held_heads(rank, tp_size, kv_heads)
