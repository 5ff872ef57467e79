"""Transfers between random pairs of layouts, directly from plans, and ways to damage their result.

A case is one consumer rank and all producer ranks that write to it: the part that the consumer
verifies before a request runs. Units are sent in random chunks, layers in random order, with
ascending units within each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from connectors.planning.blocks import BlockSet, UnitSet, wanted_units
from connectors.planning.descriptors import Moves, Runs, build_runs
from connectors.planning.layout import EngineLayout, GroupKind
from connectors.planning.plan import PairPlan, plan_pair
from connectors.transport.digest import End, HostMemory, Memory, TransferDigest, digests
from tests.planning.builders import GEMMA, STYLES, Rank, Shape, execute, fill_distinct, make_engine

MANY = 10**6
"""Tokens: more than any case has, so that the window of a prompt that ends there does not
matter.
"""

FULL_ONLY = ((GroupKind.FULL, None, 3),)
MIXED = ((GroupKind.FULL, None, 1), (GroupKind.SLIDING, MANY, 2), (GroupKind.CHUNKED, MANY, 2))
WINDOWS = tuple((kind, window and MANY, layers) for kind, window, layers in GEMMA)
TP_PAIRS = [(p, c) for p in (1, 2, 3, 4) for c in (1, 2, 3, 4)]


@dataclass(frozen=True)
class Pair:
    """One producer rank's plan for the consumer rank, and its digests at either end."""

    producer: Rank
    plan: PairPlan
    source: Callable[[], TransferDigest]
    target: Callable[[], TransferDigest]


@dataclass(frozen=True)
class Scene:
    """Two engines; one rank of the second is the consumer. Used for many transfers."""

    consumer: Rank
    pairs: tuple[Pair, ...]

    def __str__(self) -> str:
        return f"{len(self.pairs)} producers, {len(self.consumer.heads)} heads, {self.consumer.layout.groups}"


def draw_scene(rng: np.random.Generator, memory: Callable[[EngineLayout], Memory] = HostMemory) -> Scene:
    """Random layouts of one model: TP sizes, page styles, block sizes, pool sizes and padding.

    ``memory`` reads a rank's cache for digests.
    """
    heads, groups = int(rng.choice([2, 4, 6, 8])), (FULL_ONLY, MIXED, WINDOWS)[rng.integers(3)]
    tp = TP_PAIRS[rng.integers(len(TP_PAIRS))]
    packed = rng.random() < 0.25
    styles = ["packed", "packed"] if packed else [STYLES[1 + rng.integers(4)] for _ in range(2)]
    row_bytes = int(rng.choice([8, 16, 64]))
    shapes = []
    for style in styles:
        rows = 4 if packed else int(rng.choice([2, 4, 8]))
        blocks = 6 + 12 * 8 // rows
        pad = int(rng.choice([0, 0, 24]))
        shapes.append(
            Shape(heads, style, rows, row_bytes, blocks, pad, bool(rng.integers(2)), groups, block_tokens=rows)
        )
    producers, consumers = make_engine(shapes[0], tp[0]), make_engine(shapes[1], tp[1])
    fill_distinct(producers, shapes[0])
    # Memory that is not written also differs from all content.
    fill_distinct(consumers, shapes[1])
    for rank in consumers:
        for buffer in rank.buffers:
            np.bitwise_not(buffer, out=buffer)
    consumer = consumers[rng.integers(tp[1])]
    pairs = []
    for producer in producers:
        plan = plan_pair(producer.layout, consumer.layout)
        source = digests(plan, memory(producer.layout), End.SOURCE)
        pairs.append(Pair(producer, plan, source, digests(plan, memory(consumer.layout), End.TARGET)))
    return Scene(consumer, tuple(pairs))


