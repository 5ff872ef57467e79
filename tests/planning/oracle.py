"""An oracle of the whole planning path, written from the definitions and not from the planner.

The oracle describes an engine in its own terms: kinds of groups, their parts, and the order of
dimensions on each side. From this description come both the planner's ``EngineLayout`` and, by
other formulas, the oracle's results: which rank has which head, where each row of a request lies,
which tokens a resume needs, and which rank sends them. Memory is simulated: every word of 8 bytes
of an engine has an address, and its content is one number for the layer, the part, the head, the
row and the word. A transfer is planned and "applied" as vectors, all ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from connectors.errors import IncompatiblePeerError
from connectors.planning.blocks import offered_units, wanted_blocks
from connectors.planning.descriptors import build_runs, move_bytes
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.planning.plan import check_compatible, consumer_ranks, plan_pair
from connectors.planning.verify import prove_plans
from connectors.protocol.delivery import ConsumerPeer, Delivery, Stage, Transfer, offer_problem, take_ready
from connectors.protocol.engines import Partner
from connectors.protocol.params import EngineAddress
from connectors.protocol.reception import Order, expected_bytes
from connectors.protocol.wire import Offer, Peer
from tests.planning.oracle_cases import FOREVER, LAYERS, Case, Keeping, Part, Side

WORD = 8

# ---- definitions --------------------------------------------------------------------------------


def owner(head: int, tp: int, heads: int) -> int:
    """Return the rank of ``head`` in an even split of at least ``tp`` heads: the last whose
    share starts by it.
    """
    return ((head + 1) * tp - 1) // heads


@cache
def held(rank: int, tp: int, heads: int) -> tuple[int, ...]:
    """Return the heads of one rank."""
    if heads < tp:
        return (rank * heads // tp,)
    return tuple(head for head in range(heads) if owner(head, tp, heads) == rank)


@cache
def sender(producer_tp: int, consumer_tp: int, layer: int, layers: int, heads: int, head: int, consumer: int) -> int:
    """Return the producer rank that sends a layer's ``head``.

    Replicas are distributed over the consumer ranks that need them, as evenly as heads over ranks.
    A consumer rank with several replicas receives as many of the ``layers`` layers from each.
    """
    if heads >= producer_tp:
        return owner(head, producer_tp, heads)
    holders = [rank for rank in range(producer_tp) if head in held(rank, producer_tp, heads)]
    wanting = [rank for rank in range(consumer_tp) if head in held(rank, consumer_tp, heads)]
    mine = held(wanting.index(consumer), len(wanting), len(holders))
    return holders[mine[layer * len(mine) // layers]]


def first_needed(kind: str, window: int | None, resume: int) -> int:
    """Return the oldest token that the token at ``resume`` attends to."""
    if kind not in ("sliding", "chunked"):
        return 0
    assert window is not None
    return max(resume + 1 - window, 0) if kind == "sliding" else resume - resume % window


def unit_tokens(case: Case, group: int) -> int:
    """Return the tokens per unit: the largest number that lies in one block on both sides."""
    kept = (case.producer.groups[group], case.consumer.groups[group])
    return math.gcd(*(side.block_tokens // side.kernel_blocks for side in kept))


def states_beside_partial_blocks(case: Case) -> bool:
    """Return whether a producer's block may end inside a consumer's block, in a pool with
    states.
    """
    tokens = [
        (theirs.block_tokens, ours.block_tokens)
        for kind, theirs, ours in zip(case.kinds, case.producer.groups, case.consumer.groups, strict=True)
        if kind != "state"
    ]
    return "state" in case.kinds and any(theirs % ours for theirs, ours in tokens)


def wanted_rows(case: Case, group: int, part: Part) -> np.ndarray:
    """Return the rows to write: from the producer's block with the first needed token to the
    last unit.
    """
    first, unit = max(first_needed(case.kinds[group], case.windows[group], case.end), 0), unit_tokens(case, group)
    block = case.producer.groups[group].block_tokens
    first_written = max(first, case.start)
    if first_written >= case.end:
        return np.arange(0)
    given = first_written // case.consumer.groups[group].block_tokens * case.consumer.groups[group].block_tokens
    begin, stop = max(first // block * block, given), -(-case.end // unit) * unit
    return np.arange(begin // part.row_tokens, stop // part.row_tokens)


# ---- where things lie --------------------------------------------------------------------------


@dataclass
class PartPlace:
    """Part of one group on one rank: strides in words, offset in a layer, and heads."""

    offset: int
    strides: dict[str, int]
    heads: tuple[int, ...]


@dataclass
class RankPlace:
    """One rank's memory: first words by group and layer, parts by group and layer, regions as
    (word, words).
    """

    layers: list[list[int]]
    parts: list[list[list[PartPlace]]]
    regions: list[tuple[int, int]]
    stop: int


def place_rank(case: Case, side: Side, rank: int, start: int) -> RankPlace:
    """Lay one rank's groups into memory from word ``start``."""
    spans, parts = [], []
    for kind, kept, content in zip(case.kinds, side.groups, case.parts, strict=True):
        heads = [held(rank, side.tp, part.heads) for part in content]
        place = _place_state if kind == "state" else _place_tokens
        placed = [
            place(kept, order, gaps, content, heads, side.num_blocks)
            for order, gaps in zip(kept.orders, kept.gaps, strict=True)
        ]
        parts.append([places for places, _ in placed])
        spans.append([span for _, span in placed])
    if side.shared:
        every = [one for group in parts for layer in group for one in layer]
        stride = max(one.strides["B"] for one in every)
        for one in every:
            one.strides["B"] = stride
        tensors = [start + layer * (side.num_blocks * stride + 5) for layer in range(LAYERS)]
        regions = [(tensor, side.num_blocks * stride) for tensor in tensors]
        return RankPlace([tensors] * len(parts), parts, regions, tensors[-1] + side.num_blocks * stride + 5)
    layers: list[list[int]] = []
    regions = []
    for group in spans:
        layers.append([])
        for span in group:
            layers[-1].append(start)
            regions.append((start, span))
            start += span + 3
    return RankPlace(layers, parts, regions, start)


