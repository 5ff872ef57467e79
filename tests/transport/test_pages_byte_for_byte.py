"""Pages compared byte for byte between the engines for every group after a transfer over NIXL.

A Gemma-3-like cache: two sliding-window groups and a full-attention one, two layers each, layer k
of every group in one region. Producer and consumer machines run end to end, at TP pairs up to (4,2)
and (2,4); only vLLM is missing.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from connectors.planning.blocks import wanted_blocks
from connectors.planning.descriptors import Moves
from connectors.planning.layout import GroupKind
from connectors.protocol.reception import Order
from connectors.protocol.wire import Peer
from tests.planning.builders import CANARY, Rank, Shape, fill_distinct, make_engine, oracle_copy, whole_blocks
from tests.transport.engines import ADDRESS, DECODE, PREFILL, Engines, Host

TP_PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2)]
ROW_BYTES, BLOCK_TOKENS, WINDOW = 256, 4, 8
GROUPS = ((GroupKind.SLIDING, WINDOW, 2), (GroupKind.SLIDING, WINDOW, 2), (GroupKind.FULL, None, 2))
PROMPT_TOKENS = 59
CHUNKS = [16, 30, 45, 58]
"""The producer computes all but the last token, where the consumer resumes."""
GARBAGE = 0xEE
PRODUCER = Shape(row_bytes=ROW_BYTES, num_blocks=80, groups=GROUPS)
CONSUMER = replace(PRODUCER, num_blocks=64)


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[Peer, Host]]:
    """Four ranks per side, registered once."""
    size = 2 * PRODUCER.num_blocks * 4 * BLOCK_TOKENS * ROW_BYTES
    built = {Peer(side, rank): Host(Peer(side, rank), size) for side in (PREFILL, DECODE) for rank in range(4)}
    yield built
    for host in built.values():
        host.transport.close()


def compute(live: list[Rank], final: list[Rank], tables: list[np.ndarray], before: int, after: int) -> None:
    """Compute a chunk: write its tokens' rows to the producers' memory, in every layer of every
    group.
    """
    for rank, source in zip(live, final, strict=True):
        for group, table in enumerate(tables):
            for token in range(before, after):
                block, row = table[token // BLOCK_TOKENS], token % BLOCK_TOKENS
                for view, content in zip(rank.views[group], source.views[group], strict=True):
                    view[block, :, row] = content[block, :, row]


def pages_equal(consumers: list[Rank], producers: list[Rank], moves: list[Moves]) -> None:
    """Check every page of every group, layer and head: the consumer's equals the producer's."""
    compared = 0
    for consumer in consumers:
        for move in moves:
            for layer, view in enumerate(consumer.views[move.group]):
                for at, head in enumerate(consumer.heads):
                    for producer in (rank for rank in producers if head in rank.heads):
                        theirs = producer.views[move.group][layer][move.src_ids, producer.heads.index(head)]
                        assert np.array_equal(view[move.dst_ids, at], theirs), (move.group, layer, head)
                        compared += len(move.dst_ids)
    assert compared


def both(**changes: Any) -> tuple[Shape, Shape]:
    return replace(PRODUCER, **changes), replace(CONSUMER, **changes)


class Case:
    """One request through one pair of engines."""

    def __init__(self, hosts: dict[Peer, Host], tp: tuple[int, int], shapes: tuple[Shape, Shape], seed: int) -> None:
        self.engines = Engines(hosts, shapes, tp)
        self.producers = [worker.rank for worker in self.engines.prefill]
        self.consumers = [worker.rank for worker in self.engines.decode]
        for rank in self.producers:
            for buffer in rank.buffers:
                buffer[:] = GARBAGE
        self.final = make_engine(shapes[0], tp[0], GARBAGE)
        fill_distinct(self.final, shapes[0])
        self.expected = make_engine(shapes[1], tp[1])
        rng = np.random.default_rng(seed)
        blocks = -(-PROMPT_TOKENS // BLOCK_TOKENS)
        self.tables = list(rng.permutation(np.arange(1, PRODUCER.num_blocks))[: 3 * blocks].reshape(3, blocks))
        targets = rng.permutation(np.arange(1, CONSUMER.num_blocks))[: 3 * blocks].reshape(3, blocks)
        layout = self.consumers[0].layout
        wanted = [
            wanted_blocks(group, table.tolist(), 0, PROMPT_TOKENS - 1)
            for group, table in zip(layout.groups, targets, strict=True)
        ]
        self.moves = [
            whole_blocks(group, self.tables[group][blocks.positions], blocks.ids) for group, blocks in enumerate(wanted)
        ]
        self.order = Order("d", f"t{seed}", ADDRESS, PROMPT_TOKENS - 1, "digest", tuple(wanted))

    def bytes_of(self, move: Moves) -> int:
        """Return the bytes of a move over all consumer ranks, if nothing is moved twice."""
        return len(move.dst_ids) * sum(rank.layout.groups[move.group].block_bytes for rank in self.consumers)

    def chunk(self, before: int, after: int) -> None:
        compute(self.producers, self.final, self.tables, before, after)
        first, last = -(-before // BLOCK_TOKENS), -(-after // BLOCK_TOKENS)
        self.engines.progress("p", [table[first:last].tolist() for table in self.tables], after)

    def finish(self) -> None:
        """After the end of the producer's request, all KV has arrived and all blocks are
        released.
        """
        self.engines.finished("p")
        everyone = (len(self.consumers), len(self.producers))
        self.engines.until(lambda: (len(self.engines.received), len(self.engines.sent)) == everyone, "the end")
        assert self.engines.received == [("d", None)] * everyone[0]
        assert self.engines.sent == ["p"] * everyone[1]
        assert self.engines.verified == self.engines.messages.count("fin") > 0
        for consumer in self.engines.decode:
            assert not any(consumer.machine.counts().values())
        for producer in self.engines.prefill:
            assert {key: count for key, count in producer.machine.counts().items() if count} == {"remembered": 1}

    def compare(self) -> None:
        """Pages equal the producer's, whole buffers the oracle's: canaries included, no byte too
        many.
        """
        pages_equal(self.consumers, self.producers, self.moves)
        oracle_copy(self.producers, self.expected, self.moves)
        for rank, reference in zip(self.consumers, self.expected, strict=True):
            for ours, theirs in zip(rank.buffers, reference.buffers, strict=True):
                assert np.array_equal(ours[: theirs.nbytes], theirs)
                assert (ours[theirs.nbytes :] == CANARY).all()
        assert self.engines.bytes_written == sum(self.bytes_of(move) for move in self.moves)


@pytest.mark.parametrize("style", ["packed", "token_major"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("tp", TP_PAIRS)
def test_streamed(hosts: dict[Peer, Host], tp: tuple[int, int], kv_heads: int, style: str) -> None:
    """With an offer before the first chunk, blocks arrive chunk by chunk; at the end every page
    is equal.
    """
    case = Case(hosts, tp, both(kv_heads=kv_heads, style=style), seed=100 * tp[0] + 10 * tp[1] + kv_heads)
    case.engines.expect("p", case.order.transfer_id, CHUNKS[-1], "digest")
    case.engines.start(case.order)
    before, full = 0, case.moves[2]
    for after in CHUNKS:
        case.chunk(before, after)
        before = after
        if after < CHUNKS[-1]:
            done = after // BLOCK_TOKENS
            landed = whole_blocks(2, full.src_ids[:done], full.dst_ids[:done])
            case.engines.settle(case.bytes_of(landed))
            assert case.engines.bytes_written == case.bytes_of(landed)
            pages_equal(case.consumers, case.producers, [landed])
            assert case.engines.received == []
    case.finish()
    case.compare()


@pytest.mark.parametrize("tp", [(1, 1), (2, 4), (4, 2)])
def test_offered_late(hosts: dict[Peer, Host], tp: tuple[int, int]) -> None:
    """With an offer after the end of prefill, all bytes arrive at once and are equal."""
    case = Case(hosts, tp, both(style="packed"), seed=7)
    case.engines.expect("p", case.order.transfer_id, CHUNKS[-1], "digest")
    for before, after in zip([0, *CHUNKS], CHUNKS, strict=False):
        case.chunk(before, after)
    case.engines.finished("p")
    assert case.engines.sent == []
    case.engines.start(case.order)
    case.finish()
    case.compare()


@pytest.mark.parametrize("tp", [(1, 2), (4, 2)])
def test_offered_first(hosts: dict[Peer, Host], tp: tuple[int, int]) -> None:
    """The offer reaches the producer before its request does."""
    case = Case(hosts, tp, both(kv_heads=2, style="packed"), seed=8)
    case.engines.start(case.order)
    case.engines.until(lambda: all(w.machine.counts()["early"] for w in case.engines.prefill), "the offer's arrival")
    case.engines.expect("p", case.order.transfer_id, CHUNKS[-1], "digest")
    for before, after in zip([0, *CHUNKS], CHUNKS, strict=False):
        case.chunk(before, after)
    case.finish()
    case.compare()


def test_different_layouts(hosts: dict[Peer, Host]) -> None:
    """Token-major padded pages on one side, head-major ones on the other: still byte for byte."""
    shapes = (replace(PRODUCER, style="token_major"), replace(CONSUMER, style="head_major", pad_bytes=64))
    case = Case(hosts, (2, 1), shapes, seed=9)
    case.engines.expect("p", case.order.transfer_id, CHUNKS[-1], "digest")
    case.engines.start(case.order)
    for before, after in zip([0, *CHUNKS], CHUNKS, strict=False):
        case.chunk(before, after)
    case.finish()
    case.compare()
