"""Heads of each rank, and the sender of each head: tables computed by hand, and properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.errors import PlanError
from connectors.planning.heads import HeadShare, head_shares, held_heads
from connectors.planning.layout import GroupKind
from connectors.planning.plan import consumer_ranks
from tests.planning.builders import Shape, heads_of, make_engine

# (producer TP, consumer TP, KV heads) -> (producer rank, consumer rank, first head, stop)
SHARES = {
    (1, 2, 4): [(0, 0, 0, 2), (0, 1, 2, 4)],
    (2, 1, 4): [(0, 0, 0, 2), (1, 0, 2, 4)],
    (4, 2, 4): [(0, 0, 0, 1), (1, 0, 1, 2), (2, 1, 2, 3), (3, 1, 3, 4)],
    # ranks of 3 have heads 0-1, 2-3, 4-5; ranks of 2 have 0-2, 3-5
    (3, 2, 6): [(0, 0, 0, 2), (1, 0, 2, 3), (1, 1, 3, 4), (2, 1, 4, 6)],
    # producers have heads 0, 0, 1, 1, and so do consumers: each replica serves its own
    (4, 4, 2): [(0, 0, 0, 1), (1, 1, 0, 1), (2, 2, 1, 2), (3, 3, 1, 2)],
    # two replicas of each head: the consumer rank uses the first of each
    (4, 1, 2): [(0, 0, 0, 1), (2, 0, 1, 2)],
    (2, 4, 1): [(0, 0, 0, 1), (0, 1, 0, 1), (1, 2, 0, 1), (1, 3, 0, 1)],
    (4, 2, 1): [(0, 0, 0, 1), (2, 1, 0, 1)],
    # 3 heads on 2 ranks: one and two
    (2, 3, 3): [(0, 0, 0, 1), (1, 1, 1, 2), (1, 2, 2, 3)],
}


def partners(producer_tp: int, consumer_tp: int, heads: int, layers: int = 1) -> tuple[tuple[int, int], ...]:
    """Return (producer rank, consumer rank) of all pairs that exchange messages."""
    shape = Shape(kv_heads=heads, groups=((GroupKind.FULL, None, layers),))
    consumer = make_engine(shape, consumer_tp)[-1].layout
    producers = make_engine(shape, producer_tp)
    return tuple(sorted((p, c) for p, rank in enumerate(producers) for c in consumer_ranks(rank.layout, consumer)))


@pytest.mark.parametrize("case", SHARES)
def test_shares_by_hand(case: tuple[int, int, int]) -> None:
    assert list(head_shares(*case)) == [HeadShare(*share) for share in SHARES[case]]


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


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        ((3, 2, 6), ((0, 0), (1, 0), (1, 1), (2, 1))),
        # one layer: ranks 1 and 3 send nothing, and consumer rank p % n tells them when to free
        ((4, 1, 2), ((0, 0), (1, 0), (2, 0), (3, 0))),
        ((4, 2, 1), ((0, 0), (1, 1), (2, 1), (3, 1))),
    ],
)
def test_partners_by_hand(case: tuple[int, int, int], pairs: tuple[tuple[int, int], ...]) -> None:
    assert partners(*case) == pairs


@pytest.mark.parametrize(
    ("case", "senders"),
    [
        ((4, 1, 1), [[0], [0], [1], [2], [3]]),  # one latent on four ranks, one consumer
        ((4, 2, 1), [[0, 2], [0, 2], [0, 2], [1, 3], [1, 3]]),  # two consumers: each has two of the ranks
        ((8, 2, 2), [[0, 4], [0, 4], [1, 5], [2, 6], [3, 7]]),
        ((4, 4, 1), [[0, 1, 2, 3]] * 5),  # each consumer has its own
        ((2, 6, 1), [[0, 0, 0, 1, 1, 1]] * 5),
        ((2, 1, 4), [[0, 1]] * 5),  # no replicas
        ((3, 2, 1), [[0, 1], [0, 1], [0, 1], [0, 2], [0, 2]]),
    ],
)
def test_stretches_of_layers_over_replicas(case: tuple[int, int, int], senders: list[list[int]]) -> None:
    """All replicas send some of the layers if there are more of them than consumers."""
    for layer_index, expected in enumerate(senders):
        assert [share.producer_rank for share in head_shares(*case, layer_index, len(senders))] == expected
    used = {rank for ranks in senders for rank in ranks}
    assert used <= {producer for producer, _ in partners(*case, layers=len(senders))} == set(range(case[0]))


@pytest.mark.parametrize(("rank", "tp_size", "kv_heads"), [(2, 2, 4), (-1, 2, 4), (0, 0, 4), (0, 1, 0)])
def test_impossible_ranks_are_refused(rank: int, tp_size: int, kv_heads: int) -> None:
    with pytest.raises(PlanError, match=f"rank {rank} of {tp_size}"):
        held_heads(rank, tp_size, kv_heads)