@dataclass
class Transfer:
    """One request: its blocks at both ends, and the requested units, by group."""

    scene: Scene
    rng: np.random.Generator
    tables: list[np.ndarray]
    units: list[UnitSet]

    @classmethod
    def draw(cls, scene: Scene, rng: np.random.Generator, at_least: int = 1) -> Transfer:
        """Return a request with at least this number of units in some group."""
        groups, layout = scene.consumer.layout.groups, scene.pairs[0].producer.layout
        tokens = int(rng.integers(8 * at_least, 33)) if at_least > 1 else int(rng.integers(1, 33))
        src = rng.permutation(np.arange(1, layout.num_blocks))
        dst = rng.permutation(np.arange(1, scene.consumer.layout.num_blocks))
        tables, units = [], []
        for theirs, ours, shape in zip(layout.groups, groups, scene.pairs[0].plan.shapes, strict=True):
            counts = [-(-tokens // group.block_tokens) for group in (theirs, ours)]
            if rng.random() < 0.5:
                src[: counts[0]].sort()
                dst[: counts[1]].sort()
            tables.append(src[: counts[0]])
            blocks = BlockSet(np.arange(counts[1], dtype=np.int64), dst[: counts[1]])
            units.append(wanted_units(ours, blocks, shape, tokens))
            src, dst = src[counts[0] :], dst[counts[1] :]
        return cls(scene, rng, tables, units)

    def moves(self, group: int, pair: Pair) -> Moves:
        """All units of a group."""
        units, shape = self.units[group], pair.plan.shapes[group]
        ids = self.tables[group][units.units // shape.src_units]
        return Moves(group, ids, units.units % shape.src_units, units.dst_ids, units.dst_parts)

    def chunks(self, pair: Pair) -> list[Moves]:
        """Return the units in random pieces: ranges of units and of layers, ascending within a
        layer.
        """
        queues: list[list[Moves]] = []
        for group in range(len(self.units)):
            every = self.moves(group, pair)
            layers = len(self.scene.consumer.layout.groups[group].layers)
            cuts = self._cuts(layers)
            for first, stop in zip([0, *cuts], [*cuts, layers], strict=True):
                limits = None if (first, stop) == (0, layers) and self.rng.random() < 0.5 else (first, stop)
                ends = self._cuts(len(every))
                queues.append(
                    [part(every, slice(a, b), limits) for a, b in zip([0, *ends], [*ends, len(every)], strict=True)]
                )
        order = self.rng.permutation(np.repeat(np.arange(len(queues)), [len(queue) for queue in queues]))
        return [queues[at].pop(0) for at in order]

    def _cuts(self, length: int) -> list[int]:
        most = min(3, length - 1)
        if most < 1:
            return []
        return sorted(self.rng.choice(np.arange(1, length), self.rng.integers(0, most + 1), replace=False).tolist())

    def run(self) -> list[str]:
        """Write all units, and return each producer's digest."""
        said = []
        for pair in self.scene.pairs:
            digest = pair.source()
            for move in self.chunks(pair):
                execute(build_runs(pair.plan, [move]))
                digest.add(move.group, move.src_ids, move.src_parts, move.layers)
            said.append(digest.hexdigest())
        return said

    def found(self) -> list[str]:
        """Return the consumer's digest of its own memory, by producer."""
        results = []
        for pair in self.scene.pairs:
            digest = pair.target()
            for group, units in enumerate(self.units):
                digest.add(group, units.dst_ids, units.dst_parts)
            results.append(digest.hexdigest())
        return results

    # ---- damage ---------------------------------------------------------------------------------

    def pick(self, at_least: int = 1) -> tuple[Pair, int]:
        """Return a pair and a group of which it moves this number of units."""
        every = [
            (pair, group)
            for pair in self.scene.pairs
            for group, units in enumerate(self.units)
            if len(units) >= at_least and pair.plan.unit_bytes[group]
        ]
        return every[self.rng.integers(len(every))]

    def runs(self, pair: Pair) -> Runs:
        return build_runs(pair.plan, [self.moves(group, pair) for group in range(len(self.units))])


def part(move: Moves, units: slice, layers: tuple[int, int] | None) -> Moves:
    return Moves(
        move.group, move.src_ids[units], move.src_parts[units], move.dst_ids[units], move.dst_parts[units], layers
    )


def view(address: int, length: int, rank: Rank) -> np.ndarray:
    """Some bytes of a rank's memory."""
    for buffer in rank.buffers:
        offset = address - buffer.ctypes.data
        if offset in range(buffer.nbytes - length + 1):
            return buffer[offset : offset + length]
    raise AssertionError("no such memory")


def flipped_byte(transfer: Transfer) -> None:
    """Flip one bit of one byte of one run."""
    runs = transfer.runs(transfer.pick()[0])
    at = transfer.rng.integers(len(runs))
    offset = transfer.rng.integers(runs.length[at])
    view(int(runs.dst[at] + offset), 1, transfer.scene.consumer)[0] ^= 1 << transfer.rng.integers(8)


def swapped_blocks(transfer: Transfer) -> None:
    """Swap two units of one group that one producer wrote."""
    pair, group = transfer.pick(2)
    move = transfer.moves(group, pair)
    a, b = transfer.rng.choice(len(move), 2, replace=False)
    for here, there in ((a, b), (b, a)):
        one = part(move, slice(here, here + 1), None)
        other = part(move, slice(there, there + 1), None)
        execute(build_runs(pair.plan, [replace(one, src_ids=other.src_ids, src_parts=other.src_parts)]))


def swapped_heads(transfer: Transfer) -> None:
    """Swap two heads of one layer of one block, from any producers."""
    rng, consumer = transfer.rng, transfer.scene.consumer
    _, group = transfer.pick()
    views = consumer.views[group]
    pages = views[rng.integers(len(views))][rng.choice(transfer.units[group].dst_ids)]
    a, b = rng.choice(len(consumer.heads), 2, replace=False)
    pages[[a, b]] = pages[[b, a]]


def truncated_tail(transfer: Transfer) -> None:
    """Undo the end of a write: a part of its last run, or some of its last runs as well."""
    runs = transfer.runs(transfer.pick()[0])
    lost = int(transfer.rng.integers(1, 1 + min(3, len(runs))))
    for at in range(len(runs) - lost, len(runs)):
        length = int(runs.length[at])
        keep = int(transfer.rng.integers(length)) if at == len(runs) - lost else 0
        tail = view(int(runs.dst[at]) + keep, length - keep, transfer.scene.consumer)
        np.bitwise_not(tail, out=tail)


@dataclass(frozen=True)
class Damage:
    """A way to damage a transfer, and its requirements: units in some group, heads on the
    consumer rank.
    """

    do: Callable[[Transfer], None]
    units: int = 1
    heads: int = 1


DAMAGES = {
    "flipped byte": Damage(flipped_byte),
    "swapped blocks": Damage(swapped_blocks, units=2),
    "swapped head slice": Damage(swapped_heads, heads=2),
    "truncated tail": Damage(truncated_tail),
}
