"""Which tensor-parallel rank holds which KV heads, and who sends which heads to whom.

    rank r of n holds heads [r*H//n, (r+1)*H//n)           H >= n
    rank r of n holds a replica of the one head r*H//n     H <  n

Sizes need not divide each other. Every consumer rank gets each of its heads from exactly one producer rank; where
several producer ranks hold a head, the consumers that want it are spread over them.
"""

from __future__ import annotations

from dataclasses import dataclass

from connectors.errors import PlanError


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads ``[first, stop)`` (global numbers) that ``producer_rank`` sends to ``consumer_rank``."""

    producer_rank: int
    consumer_rank: int
    first: int
    stop: int


def held_heads(rank: int, tp_size: int, kv_heads: int) -> range:
    """Global numbers of the KV heads that ``rank`` of ``tp_size`` holds."""
    if tp_size <= 0 or kv_heads <= 0 or not 0 <= rank < tp_size:
        raise PlanError(f"no rank {rank} of {tp_size} over {kv_heads} KV heads")
    first = rank * kv_heads // tp_size
    return range(first, max(first + 1, (rank + 1) * kv_heads // tp_size))


def head_shares(producer_tp: int, consumer_tp: int, kv_heads: int) -> tuple[HeadShare, ...]:
    """Every share of one transfer, ordered by consumer rank, then by head.

    Heads that one consumer rank takes from one producer rank are contiguous and come as one share.
    """
    producers = [held_heads(rank, producer_tp, kv_heads) for rank in range(producer_tp)]
    consumers = [held_heads(rank, consumer_tp, kv_heads) for rank in range(consumer_tp)]
    shares: list[HeadShare] = []
    for consumer_rank, wanted in enumerate(consumers):
        for head in wanted:
            holders = [rank for rank, held in enumerate(producers) if head in held]
            wanting = [rank for rank, heads in enumerate(consumers) if head in heads]
            chosen = holders[wanting.index(consumer_rank) * len(holders) // len(wanting)]
            last = shares[-1] if shares else None
            if last and (last.producer_rank, last.consumer_rank, last.stop) == (chosen, consumer_rank, head):
                shares[-1] = HeadShare(chosen, consumer_rank, last.first, head + 1)
            else:
                shares.append(HeadShare(chosen, consumer_rank, head, head + 1))
    return tuple(shares)


def partners(producer_tp: int, consumer_tp: int, kv_heads: int) -> tuple[tuple[int, int], ...]:
    """The (producer rank, consumer rank) pairs that must talk about each transfer, sorted.

    These are the pairs with a share. A producer rank that holds only replicas nobody takes still has to learn when
    its blocks are free, so consumer rank ``p % consumer_tp`` talks to it, about nothing but that.
    """
    pairs = {(s.producer_rank, s.consumer_rank) for s in head_shares(producer_tp, consumer_tp, kv_heads)}
    used = {producer for producer, _ in pairs}
    pairs.update((rank, rank % consumer_tp) for rank in range(producer_tp) if rank not in used)
    return tuple(sorted(pairs))
