"""Distribute KV heads over tensor-parallel ranks, and select the source rank of each head.

    rank r of n holds heads [r*H//n, (r+1)*H//n)           H >= n
    rank r of n holds a replica of the one head r*H//n     H <  n

TP sizes need not divide each other. Every consumer rank receives each of its tokens of each of its
heads from exactly one producer rank. Here, *replicas* are ranks with the same heads and tokens, not
replicas of a deployment. For a layer, each replica of the producer serves its own subset of the
consumer ranks. If there are more replicas than consumer ranks, a consumer rank receives a stretch
of consecutive layers from each of several replicas: where layers lie side by side in a block, a
stretch is one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from connectors.errors import PlanError
from connectors.planning.grid import EVERY_TOKEN, Grid, Shard


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads ``[first, stop)`` of a layer that one producer rank sends to one consumer rank.

    Heads are numbered within the layer over all TP ranks, and ranks within their pipeline stage.
    With DCP, the producer rank sends the tokens that both ranks store.
    """

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


@dataclass(frozen=True, slots=True)
class Holding:
    """Part of a layer that a rank stores. Ranks with equal holdings are replicas."""

    heads: range
    shard: Shard = EVERY_TOKEN


def holdings(grid: Grid, kv_heads: int, *, sharded: bool) -> list[Holding]:
    """Return what each rank of a pipeline stage stores of a layer, by rank within the stage.

    ``kv_heads``  KV heads of the layer over all TP ranks
    ``sharded``   whether DCP divides the layer's tokens; False for states, for example
    """
    return [
        Holding(held_heads(tp_rank, grid.tp_size, kv_heads), grid.shard(pcp_rank, tp_rank) if sharded else EVERY_TOKEN)
        for pcp_rank in range(grid.pcp_size)
        for tp_rank in range(grid.tp_size)
    ]


def head_shares(
    producer_tp: int, consumer_tp: int, kv_heads: int, layer_index: int = 0, num_layers: int = 1
) -> tuple[HeadShare, ...]:
    """Return the shares of one layer between engines with tensor parallelism only.

    Other arguments and the order are as in ``shares_of_layer``.
    """
    return shares_of_layer(Grid(producer_tp), Grid(consumer_tp), kv_heads, layer_index, num_layers, (False, False))


@lru_cache(maxsize=4096)
def shares_of_layer(
    producer: Grid, consumer: Grid, kv_heads: int, layer_index: int, num_layers: int, sharded: tuple[bool, bool]
) -> tuple[HeadShare, ...]:
    """Return all shares of one layer, sorted by consumer rank, then by head, then by shard.

    ``kv_heads``     KV heads of the layer over all TP ranks
    ``layer_index``  number of the layer in the model; spreads layers over replicas
    ``num_layers``   layers of the model
    ``sharded``      whether DCP divides the layer's tokens, at the producer and at the consumer

    Heads that one producer rank sends to one consumer rank are contiguous and form one share.
    """
    sources: dict[Holding, list[int]] = {}
    for rank, holding in enumerate(holdings(producer, kv_heads, sharded=sharded[0])):
        sources.setdefault(holding, []).append(rank)
    targets = holdings(consumer, kv_heads, sharded=sharded[1])
    shares: list[HeadShare] = []
    for held, replicas in sources.items():
        wanting = [rank for rank, wanted in enumerate(targets) if _overlap(held, wanted)]
        for position, consumer_rank in enumerate(wanting):
            common = _overlap(held, targets[consumer_rank])
            chosen = _replica(replicas, position, len(wanting), (layer_index, num_layers))
            shares.append(HeadShare(chosen, consumer_rank, common.start, common.stop))
    order = {rank: number for number, ranks in enumerate(sources.values()) for rank in ranks}
    return tuple(sorted(shares, key=lambda s: (s.consumer_rank, s.first, order[s.producer_rank])))


def _overlap(held: Holding, wanted: Holding) -> range:
    """Return the heads that both ranks store; empty if they have no token in common."""
    heads = range(max(held.heads.start, wanted.heads.start), min(held.heads.stop, wanted.heads.stop))
    return heads if heads and held.shard.meets(wanted.shard) else range(0)


def _replica(replicas: list[int], position: int, wanting: int, layer: tuple[int, int]) -> int:
    """Return the replica that sends to consumer rank number ``position`` of ``wanting``.

    ``replicas`` are producer ranks with the same heads and tokens. If there are at most as many
    replicas as consumer ranks, one replica is assigned to each consumer rank. Otherwise several may
    be assigned to one consumer rank; ``layer``, its index and the number of layers, selects one.
    """
    first = position * len(replicas) // wanting
    stop = max(first + 1, (position + 1) * len(replicas) // wanting)
    index, count = layer
    return replicas[first + index * (stop - first) // count]
