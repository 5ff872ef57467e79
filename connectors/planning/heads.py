"""Distributes KV heads over tensor-parallel ranks, and selects the source rank of each head.

    rank r of n holds heads [r*H//n, (r+1)*H//n)           H >= n
    rank r of n holds a replica of the one head r*H//n     H <  n

TP sizes need not divide each other. Every consumer rank receives each of its heads from exactly one
producer rank. Replicas share the load: consumer ranks take turns over the ranks with a replica; if
there are fewer consumer ranks than replicas, layers take turns, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from connectors.errors import PlanError


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads ``[first, stop)`` of the model that one producer rank sends to one consumer rank."""

    producer_rank: int
    consumer_rank: int
    first: int
    stop: int


def held_heads(rank: int, tp_size: int, kv_heads: int) -> range:
    """Return the model-wide numbers of the KV heads that ``rank`` of ``tp_size`` holds."""
    if tp_size <= 0 or kv_heads <= 0 or not 0 <= rank < tp_size:
        raise PlanError(f"invalid split of {kv_heads} KV heads: rank {rank} of {tp_size}")
    first = rank * kv_heads // tp_size
    return range(first, max(first + 1, (rank + 1) * kv_heads // tp_size))


def head_shares(producer_tp: int, consumer_tp: int, kv_heads: int, layer_index: int = 0) -> tuple[HeadShare, ...]:
    """Return all shares of one layer, sorted by consumer rank, then by head.

    Heads that one producer rank sends to one consumer rank are contiguous and form one share.
    ``layer_index`` selects the replica: consecutive layers take turns over the ranks with a
    replica.
    """
    producers = [held_heads(rank, producer_tp, kv_heads) for rank in range(producer_tp)]
    consumers = [held_heads(rank, consumer_tp, kv_heads) for rank in range(consumer_tp)]
    shares: list[HeadShare] = []
    for consumer_rank, wanted in enumerate(consumers):
        if kv_heads >= producer_tp:
            for producer_rank, held in enumerate(producers):
                first, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
                if first < stop:
                    shares.append(HeadShare(producer_rank, consumer_rank, first, stop))
        else:
            for head in wanted:
                chosen = _replica(producers, consumers, head, consumer_rank, layer_index)
                shares.append(HeadShare(chosen, consumer_rank, head, head + 1))
    return tuple(shares)


def _replica(producers: list[range], consumers: list[range], head: int, consumer_rank: int, layer_index: int) -> int:
    """Return the producer rank that sends ``head`` of this layer to ``consumer_rank``.

    Each rank with a replica serves its own subset of the consumer ranks.
    """
    holders = [rank for rank, held in enumerate(producers) if head in held]
    wanting = [rank for rank, heads in enumerate(consumers) if head in heads]
    position = wanting.index(consumer_rank)
    first = position * len(holders) // len(wanting)
    stop = max(first + 1, (position + 1) * len(holders) // len(wanting))
    return holders[first + layer_index % (stop - first)]


def partners(producer_tp: int, consumer_tp: int, layer_heads: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the (producer rank, consumer rank) pairs that exchange messages per transfer, sorted.

    ``layer_heads`` are (layer index, KV heads) of the layout's parts. A pair with a share is a
    partner pair. A producer rank without any share still must learn when it can free its blocks, so
    it exchanges messages, without bytes, with consumer rank ``p % consumer_tp``.
    """
    different = {(layer_index if heads < producer_tp else 0, heads) for layer_index, heads in layer_heads}
    shares = (
        share for layer_index, heads in different for share in head_shares(producer_tp, consumer_tp, heads, layer_index)
    )
    pairs = {(share.producer_rank, share.consumer_rank) for share in shares}
    used = {producer for producer, _ in pairs}
    pairs.update((rank, rank % consumer_tp) for rank in range(producer_tp) if rank not in used)
    return tuple(sorted(pairs))
