"""Engines of any PP x PCP x TP (x DCP) grid over the memory transport, and an oracle of their
tokens.

The oracle places a token with vLLM's formula for slots (vllm/v1/worker/block_table.py) and a layer
with vLLM's rule for pipeline stages (vllm/distributed/utils.py). Every 8 bytes of content name the
layer, part, head and token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from connectors.planning.blocks import wanted_blocks
from connectors.planning.grid import EVERY_TOKEN, Grid
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, Region, unique_regions
from connectors.planning.plan import check_compatible, consumer_ranks
from connectors.protocol.consumer import Consumer
from connectors.protocol.limits import TransferLimits
from connectors.protocol.producer import Producer
from connectors.protocol.reception import Order
from connectors.protocol.wire import Peer
from connectors.transport.memory import Fabric, MemoryTransport
from tests.planning.builders import HOST, heads_of
from tests.transport.engines import ADDRESS, DECODE, PREFILL, Engines, Worker, agent_name

WORD = 8
CANARY = 2**64 - 1
LAYERS = 7
PROMPT_TOKENS, CHUNKS = 75, (40, 74)
"""The producer computes all but the last token, where the consumer resumes."""
MODEL = {0: ("full", (0, 1, 2, 4, 5)), 1: ("sliding", (3, 6))}
"""Layers of each group. With four stages, the first two have no layer of the second group."""
WINDOW = 20


@dataclass(frozen=True)
class EngineShape:
    """One engine. ``block_tokens`` of one rank; ``token_major``: rows lie outside heads."""

    grid: Grid
    kv_heads: int
    block_tokens: int = 8
    token_major: bool = False


def stages_of(pp_size: int) -> list[list[int]]:
    """vLLM's get_pp_indices: remaining layers go to the last stages but the very last."""
    sizes = [LAYERS // pp_size] * pp_size
    for stage in range(LAYERS % pp_size):
        sizes[-2 - stage] += 1
    layers = iter(range(LAYERS))
    return [[next(layers) for _ in range(size)] for size in sizes]


def dcp_rank(grid: Grid, pcp_rank: int, tp_rank: int) -> int:
    """vLLM's DCP groups: all ranks as (PP, PCP, TP), the last two transposed, cut into runs of
    ``dcp_size``.
    """
    ranks = np.arange(grid.pcp_size * grid.tp_size).reshape(grid.pcp_size, grid.tp_size).T.reshape(-1, grid.dcp_size)
    ((_, position),) = np.argwhere(ranks == pcp_rank * grid.tp_size + tp_rank)
    return int(position)


def stores_everything(grid: Grid, kv_heads: int) -> bool:
    """Whether each head of each token is on some rank, which vLLM ensures by its checks of
    sizes.
    """
    found = {
        (head, dcp_rank(grid, pcp, tp))
        for pcp in range(grid.pcp_size)
        for tp in range(grid.tp_size)
        for head in heads_of(tp, grid.tp_size, kv_heads)
    }
    return len(found) == kv_heads * grid.dcp_size


@dataclass
class GridRank:
    """One worker: its layout, and (block, part, head, row) views of 8-byte words by (group,
    layer number).
    """

    layout: EngineLayout
    shape: EngineShape
    heads: list[int]
    dcp_rank: int
    views: dict[tuple[int, int], np.ndarray] = field(repr=False)
    memory: list[np.ndarray] = field(repr=False)

    def slots(self, group: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens that this rank stores, their positions in the block table, their rows): vLLM's
        formula.
        """
        grid, size = self.shape.grid, self.shape.block_tokens
        world = grid.dcp_size if MODEL[group][0] == "full" else 1
        interleave = grid.interleave_tokens
        virtual_block = size * world
        position = tokens // virtual_block
        offset = tokens - position * virtual_block
        local = (offset // interleave) % world == (self.dcp_rank if world > 1 else 0)
        row = (offset // (world * interleave)) * interleave + offset % interleave
        return tokens[local], position[local], row[local]


def make_rank(shape: EngineShape, blocks: int, pp_rank: int, pcp_rank: int, tp_rank: int) -> GridRank:
    grid, heads = shape.grid, heads_of(tp_rank, shape.grid.tp_size, shape.kv_heads)
    stages, size = stages_of(grid.pp_size), shape.block_tokens
    views, memory, groups = {}, [], []
    for index, (kind, layers) in MODEL.items():
        parts = 2 if kind == "full" else 1
        pages = []
        for layer in (layer for layer in stages[pp_rank] if layer in layers):
            lengths = (blocks, size, parts, len(heads)) if shape.token_major else (blocks, parts, len(heads), size)
            array = np.full(lengths, CANARY, "<u8")
            view = array.transpose(0, 2, 3, 1) if shape.token_major else array
            memory.append(array)
            views[index, layer] = view
            for part in range(parts):
                block, _, head, row = view.strides
                pages.append(
                    LayerPages(
                        layer=f"layers.{layer}",
                        address=array.ctypes.data + part * view.strides[1],
                        block_stride_bytes=block,
                        total_heads=shape.kv_heads,
                        heads=len(heads),
                        head_stride_bytes=head,
                        rows=size,
                        row_stride_bytes=row,
                        row_bytes=WORD,
                        packing="words",
                    )
                )
        sharded = kind == "full" and grid.dcp_size > 1
        names = tuple(tuple(f"layers.{layer}" for layer in stage if layer in layers) for stage in stages)
        groups.append(
            Group(
                index,
                GroupKind(kind),
                size * (grid.dcp_size if sharded else 1),
                WINDOW if kind == "sliding" else None,
                tuple(pages),
                grid.shard(pcp_rank, tp_rank) if sharded else EVERY_TOKEN,
                names if grid.pp_size > 1 else (),
            )
        )
    layout = EngineLayout(
        tp_rank,
        grid.tp_size,
        blocks,
        unique_regions(Region(array.ctypes.data, array.nbytes, HOST) for array in memory),
        tuple(groups),
        pp_rank=pp_rank,
        pp_size=grid.pp_size,
        pcp_rank=pcp_rank,
        pcp_size=grid.pcp_size,
        dcp_size=grid.dcp_size,
        interleave_tokens=grid.interleave_tokens,
    )
    return GridRank(layout, shape, heads, dcp_rank(grid, pcp_rank, tp_rank), views, memory)


def make_engine(shape: EngineShape, blocks: int) -> list[GridRank]:
    grid = shape.grid
    return [
        make_rank(shape, blocks, pp, pcp, tp)
        for pp in range(grid.pp_size)
        for pcp in range(grid.pcp_size)
        for tp in range(grid.tp_size)
    ]


def contents(layer: int, parts: int, heads: Sequence[int], tokens: np.ndarray) -> np.ndarray:
    """(token, part, head) words that no two tokens, heads, parts or layers share."""
    found = np.asarray(layer)
    for index, count in ((tokens, 4096), (np.arange(parts), 8), (np.asarray(heads), 64)):
        found = found[..., None] * count + index
    return found.astype("<u8")


class GridEngines(Engines):
    """Two engines whose ranks use the memory transport, with one request between them."""

    def __init__(self, shapes: tuple[EngineShape, EngineShape], seed: int) -> None:
        self.limits = TransferLimits()
        self.sent: list[str] = []
        self.received: list[tuple[str, str | None]] = []
        self.messages: list[str] = []
        self.bytes_written = self.verified = 0
        self.fabric = Fabric()
        rng = np.random.default_rng(seed)
        self.tables = [self._tables(shape, rng) for shape in shapes]
        pools = [2 + max(int(table.max()) for table in tables) for tables in self.tables]
        self.ranks = [make_engine(shape, pool) for shape, pool in zip(shapes, pools, strict=True)]
        self.prefill = [self._rank(Producer, PREFILL, rank) for rank in self.ranks[0]]
        self.decode = [self._rank(Consumer, DECODE, rank) for rank in self.ranks[1]]
        for producer in self.ranks[0]:
            for consumer in self.ranks[1]:
                check_compatible(producer.layout, consumer.layout)
        talking = [consumer_ranks(rank.layout, self.ranks[1][-1].layout) for rank in self.ranks[0]]
        self.pairs = tuple((p, c) for p, ranks in enumerate(talking) for c in sorted(ranks))
        self._introduce(self.pairs)

    @staticmethod
    def _tables(shape: EngineShape, rng: np.random.Generator) -> list[np.ndarray]:
        sizes = [shape.block_tokens * shape.grid.dcp_size, shape.block_tokens]
        counts = [-(-PROMPT_TOKENS // size) for size in sizes]
        ids = rng.permutation(np.arange(1, 3 + sum(counts)))
        return [ids[: counts[0]], ids[counts[0] : sum(counts)]]

    def _rank(self, side: Any, incarnation: str, rank: GridRank) -> Worker[Any]:
        peer = Peer(incarnation, rank.layout.rank)
        host: Any = SimpleNamespace(peer=peer, transport=MemoryTransport(agent_name(peer), self.fabric))
        host.transport.register(rank.layout.regions)
        worker: Any = Worker(host, rank, side(rank.layout.groups, self.limits))  # type: ignore[arg-type]
        return worker

    def compute(self, before: int, after: int) -> None:
        """A chunk: its tokens appear where vLLM stores them, on every producer rank that stores
        them.
        """
        for rank in self.ranks[0]:
            for (group, layer), view in rank.views.items():
                tokens, positions, rows = rank.slots(group, np.arange(before, after))
                view[self.tables[0][group][positions], :, :, rows] = contents(layer, view.shape[1], rank.heads, tokens)

    def transfer(self) -> None:
        """One request, in two chunks, from the offer to the end of all ranks on both sides."""
        groups = self.ranks[1][0].layout.groups
        end = CHUNKS[-1]
        wanted = tuple(wanted_blocks(g, t.tolist(), 0, end) for g, t in zip(groups, self.tables[1], strict=True))
        self.expect("p", "t", end, "digest")
        self.start(Order("d", "t", ADDRESS, end, "digest", wanted))
        before, given = 0, [0, 0]
        for after in CHUNKS:
            self.compute(before, after)
            new = []
            for group, table in zip(self.ranks[0][0].layout.groups, self.tables[0], strict=True):
                count = -(-after // group.block_tokens)
                new.append(table[given[group.index] : count].tolist())
                given[group.index] = count
            self.progress("p", new, after)
            before = after
        self.finished("p")
        self.until(lambda: (len(self.received), len(self.sent)) == (len(self.decode), len(self.prefill)), "the end")
        assert self.received == [("d", None)] * len(self.decode)
        for consumer in self.decode:
            assert not any(consumer.machine.counts().values())

    def compare(self) -> int:
        """Bytes compared: all memory of all consumer ranks.

        Tokens that attention reads have arrived. Other memory is a canary, or the content of the
        token whose slot it is: units may begin before a window or end behind the prompt.
        """
        compared = 0
        for rank in self.ranks[1]:
            for (group, layer), view in rank.views.items():
                first = max(0, CHUNKS[-1] - WINDOW + 1) if group == 1 else 0
                expected = np.full(view.shape, CANARY, "<u8")
                stop = len(self.tables[1][group]) * rank.layout.groups[group].block_tokens
                tokens, positions, rows = rank.slots(group, np.arange(stop))
                blocks = self.tables[1][group][positions]
                right = contents(layer, view.shape[1], rank.heads, tokens)
                # Nothing was computed behind the prompt: the producer's memory there is a canary,
                # too.
                right[tokens >= CHUNKS[-1]] = CANARY
                expected[blocks, :, :, rows] = right
                needed = np.zeros(view.shape, bool)
                needed[blocks, :, :, rows] = ((tokens >= first) & (tokens < CHUNKS[-1]))[:, None, None]
                assert np.array_equal(view[needed], expected[needed]), (rank.layout.rank, group, layer)
                assert ((view == expected) | (view == CANARY)).all(), (rank.layout.rank, group, layer)
                compared += view.nbytes
        return compared


def check_pair(producer: EngineShape, consumer: EngineShape, seed: int) -> tuple[int, int]:
    """Prove the plans of all ranks and transfer one request.

    Returns the bytes written and the bytes compared.
    """
    engines = GridEngines((producer, consumer), seed)
    engines.transfer()
    return engines.bytes_written, engines.compare()


# ---- the matrix ----------------------------------------------------------------------------------

AXES = [(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 2, 2), (1, 4, 2), (1, 4, 4)]
AXES += [(2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (2, 2, 4)]
"""(PCP, TP, DCP) sizes."""
INTERLEAVES = (1, 4, 8)


def grids(kv_heads: int) -> Iterator[Grid]:
    """One to four stages with every combination of axes that stores every head of every token."""
    for pp_size in range(1, 5):
        for pcp, tp, dcp in AXES:
            for interleave in INTERLEAVES if dcp > 1 else (1,):
                grid = Grid(tp, pp_size, pcp, dcp, interleave)
                if stores_everything(grid, kv_heads):
                    yield grid


def cases(kv_heads: int) -> Iterator[tuple[EngineShape, EngineShape]]:
    """Every pair of grids, each with one of four pairs of block sizes and layouts."""
    every = list(grids(kv_heads))
    for number, (ours, theirs) in enumerate((a, b) for a in every for b in every):
        odd = number % 4
        yield (
            EngineShape(ours, kv_heads, 8, token_major=odd % 2 == 1),
            EngineShape(theirs, kv_heads, 16 if odd >= 2 else 8, token_major=odd == 3),
        )
