"""Heads of each rank, and the sender of each head: tables computed by hand."""

import pytest

from connectors.errors import PlanError
from connectors.planning.heads import HeadShare, head_shares, held_heads
from connectors.planning.layout import GroupKind
from connectors.planning.plan import consumer_ranks
from tests.planning.builders import Shape, heads_of, make_engine

# (producer TP, consumer TP, KV heads) -> (producer rank, consumer rank, first head, stop)
SHARES = {
    (1, 1, 4): [(0, 0, 0, 4)],
    (1, 2, 4): [(0, 0, 0, 2), (0, 1, 2, 4)],
    (2, 1, 4): [(0, 0, 0, 2), (1, 0, 2, 4)],
    (2, 4, 4): [(0, 0, 0, 1), (0, 1, 1, 2), (1, 2, 2, 3), (1, 3, 3, 4)],
    (4, 2, 4): [(0, 0, 0, 1), (1, 0, 1, 2), (2, 1, 2, 3), (3, 1, 3, 4)],
    # ranks of 3 have heads 0-1, 2-3, 4-5; ranks of 2 have 0-2, 3-5
    (3, 2, 6): [(0, 0, 0, 2), (1, 0, 2, 3), (1, 1, 3, 4), (2, 1, 4, 6)],
    # producers have heads 0, 0, 1, 1 and so do consumers: each replica serves its own
    (4, 4, 2): [(0, 0, 0, 1), (1, 1, 0, 1), (2, 2, 1, 2), (3, 3, 1, 2)],
    # two replicas of each head, one consumer rank with both heads: it uses the first replica of
    # each
    (4, 1, 2): [(0, 0, 0, 1), (2, 0, 1, 2)],
    (2, 4, 2): [(0, 0, 0, 1), (0, 1, 0, 1), (1, 2, 1, 2), (1, 3, 1, 2)],
    (1, 1, 1): [(0, 0, 0, 1)],
    (2, 4, 1): [(0, 0, 0, 1), (0, 1, 0, 1), (1, 2, 0, 1), (1, 3, 0, 1)],
    (4, 2, 1): [(0, 0, 0, 1), (2, 1, 0, 1)],
    (4, 1, 1): [(0, 0, 0, 1)],
    # 3 heads on 2 ranks: one and two
    (2, 3, 3): [(0, 0, 0, 1), (1, 1, 1, 2), (1, 2, 2, 3)],
}


def partners(producer_tp: int, consumer_tp: int, heads: int, layers: int = 1) -> tuple[tuple[int, int], ...]:
    """(producer rank, consumer rank) of all pairs that exchange messages."""
    shape = Shape(kv_heads=heads, groups=((GroupKind.FULL, None, layers),))
    consumer = make_engine(shape, consumer_tp)[-1].layout
    producers = make_engine(shape, producer_tp)
    return tuple(sorted((p, c) for p, rank in enumerate(producers) for c in consumer_ranks(rank.layout, consumer)))


@pytest.mark.parametrize("case", SHARES)
def test_shares_by_hand(case: tuple[int, int, int]) -> None:
    """Every consumer rank receives each of its heads from one producer rank that has it."""
    assert list(head_shares(*case)) == [HeadShare(*share) for share in SHARES[case]]


@pytest.mark.parametrize(
    ("tp_size", "kv_heads", "held"),
    [
        (1, 8, [range(8)]),
        (2, 8, [range(4), range(4, 8)]),
        (4, 4, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        (4, 2, [range(1), range(1), range(1, 2), range(1, 2)]),
        (2, 1, [range(1), range(1)]),
        (2, 3, [range(1), range(1, 3)]),
    ],
)
def test_held_heads_by_hand(tp_size: int, kv_heads: int, held: list[range]) -> None:
    """Ranks have contiguous shares, or replicas of one head if there are fewer heads than ranks."""
    assert [held_heads(rank, tp_size, kv_heads) for rank in range(tp_size)] == held


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 8])
def test_all_heads_arrive_once(kv_heads: int) -> None:
    """For sizes 1 to 6, dividing or not, every head of every consumer rank is sent once, by a
    rank that has it.
    """
    for producer_tp in range(1, 7):
        for consumer_tp in range(1, 7):
            got: dict[int, list[int]] = {rank: [] for rank in range(consumer_tp)}
            for share in head_shares(producer_tp, consumer_tp, kv_heads):
                sent = list(range(share.first, share.stop))
                assert set(sent) <= set(heads_of(share.producer_rank, producer_tp, kv_heads))
                got[share.consumer_rank] += sent
            assert got == {rank: heads_of(rank, consumer_tp, kv_heads) for rank in range(consumer_tp)}


