"""Pages compared byte for byte between the engines for every group after a transfer over NIXL.

A Gemma-3-like cache: two sliding-window groups and a full-attention one, two layers each, layer k
of every group in one region. Producer and consumer machines run end to end; only vLLM is missing.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from connectors.planning.blocks import wanted_blocks
from connectors.planning.descriptors import Moves
from connectors.planning.layout import GroupKind
from connectors.protocol.params import EngineAddress
from connectors.protocol.reception import Order
from connectors.protocol.wire import Peer
from tests.planning.builders import CANARY, Shape, fill_distinct, make_engine, oracle_copy, whole_blocks
from tests.transport.engines import DECODE, PREFILL, Engines, Host

BLOCK_TOKENS, WINDOW = 4, 8
PROMPT_TOKENS = 59
CHUNKS = [16, 30, 45, 58]
"""The producer computes all but the last token, where the consumer resumes."""
GARBAGE = 0xEE
GROUPS = ((GroupKind.SLIDING, WINDOW, 2), (GroupKind.SLIDING, WINDOW, 2), (GroupKind.FULL, None, 2))
PRODUCER = Shape(row_bytes=256, num_blocks=80, groups=GROUPS)
CONSUMER = replace(PRODUCER, num_blocks=64)


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[Peer, Host]]:
    """Four ranks of either side, registered once."""
    size = 2 * PRODUCER.num_blocks * 4 * BLOCK_TOKENS * PRODUCER.row_bytes
    built = {Peer(side, rank): Host(Peer(side, rank), size) for side in (PREFILL, DECODE) for rank in range(4)}
    yield built
    for host in built.values():
        host.transport.close()


class Case:
    """One request through one pair of engines."""

    def __init__(self, hosts: dict[Peer, Host], tp: tuple[int, int], shapes: tuple[Shape, Shape]) -> None:
        self.engines = Engines(hosts, shapes, tp)
        self.producers = [worker.rank for worker in self.engines.prefill]
        self.consumers = [worker.rank for worker in self.engines.decode]
        for rank in self.producers:
            for buffer in rank.buffers:
                buffer[:] = GARBAGE
        self.final = make_engine(shapes[0], tp[0], GARBAGE)
        fill_distinct(self.final, shapes[0])
        self.expected = make_engine(shapes[1], tp[1])
        rng, blocks = np.random.default_rng(tp), -(-PROMPT_TOKENS // BLOCK_TOKENS)
        self.tables, targets = (
            list(rng.permutation(np.arange(1, shape.num_blocks))[: 3 * blocks].reshape(3, blocks)) for shape in shapes
        )
        groups = self.consumers[0].layout.groups
        wanted = [wanted_blocks(g, t.tolist(), 0, PROMPT_TOKENS - 1) for g, t in zip(groups, targets, strict=True)]
        self.moves = [whole_blocks(g, self.tables[g][each.positions], each.ids) for g, each in enumerate(wanted)]
        address = EngineAddress(PREFILL, "host", 1)
        self.order = Order("d", "t", address, PROMPT_TOKENS - 1, "digest", tuple(wanted))

    def bytes_of(self, move: Moves) -> int:
        """Return the bytes of a move over all consumer ranks, if nothing is moved twice."""
        return len(move) * sum(rank.layout.groups[move.group].block_bytes for rank in self.consumers)

    def start(self) -> None:
        self.engines.tell(self.engines.decode, "start", self.order)

    def expect(self) -> None:
        self.engines.tell(self.engines.prefill, "expect", "p", "t", CHUNKS[-1], "digest")

    def chunk(self, before: int, after: int) -> None:
        """Write a chunk's tokens into the producers' memory, in every layer of every group."""
        for rank, source in zip(self.producers, self.final, strict=True):
            for group, table in enumerate(self.tables):
                for token in range(before, after):
                    block, row = table[token // BLOCK_TOKENS], token % BLOCK_TOKENS
                    for view, content in zip(rank.views[group], source.views[group], strict=True):
                        view[block, :, row] = content[block, :, row]
        first, last = -(-before // BLOCK_TOKENS), -(-after // BLOCK_TOKENS)
        new_ids = [table[first:last].tolist() for table in self.tables]
        self.engines.tell(self.engines.prefill, "progress", "p", new_ids, after)

    def check_landed(self, after: int) -> None:
        """Blocks arrive chunk by chunk: those of full attention, complete and equal."""
        full = self.moves[2]
        landed = whole_blocks(2, full.src_ids[: after // BLOCK_TOKENS], full.dst_ids[: after // BLOCK_TOKENS])
        self.engines.settle(self.bytes_of(landed))
        assert self.engines.bytes_written == self.bytes_of(landed)
        assert self.engines.received == []
        for consumer in self.consumers:
            producer = next(rank for rank in self.producers if consumer.heads[0] in rank.heads)
            theirs = producer.views[2][0][landed.src_ids, producer.heads.index(consumer.heads[0])]
            assert np.array_equal(consumer.views[2][0][landed.dst_ids, 0], theirs)

    def check_end(self) -> None:
        """All KV has arrived, all blocks are released, and no byte too many was written."""
        engines, ranks = self.engines, (len(self.consumers), len(self.producers))
        engines.until(lambda: (len(engines.received), len(engines.sent)) == ranks, "the end")
        assert engines.received == [("d", None)] * ranks[0]
        assert engines.sent == ["p"] * ranks[1]
        assert engines.verified == engines.messages.count("fin") > 0
        assert not any(any(worker.machine.counts().values()) for worker in engines.decode)
        for worker in engines.prefill:
            assert {key: count for key, count in worker.machine.counts().items() if count} == {"remembered": 1}
        oracle_copy(self.producers, self.expected, self.moves)
        for rank, reference in zip(self.consumers, self.expected, strict=True):
            for ours, theirs in zip(rank.buffers, reference.buffers, strict=True):
                assert np.array_equal(ours[: theirs.nbytes], theirs)
                assert (ours[theirs.nbytes :] == CANARY).all()
        assert engines.bytes_written == sum(self.bytes_of(move) for move in self.moves)


PADDED = (replace(PRODUCER, style="token_major"), replace(CONSUMER, style="head_major", pad_bytes=64))


@pytest.mark.parametrize("offered", ["first", "streamed", "late"])
@pytest.mark.parametrize(
    ("tp", "shapes"),
    [
        ((1, 1), (PRODUCER, CONSUMER)),
        ((2, 1), PADDED),
        *(
            (tp, (replace(PRODUCER, kv_heads=heads, style=style), replace(CONSUMER, kv_heads=heads, style=style)))
            for tp, heads, style in (((1, 2), 4, "packed"), ((2, 4), 2, "packed"), ((4, 2), 2, "token_major"))
        ),
    ],
)
def test_pages_arrive(hosts: dict[Peer, Host], tp: tuple[int, int], shapes: tuple[Shape, Shape], offered: str) -> None:
    """The offer comes before the request, before its first chunk, or after its end."""
    case = Case(hosts, tp, shapes)
    if offered == "first":
        case.start()
        case.engines.until(lambda: all(w.machine.counts()["early"] for w in case.engines.prefill), "an offer")
    case.expect()
    if offered == "streamed":
        case.start()
    for before, after in zip([0, *CHUNKS], CHUNKS, strict=False):
        case.chunk(before, after)
        if offered == "streamed" and after < CHUNKS[-1]:
            case.check_landed(after)
    case.engines.tell(case.engines.prefill, "finished", "p", True, "")
    if offered == "late":
        assert case.engines.sent == []
        case.start()
    case.check_end()
