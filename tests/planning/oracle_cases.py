"""The cases of the oracle: transfers between two engines, in the oracle's terms.

An engine is described by its cache: kinds of groups, their parts, and the order of dimensions.
``oracle.py`` derives everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LAYERS = 2
"""Layers of every group."""
KINDS = ("full", "sliding", "chunked", "latent", "state")
FOREVER = 1 << 30

Choose = Callable[[Sequence[Any]], Any]
"""Function that chooses one of several options: a random generator's ``choice``, or hypothesis."""


@dataclass(frozen=True)
class Part:
    """One part of a layer's page: ``heads`` in total; a row is ``row_tokens`` tokens, or one of
    a state's ``rows``.
    """

    heads: int
    words: int
    row_tokens: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Keeping:
    """One engine's storage of one group.

    ``orders`` names, for each layer, the dimensions from the outermost: B block, K kernel block, P
    part, H head, R row. Of a state, it names the order of H and R in each part, "conv" if the rows
    of the first three parts are interleaved, or "apart" if the last part's blocks are twice as far
    apart as the others'. ``gaps`` are words of padding after the dimensions, from the innermost.
    """

    block_tokens: int
    kernel_blocks: int
    orders: tuple[str, ...]
    gaps: tuple[tuple[int, ...], ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Side:
    """One engine.

    ``shared``: layer k of all groups lies in tensor k, with blocks as the outermost dimension.
    """

    tp: int
    num_blocks: int
    shared: bool
    groups: tuple[Keeping, ...]


@dataclass(frozen=True)
class Case:
    """One transfer. ``chunks`` are the computed tokens after each step of the producer.

    ``thorough``: plans are also proved, and pairs without a share are planned.
    """

    kinds: tuple[str, ...]
    windows: tuple[int | None, ...]
    parts: tuple[tuple[Part, ...], ...]
    producer: Side
    consumer: Side
    prompt: int
    start: int
    end: int
    chunks: tuple[int, ...]
    layerwise: bool
    thorough: bool


# ---- making cases ------------------------------------------------------------------------------

ORDERS = ("BKPHR", "BKHPR", "BKRHP", "BKPRH", "PBKRH", "HBKPR", "PHBKR", "BPKHR", "KBHRP")
WINDOWS = (40, 24, 16, 65, 33, 1, 500)
CHUNKS = (48, 64, 16, 40, 112, 1000)
Sizes = Sequence[tuple[int, int]]
Kept = tuple[int, int, tuple[str, ...], tuple[tuple[int, ...], ...]]
"""A `Keeping` without its ids."""


def make_case(
    choose: Choose, tp: tuple[int, int], kv_heads: int, sizes: Sizes, kinds: Sequence[str], thorough: bool = True
) -> Case:
    """Return a transfer of groups of the given kinds.

    ``sizes[g]`` is the (producer's, consumer's) block size of group g.
    """
    prompt = choose(range(100, 151))
    end = prompt - choose((1, 1, 0))
    start = choose((0, 0, 0, 64, 96))
    shared = choose((True, False)), choose((True, False))
    windows = {"sliding": choose(WINDOWS), "chunked": choose(CHUNKS)}
    parts: list[tuple[Part, ...]] = []
    keeping: tuple[list[Kept], list[Kept]] = ([], [])
    for kind, size in zip(kinds, sizes, strict=True):
        if kind == "state":
            groups = choose((1, 2, 3))
            conv = [Part(heads, choose((1, 2)), rows=3) for heads in (kv_heads, groups, groups)]
            parts.append((*conv, Part(kv_heads, 3, rows=choose((1, 2)))))
            for side in (0, 1):
                orders = [choose(("conv", "HR", "RH", "apart")) for _ in range(LAYERS)]
                gaps = [_gaps(choose, 3) for _ in range(LAYERS)]
                keeping[side].append((size[side], 1, tuple(orders), tuple(gaps)))
            continue
        packed = choose((True, False))
        cuts = [_kernel_blocks(choose, tokens, packed) for tokens in size]
        unit = math.gcd(*(tokens // cut for tokens, cut in zip(size, cuts, strict=True)))
        rows = [n for n in (16, 8, 4, 2) if unit % n == 0] if packed else [1]
        part = Part(1 if kind == "latent" else kv_heads, choose((1, 2)), row_tokens=rows[0] if rows else 1)
        parts.append((part,) if kind == "latent" else (part, part))
        for side in (0, 1):
            orders = [order for order in ORDERS if not shared[side] or order[0] == "B"]
            kept = [choose((orders[0], orders[1], *orders))]
            kept += [choose((kept[0], kept[0], *orders)) for _ in range(LAYERS - 1)]
            gaps = [_gaps(choose, 5) for _ in range(LAYERS)]
            keeping[side].append((size[side], cuts[side], tuple(kept), tuple(gaps)))
    sides = []
    for side in (0, 1):
        counts = [-(-(prompt + 1) // tokens) for tokens, *_ in keeping[side]]
        pool = list(range(1, sum(counts) + 3))
        ids = [_take(choose, pool) for _ in range(sum(counts))]
        dealt = [Keeping(*kept, tuple(ids[sum(counts[:g]) :][: counts[g]])) for g, kept in enumerate(keeping[side])]
        sides.append(Side(tp[side], sum(counts) + 3, shared[side], tuple(dealt)))
    producer, consumer = sides
    return Case(
        tuple(kinds),
        tuple(windows.get(kind) for kind in kinds),
        tuple(parts),
        producer,
        consumer,
        prompt,
        start,
        end,
        _chunks(choose, end),
        choose((True, False)),
        thorough,
    )


def _gaps(choose: Choose, count: int) -> tuple[int, ...]:
    return tuple(choose((0, 0, 1, 3)) for _ in range(count)) if choose((False, False, True)) else (0,) * count


def _kernel_blocks(choose: Choose, tokens: int, packed: bool) -> int:
    least = 16 if packed else 8
    return choose([1, 1, *(cut for cut in (2, 3, 4) if tokens % cut == 0 and tokens // cut >= least)])


def _take(choose: Choose, pool: list[int]) -> int:
    return pool.pop(choose(range(len(pool))))


def _chunks(choose: Choose, end: int) -> tuple[int, ...]:
    """Two steps inside the prompt, and its end, which for the producer is the consumer's resume
    point.
    """
    return tuple(sorted({choose(range(16, end)), choose((32, 48, 64, 80, 96)), end}))