def test_replicas_share_the_work() -> None:
    """Consumers of one head are spread evenly over the producer ranks that have it."""
    senders = [share.producer_rank for share in head_shares(4, 4, 1)]
    assert senders == [0, 1, 2, 3]
    senders = [share.producer_rank for share in head_shares(2, 6, 1)]
    assert senders == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        ((1, 2, 4), ((0, 0), (0, 1))),
        ((3, 2, 6), ((0, 0), (1, 0), (1, 1), (2, 1))),
        # one layer: producer ranks 1 and 3 have unused replicas; consumer rank p % n tells them
        # when to free
        ((4, 1, 2), ((0, 0), (1, 0), (2, 0), (3, 0))),
        ((4, 2, 1), ((0, 0), (1, 1), (2, 1), (3, 1))),
    ],
)
def test_partners_by_hand(case: tuple[int, int, int], pairs: tuple[tuple[int, int], ...]) -> None:
    """Ranks with a share exchange messages, and every producer rank has at least one consumer
    rank.
    """
    producer_tp, consumer_tp, heads = case
    assert partners(producer_tp, consumer_tp, heads) == pairs


@pytest.mark.parametrize(
    ("case", "senders"),
    [
        ((4, 1, 1), [[0], [0], [1], [2], [3]]),  # one latent on four ranks, one consumer
        ((4, 2, 1), [[0, 2], [0, 2], [0, 2], [1, 3], [1, 3]]),  # two consumers: each has two of the ranks
        ((8, 2, 2), [[0, 4], [0, 4], [1, 5], [2, 6], [3, 7]]),
        ((4, 4, 1), [[0, 1, 2, 3]] * 5),  # each consumer has its own
        ((2, 4, 1), [[0, 0, 1, 1]] * 5),
        ((2, 1, 4), [[0, 1]] * 5),  # no replicas
        ((3, 2, 1), [[0, 1], [0, 1], [0, 1], [0, 2], [0, 2]]),
    ],
)
def test_stretches_of_layers_over_replicas(case: tuple[int, int, int], senders: list[list[int]]) -> None:
    """With more replicas than consumers, all replicas are used; consumers share a replica only
    if they must.
    """
    for layer_index, expected in enumerate(senders):
        assert [share.producer_rank for share in head_shares(*case, layer_index, len(senders))] == expected
    producer_tp, consumer_tp, heads = case
    used = {rank for ranks in senders for rank in ranks}
    pairs = partners(producer_tp, consumer_tp, heads, layers=len(senders))
    assert used <= {producer for producer, _ in pairs} == set(range(producer_tp))


def test_nobody_is_without_a_partner() -> None:
    """Each rank of either side has a partner; otherwise its side of a transfer would never end."""
    for kv_heads in (1, 2, 3, 4, 8):
        for producer_tp in range(1, 6):
            for consumer_tp in range(1, 6):
                pairs = partners(producer_tp, consumer_tp, kv_heads, layers=2)
                assert {p for p, _ in pairs} == set(range(producer_tp))
                assert {c for _, c in pairs} == set(range(consumer_tp))


@pytest.mark.parametrize(("rank", "tp_size", "kv_heads"), [(2, 2, 4), (-1, 2, 4), (0, 0, 4), (0, 1, 0)])
def test_impossible_ranks_are_refused(rank: int, tp_size: int, kv_heads: int) -> None:
    """A rank that does not exist, or zero heads, raises PlanError with the reason."""
    with pytest.raises(PlanError, match=f"invalid split of {kv_heads} KV heads: rank {rank} of {tp_size}"):
        held_heads(rank, tp_size, kv_heads)