def _place_tokens(
    kept: Keeping,
    order: str,
    gaps: tuple[int, ...],
    content: tuple[Part, ...],
    heads: list[tuple[int, ...]],
    num_blocks: int,
) -> tuple[list[PartPlace], int]:
    rows = kept.block_tokens // kept.kernel_blocks // content[0].row_tokens
    counts = {"B": num_blocks, "K": kept.kernel_blocks, "P": len(content), "H": len(heads[0]), "R": rows}
    strides, size = {}, content[0].words
    for dimension, gap in zip(reversed(order), gaps, strict=True):
        strides[dimension] = size
        size = size * counts[dimension] + gap
    return [PartPlace(p * strides["P"], dict(strides), heads[p]) for p in range(len(content))], size


def _place_state(
    kept: Keeping,
    order: str,
    gaps: tuple[int, ...],
    content: tuple[Part, ...],
    heads: list[tuple[int, ...]],
    num_blocks: int,
) -> tuple[list[PartPlace], int]:
    places, offset = [], 0
    if order == "conv":
        row = sum(len(own) * part.words for own, part in zip(heads[:3], content[:3], strict=True)) + gaps[0]
        for own, part in zip(heads[:3], content[:3], strict=True):
            places.append(PartPlace(offset, {"H": part.words, "R": row, "K": 0}, own))
            offset += len(own) * part.words
        offset = row * content[0].rows + gaps[1]
    for own, part in list(zip(heads, content, strict=True))[len(places) :]:
        inner = part.words + gaps[0]
        if order == "RH":
            strides = {"H": inner, "R": inner * len(own) + gaps[1], "K": 0}
            size = strides["R"] * part.rows
        else:
            strides = {"R": inner, "H": inner * part.rows + gaps[1], "K": 0}
            size = strides["H"] * len(own)
        places.append(PartPlace(offset, strides, own))
        offset += size
    for place in places:
        place.strides["B"] = offset + gaps[2]
    if order == "apart":
        places[-1].strides["B"] *= 2
    return places, places[-1].strides["B"] * num_blocks


