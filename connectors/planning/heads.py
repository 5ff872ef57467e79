"""Distribute KV heads over tensor-parallel ranks, and select the source rank of each head.

    rank r of n holds heads [r*H//n, (r+1)*H//n)           H >= n
    rank r of n holds a replica of the one head r*H//n     H <  n

TP sizes need not divide each other. Every consumer rank receives each of its heads from exactly one
producer rank. Here, *replicas* are ranks with the same heads, not replicas of a deployment. For a
layer, each replica of the producer serves its own subset of the consumer ranks. If there are more
replicas than consumer ranks, a consumer rank receives a stretch of consecutive layers from each of
several replicas: where layers lie side by side in a block, a stretch is one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from connectors.errors import PlanError


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads ``[first, stop)`` of a layer that one producer rank sends to one consumer rank."""

    producer_rank: int
    consumer_rank: int
    first: int
    stop: int


def held_heads(rank: int, tp_size: int, kv_heads: int) -> range:
    """Return the numbers of a layer's KV heads that TP rank ``rank`` of ``tp_size`` holds.

    Heads are numbered over all TP ranks. Raises PlanError for values out of range.
    """
    if tp_size <= 0 or kv_heads <= 0 or not 0 <= rank < tp_size:
        raise PlanError(f"invalid split of {kv_heads} KV heads: rank {rank} of {tp_size}")
    first = rank * kv_heads // tp_size
    return range(first, max(first + 1, (rank + 1) * kv_heads // tp_size))


@lru_cache(maxsize=4096)
def head_shares(
    producer_tp: int, consumer_tp: int, kv_heads: int, layer_index: int = 0, num_layers: int = 1
) -> tuple[HeadShare, ...]:
    """Return all shares of one layer, sorted by consumer rank, then by head.

    ``kv_heads``     KV heads of the layer over all TP ranks
    ``layer_index``  number of the layer in the model; spreads layers over replicas
    ``num_layers``   layers of the model
    """
    sources: dict[range, list[int]] = {}
    for rank in range(producer_tp):
        sources.setdefault(held_heads(rank, producer_tp, kv_heads), []).append(rank)
    targets = [held_heads(rank, consumer_tp, kv_heads) for rank in range(consumer_tp)]
    shares: list[HeadShare] = []
    for held, replicas in sources.items():
        wanting = [rank for rank, wanted in enumerate(targets) if _overlap(held, wanted)]
        for position, consumer_rank in enumerate(wanting):
            common = _overlap(held, targets[consumer_rank])
            chosen = _replica(replicas, position, len(wanting), (layer_index, num_layers))
            shares.append(HeadShare(chosen, consumer_rank, common.start, common.stop))
    return tuple(sorted(shares, key=lambda share: (share.consumer_rank, share.first)))


def _overlap(held: range, wanted: range) -> range:
    return range(max(held.start, wanted.start), min(held.stop, wanted.stop))


def _replica(replicas: list[int], position: int, wanting: int, layer: tuple[int, int]) -> int:
    """Return the replica that sends to consumer rank number ``position`` of ``wanting``.

    ``layer``, its index and the number of layers, selects one of several for one consumer rank.
    """
    first = position * len(replicas) // wanting
    stop = max(first + 1, (position + 1) * len(replicas) // wanting)
    index, count = layer
    return replicas[first + index * (stop - first) // count]