def words_of(
    case: Case, side: Side, rank: RankPlace, group: int, number: int, rows: np.ndarray, state_id: int
) -> np.ndarray:
    """Return the location of (layer, row, head, word) of one part of a request."""
    kept, part = side.groups[group], case.parts[group][number]
    if part.row_tokens:
        token = rows * part.row_tokens
        block, inside = np.divmod(token, kept.block_tokens)
        kernel, inside = np.divmod(inside, kept.block_tokens // kept.kernel_blocks)
        ids, row = np.asarray(kept.ids)[block], inside // part.row_tokens
    else:
        ids, kernel, row = np.asarray(state_id), np.asarray(0), rows
    found = []
    for first, parts in zip(rank.layers[group], rank.parts[group], strict=True):
        place = parts[number]
        strides = place.strides
        at = first + place.offset + ids * strides["B"] + kernel * strides["K"] + row * strides["R"]
        found.append((at[:, None] + np.arange(len(place.heads)) * strides["H"])[:, :, None] + np.arange(part.words))
    return np.stack(found)


def contents(case: Case, group: int, number: int, rows: np.ndarray, heads: Sequence[int]) -> np.ndarray:
    """Return the content of (layer, row, head, word) of one part. No content is 0."""
    layers = np.arange(group * LAYERS, group * LAYERS + LAYERS)
    found = layers * 4 + number
    for index, count in ((rows, 256), (np.asarray(heads), 16), (np.arange(case.parts[group][number].words), 4)):
        found = found[..., None] * count + index
    return found + 1


def layout_of(case: Case, side: Side, number: int, rank: RankPlace) -> EngineLayout:
    """Return the same rank as the planner's layout."""
    groups = []
    for index, (kind, kept) in enumerate(zip(case.kinds, side.groups, strict=True)):
        pages = []
        for layer, first in enumerate(rank.layers[index]):
            for part, place in zip(case.parts[index], rank.parts[index][layer], strict=True):
                rows = part.rows or kept.block_tokens // kept.kernel_blocks // part.row_tokens
                pages.append(
                    LayerPages(
                        layer=f"{index}.{layer}",
                        address=(first + place.offset) * WORD,
                        block_stride_bytes=place.strides["B"] * WORD,
                        total_heads=part.heads,
                        heads=len(place.heads),
                        head_stride_bytes=place.strides["H"] * WORD,
                        rows=rows,
                        row_stride_bytes=place.strides["R"] * WORD,
                        row_bytes=part.words * WORD,
                        packing=f"{part.row_tokens}",
                        kernel_blocks=kept.kernel_blocks,
                        kernel_block_stride_bytes=place.strides["K"] * WORD if kept.kernel_blocks > 1 else 0,
                    )
                )
        group_kind = GroupKind.FULL if kind == "latent" else GroupKind(kind)
        groups.append(Group(index, group_kind, kept.block_tokens, case.windows[index], tuple(pages)))
    regions = tuple(Region(first * WORD, words * WORD, MemoryKind("DRAM", 0)) for first, words in rank.regions)
    return EngineLayout(number, side.tp, side.num_blocks, regions, tuple(groups))


def table_at(case: Case, side: Side, group: int, tokens: int) -> list[int]:
    """Return the block table after ``tokens`` tokens: null for a passed window or an old state."""
    kept = side.groups[group]
    table = list(kept.ids[: -(-tokens // kept.block_tokens)])
    if case.kinds[group] == "state":
        return [0] * (len(table) - 1) + table[-1:]
    passed = first_needed(case.kinds[group], case.windows[group], min(tokens, case.end)) // kept.block_tokens
    return [0] * min(passed, len(table)) + table[passed:]


# ---- the check ---------------------------------------------------------------------------------

PRODUCERS_AT, CONSUMERS_AT = 1 << 10, 1 << 36
"""First words of the two engines."""


@dataclass
class Copied:
    """Every copied word: source, destination, producer rank, and time."""

    src: np.ndarray
    dst: np.ndarray
    writer: np.ndarray
    when: np.ndarray


def check_case(case: Case) -> int:
    """Plan and apply a transfer; check that each requested word is written once, by the right rank,
    with the right content.

    Returns the number of words.
    """
    producers, consumers = (_place_all(case, *side) for side in _sides(case))
    sources = [layout_of(case, case.producer, number, rank) for number, rank in enumerate(producers)]
    targets = [layout_of(case, case.consumer, number, rank) for number, rank in enumerate(consumers)]
    if states_beside_partial_blocks(case):
        # Engines refuse each other; their plans still move the right bytes.
        with pytest.raises(IncompatiblePeerError, match="for a model with state groups"):
            check_compatible(sources[0], targets[0])
    else:
        check_compatible(sources[0], targets[0])
    pairs = expected_pairs(case)
    for target in (targets[0], targets[-1]):
        assert {(p, c) for p, source in enumerate(sources) for c in consumer_ranks(source, target)} == set(pairs)
    plans = {(p, c): plan_pair(sources[p], targets[c]) for p, c in pairs}
    if case.thorough:
        for c, target in enumerate(targets):
            prove_plans(target, [plan for (_, rank), plan in plans.items() if rank == c])
        for p, c in {(p, c) for p in range(len(sources)) for c in range(len(targets))} - set(pairs):
            assert plan_pair(sources[p], targets[c]).unit_bytes == (0,) * len(case.kinds), "others move nothing"

    moves, order = transfer_moves(case, sources[0].groups, targets[0].groups, next(iter(plans.values())).shapes)
    copied, sent = apply(case, plans, moves)
    words = compare(case, producers, consumers, copied)
    for pair, plan in plans.items():
        assert [shape.tokens for shape in plan.shapes] == [
            1 if kind == "state" else unit_tokens(case, group) for group, kind in enumerate(case.kinds)
        ]
        partner = Partner(Peer("p", pair[0]), plan.shapes, plan.unit_bytes)
        assert sent[pair] == expected_bytes(targets[pair[1]].groups, order, partner), pair
    return words


def _sides(case: Case) -> tuple[tuple[Side, int], tuple[Side, int]]:
    return (case.producer, PRODUCERS_AT), (case.consumer, CONSUMERS_AT)


def _place_all(case: Case, side: Side, start: int) -> list[RankPlace]:
    ranks: list[RankPlace] = []
    for rank in range(side.tp):
        ranks.append(place_rank(case, side, rank, ranks[-1].stop if ranks else start))
    return ranks


def expected_pairs(case: Case) -> tuple[tuple[int, int], ...]:
    """Check the partners: senders with their receivers, and each producer rank with at least
    one.
    """
    pairs = {
        (
            sender(
                case.producer.tp, case.consumer.tp, group * LAYERS + layer, LAYERS * len(case.parts), heads, head, c
            ),
            c,
        )
        for group, parts in enumerate(case.parts)
        for layer in range(LAYERS)
        for heads in {part.heads for part in parts}
        for c in range(case.consumer.tp)
        for head in held(c, case.consumer.tp, heads)
    }
    idle = set(range(case.producer.tp)) - {p for p, _ in pairs}
    return tuple(sorted(pairs | {(p, p % case.consumer.tp) for p in idle}))


def transfer_moves(
    case: Case, sources: Sequence[Group], targets: Sequence[Group], shapes: Any
) -> tuple[list[tuple[int, list[Any]]], Order]:
    """Return the planner's moves, each with its time: how much was computed when it was made.

    Time ``c * LAYERS + k``: all chunks before the one that ends at ``c``, and of that one the
    layers up to ``k``.
    """
    tables = [table_at(case, case.consumer, group, case.end) for group in range(len(case.kinds))]
    blocks = tuple(
        wanted_blocks(group, table, case.start, case.end) for group, table in zip(targets, tables, strict=True)
    )
    offer = Offer("t", case.end, "", blocks)
    consumer = ConsumerPeer(frozenset(), case.consumer.num_blocks, shapes)
    transfer = Transfer("t", Stage.LIVE, 0.0, prompt_tokens=case.end)
    assert offer_problem(transfer, offer, sources, consumer) is None
    delivery = Delivery(Peer("c", 0), offer=offer, pending=offered_units(sources, blocks, shapes, case.end))
    found = []
    for computed in case.chunks:
        transfer.computed_tokens = computed
        transfer.tables = [table_at(case, case.producer, group, computed) for group in range(len(case.kinds))]
        moves = take_ready(transfer, delivery, sources, consumer)
        assert moves is not None, "every wanted block is there"
        if case.layerwise:
            for layer in range(LAYERS):
                limited = [replace(move, layers=(layer, layer + 1)) for move in moves]
                found.append((computed * LAYERS + layer, limited))
        else:
            found.append((computed * LAYERS + LAYERS - 1, moves))
    assert not any(len(units) for units in delivery.pending or ())
    return found, Order("r", "t", EngineAddress("i", "", 1), case.end, "", blocks)


def apply(case: Case, plans: dict[tuple[int, int], Any], moves: Any) -> tuple[Copied, dict[tuple[int, int], int]]:
    """Return all runs of all pairs, word by word, and the number of bytes of each pair."""
    columns, tags, sent = [], [], dict.fromkeys(plans, 0)
    for pair, plan in plans.items():
        for time, some in moves:
            runs = build_runs(plan, some)
            assert runs.total_bytes == sum(move_bytes(plan, move) for move in some)
            sent[pair] += runs.total_bytes
            columns.append((runs.src, runs.dst, runs.length))
            tags.append((pair[0], time, len(runs)))
    src, dst, length = (np.concatenate(column) for column in zip(*columns, strict=True))
    assert not ((src | dst | length) % WORD).any(), "words are not cut"
    src, dst, length = src // WORD, dst // WORD, length // WORD
    inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    writer, when, counts = (np.asarray(column) for column in zip(*tags, strict=True))
    return (
        Copied(
            np.repeat(src, length) + inside,
            np.repeat(dst, length) + inside,
            np.repeat(np.repeat(writer, counts), length),
            np.repeat(np.repeat(when, counts), length),
        ),
        sent,
    )


def compare(case: Case, producers: list[RankPlace], consumers: list[RankPlace], copied: Copied) -> int:
    """Compare the copied words with the expected ones."""
    there, stands, since, until, whose = (_join(column) for column in zip(*_produced(case, producers), strict=True))
    where, right, due = (_join(column) for column in zip(*_wanted(case, consumers), strict=True))
    ours, theirs = np.argsort(where), np.argsort(copied.dst)
    got = copied.dst[theirs]
    assert (got[1:] != got[:-1]).all(), "a word is written twice"
    assert np.array_equal(where[ours], got), "the written words differ from the requested ones"

    at = np.argsort(there)
    found = at[np.minimum(np.searchsorted(there, copied.src, sorter=at), max(len(at) - 1, 0))]
    known = there[found] == copied.src
    assert (whose[found] == copied.writer)[known].all(), "a rank reads another rank's memory"
    content = np.where(known, stands[found], 0)[theirs]
    matters = right[ours] > 0
    assert np.array_equal(content[matters], right[ours][matters]), "a word has the wrong content"
    assert np.array_equal(copied.writer[theirs], due[ours]), "a word comes from the wrong rank"
    early = (copied.when < since[found]) | (copied.when > until[found])
    assert not early[theirs][matters].any(), "a word is read before it is computed"
    return len(where)


def _join(columns: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([column.ravel() for column in columns]) if columns else np.empty(0, np.int64)


def _produced(case: Case, ranks: list[RankPlace]) -> Any:
    """Return (word, content, first time, last time, rank) of all content of the producer."""
    chunks, layers = np.asarray(case.chunks), np.arange(LAYERS)[:, None]
    for group, kind in enumerate(case.kinds):
        table = table_at(case, case.producer, group, case.end)
        for number, part in enumerate(case.parts[group]):
            if kind == "state":
                rows, since, until = np.arange(part.rows), np.full(part.rows, case.end), case.end * LAYERS + LAYERS - 1
            else:
                rows = np.arange(-(-case.end // part.row_tokens))
                blocks = rows * part.row_tokens // case.producer.groups[group].block_tokens
                rows = rows[np.asarray(table)[blocks] > 0]
                needed = np.minimum((rows + 1) * part.row_tokens, case.end)
                since, until = chunks[np.searchsorted(chunks, needed)], FOREVER
            for number_of_rank, rank in enumerate(ranks):
                where = words_of(case, case.producer, rank, group, number, rows, table[-1])
                content = contents(case, group, number, rows, rank.parts[group][0][number].heads)
                since_time = np.broadcast_to((since * LAYERS + layers)[:, :, None, None], where.shape)
                yield where, content, since_time, np.full_like(where, until), np.full_like(where, number_of_rank)


def _wanted(case: Case, ranks: list[RankPlace]) -> Any:
    """Return (word, content or 0 for any, producer rank) of all words to write."""
    for group, kind in enumerate(case.kinds):
        table = table_at(case, case.consumer, group, case.end)
        for number, part in enumerate(case.parts[group]):
            if kind == "state":
                rows = np.arange(part.rows if case.start < case.end and case.end in case.chunks else 0)
                matters = rows >= 0
            else:
                rows = wanted_rows(case, group, part)
                matters = rows * part.row_tokens < case.end
            for number_of_rank, rank in enumerate(ranks):
                heads = rank.parts[group][0][number].heads
                where = words_of(case, case.consumer, rank, group, number, rows, table[-1])
                content = contents(case, group, number, rows, heads) * matters[None, :, None, None]
                tp, layers = (case.producer.tp, case.consumer.tp), range(group * LAYERS, group * LAYERS + LAYERS)
                every = LAYERS * len(case.parts)
                senders = [
                    [sender(*tp, layer, every, part.heads, head, number_of_rank) for head in heads] for layer in layers
                ]
                yield where, content, np.broadcast_to(np.asarray(senders)[:, None, :, None], where.shape)
